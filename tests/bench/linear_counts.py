"""Kernels and bytes of Qwen3.5-9B's linear attention: torch's loop over chunks, and fla-core's kernels.

    pip install --no-deps --target /tmp/fla fla-core==0.6.0
    PYTHONPATH=/tmp/fla python -m tests.bench.linear_counts tests/bench/results/linear_counts.json

Counted is what one layer launches for a microbatch of 8,192 tokens: the convolution and the delta rule, without
projections and norms, forward and backward on meta tensors of real size. Every operator of torch that computes is a
kernel, and so is every launch of Triton; each reads and writes its tensors once, which is a lower bound. A layer whose
activations are recomputed launches twice its forward pass.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.device.base import LinearKernels
from app.device.torchvision_shim import transformers
from app.model import attention, packing
from app.model.packing import Packing
from tests.bench.kernel_counts import ALLOCATIONS, VIEWS, bytes_of

TOKENS = 8192
SEQUENCES = {"one sequence": 1, "four sequences": 4, "sixteen sequences": 16}


class Counter(TorchDispatchMode):
    """Counts operators that compute, and what `launch` is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        # The chunks of a sequence are counted on the host, as fla does.
        if name not in VIEWS and not name.startswith(ALLOCATIONS) and out is not None:
            self.count((args, kwargs, out))
        return out

    def count(self, tensors: Any) -> None:
        moved = {id(each): each for each in tree_leaves(tensors) if isinstance(each, Tensor) and each.is_meta}
        self.kernels += bool(moved)
        self.bytes += sum(map(bytes_of, moved.values()))


@contextmanager
def launches_counted(counter: Counter) -> Iterator[None]:
    """Count Triton's launches and run none."""
    from triton.runtime.jit import KernelInterface

    def launch(*args: Any, **kwargs: Any) -> None:
        counter.count((args, kwargs))

    with mock.patch.object(KernelInterface, "__getitem__", return_value=launch):
        yield


def counted(kernels: LinearKernels, sequences: int) -> dict[str, dict[str, int]]:
    """Count forward and backward of one layer's microbatch of equally long sequences."""
    auto = transformers()
    config = auto.Qwen3_5TextConfig()
    with torch.device("meta"):
        mixer = auto.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

    heads = mixer.num_v_heads
    weight, qkv = tensor(*mixer.conv1d.weight.shape), tensor(1, TOKENS, len(mixer.conv1d.weight))
    decay, beta = tensor(1, TOKENS, heads, dtype=torch.float32), tensor(1, TOKENS, heads)
    looped = kernels == LinearKernels()
    place = "meta" if looped else "cpu"  # of the boundaries, which fla reads in places
    with mock.patch.object(packing, "to_device", lambda values, _: values.to(place)):
        layout = Packing.of([0, *accumulate([TOKENS // sequences] * sequences)])

    counters = {"forward": Counter(), "backward": Counter()}
    with counters["forward"] as forward, launches_counted(forward):
        out = attention._mix(mixer, kernels, layout, weight, qkv, decay, beta)
    gradient = torch.empty_like(out)
    with counters["backward"] as backward, launches_counted(backward):
        torch.autograd.grad(out, (weight, qkv, decay, beta), gradient)
    return {name: {"kernels": each.kernels, "bytes": each.bytes} for name, each in counters.items()}


def of_device(device: str) -> dict[str, Any]:
    """Count on this device's path: `loop`, or fla's kernels of `cuda` or `npu`."""
    kernels = LinearKernels()
    if device == "npu":
        from tests.model import npu_interpreter

        npu_interpreter.pretend()
        npu_interpreter.accept_a_cpus_tensors()
    if device != "loop":
        from app.device.base import FLA_KERNELS as kernels  # noqa: N811
    return {name: counted(kernels, number) for name, number in SEQUENCES.items()}


def main(out: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.linear_counts", "--device"]
    found = {
        device: json.loads(subprocess.run([*command, device], check=True, capture_output=True, text=True).stdout)
        for device in ("loop", "cuda", "npu")
    }
    result = {"model": "Qwen3.5-9B", "tokens": TOKENS, "torch": torch.__version__, "layer": found}
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--device":
        json.dump(of_device(sys.argv[2]), sys.stdout)
    else:
        main(Path(sys.argv[1]))
