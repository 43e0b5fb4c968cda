"""Copies of a checkpoint in host memory: device tensors, and the state of the random number generators.

A direct copy to pageable memory goes through the driver's own staging, at a fraction of the bus's bandwidth. Here, one
pinned buffer is filled by the device while another one is emptied by the host.
"""

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

STAGING_BYTES = 64 * 2**20  # of each of two buffers
SMALL_BYTES = 2**16  # below, a direct copy is as fast


class HostCopier:
    """Copies local tensors of one device to host memory.

    Example::

        copy = HostCopier(torch.device("cuda:0"))
        copy(parameter)  # host tensor of the same shape and dtype
    """

    def __init__(self, device: torch.device, *, staging_bytes: int = STAGING_BYTES):
        self._device = device
        self._staging_bytes = staging_bytes
        self._buffers: list[Tensor] = []  # kept: pinning memory is slow

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy. It is complete when this returns."""
        source = tensor.detach()
        copy = torch.empty(source.shape, dtype=source.dtype)
        if source.device.type == "cpu" or source.nbytes < SMALL_BYTES:
            return copy.copy_(source)

        self._copy(_bytes(source.contiguous()), _bytes(copy))
        return copy

    def _copy(self, source: Tensor, out: Tensor) -> None:
        """Copy bytes [n] from the device: it fills one buffer while the host empties the other."""
        if not self._buffers:
            self._buffers = [torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

        def finish(event: Any, buffer: Tensor, destination: Tensor) -> None:
            event.synchronize()
            destination.copy_(buffer)

        pending: tuple[Any, Tensor, Tensor] | None = None  # event, buffer, destination
        parts = zip(source.split(self._staging_bytes), out.split(self._staging_bytes), strict=True)
        for index, (part, destination) in enumerate(parts):
            buffer = self._buffers[index % 2][: part.numel()]
            buffer.copy_(part, non_blocking=True)
            event = torch.get_device_module(self._device).Event()
            event.record()

            if pending is not None:
                finish(*pending)
            pending = event, buffer, destination
        if pending is not None:
            finish(*pending)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def read_rng(device: torch.device) -> Tensor:
    """Return the state of Python's, numpy's, torch's and the device's generators as one tensor, [bytes] uint8."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    device_state = None
    if device.type != "cpu":
        device_state = torch.get_device_module(device).get_rng_state(device).tolist()

    state = {
        "python": [version, numbers, gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        "device": device_state,
    }
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def write_rng(saved: Tensor, device: torch.device) -> None:
    """Restore what `read_rng` returned. The device's generator is restored only if both devices are accelerators."""
    state = json.loads(bytes(saved.tolist()))

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))

    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))

    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["device"] is not None and device.type != "cpu":
        device_state = torch.tensor(state["device"], dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(device_state, device)
