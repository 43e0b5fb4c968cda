"""A stand-in for torch_npu: `device=npu` on a machine without one. Its parent folder has to be on PYTHONPATH.

The device is C++ (standin.cpp), compiled once per torch and source. Tests turn on what they want refused:

    torch_npu.refuse(float64=True, memory=2**20)
"""

import contextlib
import importlib.util
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch_npu.build import NAME, built

from tests.standin import elementwise_double, still_device

_spec = importlib.util.spec_from_file_location(NAME, built())
assert _spec is not None
assert _spec.loader is not None
torch.utils.rename_privateuse1_backend("npu")
native: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)
native.register_hooks()


class Event(still_device.Event):
    def synchronize(self) -> None:
        native.synchronize()


class Stream(still_device.Stream):
    event_type = Event

    def synchronize(self) -> None:
        native.synchronize()


def _index(device: Any) -> int:
    if device is None:
        return native.current_device()
    index = torch.device(device).index if isinstance(device, str) else getattr(device, "index", device)
    return native.current_device() if index is None else int(index)


class _Module(still_device.StillDevice):
    """`torch.npu`."""

    Event, Stream = Event, Stream

    def device_count(self) -> int:
        return native.device_count()

    def current_device(self) -> int:
        return native.current_device()

    def set_device(self, device: Any) -> None:
        native.set_device(_index(device))

    def synchronize(self, device: Any = None) -> None:
        native.synchronize()

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def memory_allocated(self, device: Any = None) -> int:
        return native.used(_index(device))

    def max_memory_allocated(self, device: Any = None) -> int:
        return native.peak(_index(device))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        native.reset_peak(_index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return native.room() - native.used(_index(device)), native.room()


torch.utils.generate_methods_for_privateuse1_backend()
torch._register_device_module("npu", _Module())

_gather_of_torch = dist.gather


def _gather(tensor: Any, gather_list: Any = None, dst: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """torch_npu 2.10's replacement of torch.distributed.gather: its signature, and its way, an all_gather.

    It also replaces gather_object, by one that calls this with `dst`; torch's own, left alone here, does the same work.
    """
    if tensor.device.type != "npu":
        return _gather_of_torch(tensor, gather_list, dst, group, async_op)
    sizes = [each.size() for each in gather_list] if gather_list else [()] * dist.get_world_size(group)
    dist.broadcast_object_list(sizes, dst, group)
    found = gather_list or [torch.empty(size, dtype=tensor.dtype, device=tensor.device) for size in sizes]
    return dist.all_gather(found, tensor, group, async_op)


setattr(dist, "gather", _gather)  # noqa: B010 (of another signature)


def _hccl(options: Any, backend_options: Any) -> Any:
    inner = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return native.collective(inner)


dist.Backend.register_backend("hccl", _hccl, extended_api=True, devices=["npu"])


def refuse(*, float64: bool | None = None, memory: int | None = None) -> None:
    if float64 is not None:
        native.set_float64(not float64)
    if memory is not None:
        native.set_room(memory)


def npu_fusion_attention(
    query: torch.Tensor,  # [T, H, D]
    key: torch.Tensor,  # [T, K, D]
    value: torch.Tensor,  # [T, K, D]
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor,
    scale: float,
    actual_seq_qlen: tuple[int, ...],
    actual_seq_kvlen: tuple[int, ...],
    sparse_mode: int,
) -> tuple[torch.Tensor, ...]:
    """The fused kernel for packed sequences, causal within each; what the real one requires is checked."""
    assert (input_layout, sparse_mode, head_num) == ("TND", 3, query.shape[1])
    assert query.dtype in (torch.float16, torch.bfloat16), query.dtype
    assert actual_seq_qlen == actual_seq_kvlen
    assert actual_seq_qlen[-1] == query.shape[0]
    assert all(isinstance(end, int) for end in actual_seq_qlen)
    assert atten_mask.shape == (2048, 2048)

    def attend(start: int, end: int) -> torch.Tensor:
        q, k, v = (each[None, start:end].transpose(1, 2) for each in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)[0]

    return (torch.cat([attend(start, end) for start, end in itertools.pairwise([0, *actual_seq_qlen])]),)


for _operator in elementwise_double.GRADIENTS:
    globals()[_operator] = getattr(torch.ops.npu, _operator)
