"""The random numbers of a process (Python's, numpy's, torch's, its device's), as one tensor of bytes."""

import json
import random

import numpy as np
import torch
from torch import Tensor


def read(device: torch.device) -> Tensor:
    """[bytes] uint8: where the generators stand."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, numbers, gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device).tolist(),
    }
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def write(state: Tensor, device: torch.device) -> None:
    """Put the generators where `read` found them; a device's only if it was of the same kind of device."""
    told = json.loads(bytes(state.tolist()))
    version, numbers, gauss = told["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = told["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(told["torch"], dtype=torch.uint8))
    if told["device"] is not None and device.type != "cpu":
        generator = torch.tensor(told["device"], dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(generator, device)
