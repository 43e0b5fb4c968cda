"""Copies of device tensors in pageable host memory, staged through pinned memory.

A direct copy to pageable memory goes through the driver's own staging, at a fraction of the bus's bandwidth. Here, one
pinned buffer is filled by the device while another one is emptied by the host.
"""

from typing import Any

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
        """Copy bytes [n] from the device: part k + 1 is on its way while part k is taken from its buffer."""
        if not self._buffers:
            self._buffers = [torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

        on_its_way: tuple[Tensor, Tensor, Any] | None = None  # destination, buffer, event
        parts = zip(source.split(self._staging_bytes), out.split(self._staging_bytes), strict=True)
        for index, (part, destination) in enumerate(parts):
            buffer = self._buffers[index % 2][: part.numel()]
            buffer.copy_(part, non_blocking=True)
            event = torch.get_device_module(self._device).Event()
            event.record()

            _take(on_its_way)
            on_its_way = (destination, buffer, event)
        _take(on_its_way)


def _take(part: tuple[Tensor, Tensor, Any] | None) -> None:
    """Wait for a part, and copy it out of its buffer."""
    if part is not None:
        destination, buffer, event = part
        event.synchronize()
        destination.copy_(buffer)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
