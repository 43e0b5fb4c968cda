"""The random number generators of a process (Python, numpy, torch, its device) as one tensor of bytes."""

import json
import random

import numpy as np
import torch
from torch import Tensor


def read(device: torch.device) -> Tensor:
    """Return the state of all generators, [bytes] uint8."""
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


def write(saved: Tensor, device: torch.device) -> None:
    """Restore what `read` returned. The device's generator is restored only if both devices are accelerators."""
    state = json.loads(bytes(saved.tolist()))

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))

    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))

    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["device"] is not None and device.type != "cpu":
        device_state = torch.tensor(state["device"], dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(device_state, device)
