"""The trainer's memory at real size, without weights or devices: the trainer's code on fake tensors, counted by torch.

    python -m tests.standin.fake_memory out.json '[{"model": "qwen3_4b", "ranks": 4, "checkpointing": "all"}, …]'

Sharding, the train step, the LM head, attention and the optimizer are the application's. Replaced is only what would
read a value: the checkpoint's rows, the layout of sequences, the gradient norm, metric sums. torch's FSDPMemTracker
keeps the peak of every phase that `mode=plan` names. Workspaces of kernels and the allocator's fragmentation are not
seen.

A fake tensor of type `cuda` aborts torch without CUDA, so the device's type is `npu` in every case; `device` decides
what the trainer does on it.
"""

import gc
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import _disable_current_modes

from app.device.base import LinearKernels
from tests.bench.random_model import text_config
from tests.standin.elementwise_double import DOUBLE

TYPE = "npu"
INDEX = 0
STEPS, MICROBATCHES = 2, 2  # from the second on there are Adam's moments, and gradients
NOT_FOUND = ("sync buffers", "runtime")  # items of the plan that the trainer's tensors do not have
PHASES = {
    "loss and head": ("head, forward", "head, backward"),
    "backward of a layer": ("backward of a layer",),
    "backward of the embedding": ("backward of the embedding",),
    "optimizer update": ("optimizer update",),
}


@dataclass(frozen=True)
class Case:
    model: str  # a preset
    ranks: int
    checkpointing: str = "all"
    device: str = "cuda"
    tokens: int = 10_240
    layers: int | None = None  # None: all
    loop: bool = False  # linear attention in transformers' torch loop
    rank: int = 0  # of adapters
    moments: str = "step"  # offload.optimizer


class KnownNorm(float):
    """A norm with a value, also for `torch.isfinite`."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> bool:
        return True


class PhaseTracker(FSDPMemTracker):
    """FSDPMemTracker that keeps the peak of each phase, in bytes."""

    phase = "before"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.phases: dict[str, int] = defaultdict(int)

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, now in self._curr_mem_snap.items():
            if device.type == TYPE:
                self.phases[self.phase] = max(self.phases[self.phase], now["Total"])


def groups(tokens: int) -> list[Any]:
    """One sequence of this many tokens, a fifth of them the prompt."""
    from app.types import Prompt
    from tests.bench.trainer import random_group

    prompt = Prompt("p@0", np.zeros(tokens // 5, np.int32), "", "fake")
    return [random_group(prompt, [tokens - tokens // 5], np.random.default_rng(0), vocabulary=100)]


@contextmanager
def fake_ranks(ranks: int, rank: int = 0, device: str = TYPE) -> Iterator[Any]:
    """The mesh as one of these ranks sees it; collectives do nothing."""
    backends = ",".join(f"{each}:fake" for each in {"cpu", device})
    dist.init_process_group(backends, rank=rank, world_size=ranks, store=fake_pg.FakeStore())
    try:
        yield init_device_mesh(device, (ranks,))
    finally:
        dist.destroy_process_group()


def build(case: Case, mesh: Any, device: torch.device | None = None) -> Any:
    """`load`, in its own order, without a checkpoint."""
    from app.config.device import DeviceKind
    from app.config.model import LoraConfig
    from app.config.trainer import Checkpointing, Compile
    from app.device import device_of
    from app.device.torchvision_shim import transformers
    from app.model import load
    from app.model.attention import PACKED, register_packed
    from app.model.kernels import kernels_of

    register_packed()

    def on_meta(_: Path, dtype: torch.dtype, *_rest: Any) -> Any:
        with torch.device("meta"):
            auto = transformers().AutoModelForCausalLM
            return auto.from_config(text_config(case.model, case.layers), dtype=dtype, attn_implementation=PACKED)

    linear = None if case.loop else doubles(npu=case.device == "npu")
    kernels = replace(kernels_of(device_of(DeviceKind[case.device]), Compile.off), attention=None, linear=linear)
    if kernels.elementwise is not None:
        kernels = replace(kernels, elementwise=DOUBLE)

    def names(lm: Any, *_: Any) -> dict[str, str]:
        return {name: name for name, _ in lm.named_parameters()}

    valued = ("_check_head", "open_checkpoint", "_fill", "_compute_buffers", "initialize")
    without = {name: mock.Mock() for name in valued}
    without["open_checkpoint"] = mock.MagicMock()
    without["working_kernels"] = mock.Mock(return_value=linear)
    with mock.patch.multiple(load, _on_meta=on_meta, _match=names, **without):
        return load.load(
            Path(),
            mesh=mesh,
            device=device or torch.device(TYPE, INDEX),
            compute_dtype=torch.bfloat16,
            kernels=kernels,
            activation_checkpointing=Checkpointing[case.checkpointing],
            lora=LoraConfig(rank=case.rank),
        )


def empty_on(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@contextmanager
def without_values() -> Iterator[None]:
    """Replace everything that reads a value of a fake tensor."""
    from app.algorithm.metrics import TABLE
    from app.model import packing
    from app.model.packing import Layout, Packing
    from app.trainer import microbatch, optimizer, step
    from app.trainer.reductions import RawSums, UnreadSums

    lay_out, norm = vars(Packing)["of"].__func__, optimizer.grad_norm

    def layout(cls: Any, boundaries: Any, device: Any = "cpu", tokens: Any = None) -> Packing:
        with _disable_current_modes():
            real = lay_out(cls, boundaries, "cpu", tokens)
        full = None if real.full is None else moved(real.full, device)
        cu_seqlens = empty_on(real.cu_seqlens, device)
        return replace(real, cu_seqlens=cu_seqlens, full=full, buckets=moved(real.buckets, device))

    def moved(layout: Layout, device: Any) -> Layout:
        tensors = {name: empty_on(getattr(layout, name), device) for name in ("source", "place", "taken", "repeated")}
        return replace(layout, **tensors, copies=tuple(empty_on(each, device) for each in layout.copies))

    def known_norm(gradients: list[torch.Tensor]) -> KnownNorm:
        norm(gradients)
        return KnownNorm(0.5)

    with (
        mock.patch("torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT", 0),  # no scalars with values
        mock.patch("torch.optim.adam._get_value", return_value=1.0),
        mock.patch.object(Packing, "of", classmethod(layout)),
        mock.patch.object(packing, "to_device", empty_on),
        mock.patch.object(microbatch, "to_device", empty_on),
        mock.patch.object(optimizer, "grad_norm", known_norm),
        mock.patch.object(step, "update_metrics", return_value={}),
        mock.patch.object(RawSums, "all_reduce", lambda sums: sums),
        mock.patch.object(UnreadSums, "read", return_value=RawSums(demonstrated=1.0, sums=dict.fromkeys(TABLE, 1.0))),
    ):
        yield


class Convolution(torch.autograd.Function):
    """What the causal convolution of fla-core 0.6.0 allocates and keeps, read from its source; no values."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, npu: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.npu = npu
        if npu:
            # Before the activation. It is found again where the layer's activations are kept, not where recomputed.
            x.before = torch.empty_like(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        before = getattr(x, "before", None)
        if before is None:
            before = torch.empty_like(x)
        out = torch.empty_like(x), torch.empty_like(weight), None
        partial = torch.empty(-(-x.shape[1] // 64), *weight.shape, device=x.device)
        del before, partial
        return out


class DeltaRule(torch.autograd.Function):
    """The same of its chunked gated delta rule. `wide` are queries and keys by value head, which are summed later."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, npu: bool) -> torch.Tensor:
        q, k, v = (each.contiguous() for each in (q, k, v))
        rstd = [torch.empty(*each.shape[:3], device=each.device) for each in (q, k)]
        normed = [torch.empty_like(q), torch.empty_like(k)]
        chunks = torch.empty(*v.shape[:3], 64, device=v.device) if npu else None
        a = v.new_empty(*v.shape[:3], 64)
        del chunks
        w, u, new, out = (torch.empty_like(v) for _ in range(4))
        h = states(v)
        ctx.save_for_backward(*normed, *rstd, v, torch.empty_like(g), beta, a)
        ctx.npu = npu
        del w, u, new, h
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        q, k, _, _, v, g, beta, a = ctx.saved_tensors
        w, u, new, dv = (torch.empty_like(v) for _ in range(4))
        h, dh = states(v), states(v)
        wide = [torch.empty_like(v) for _ in range(2)]
        dw = torch.empty_like(v)
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        del wide
        dk2, dv2 = torch.empty_like(v), torch.empty_like(v)
        da = [torch.empty_like(a, dtype=torch.float32) for _ in range(3)] if ctx.npu else [torch.empty_like(a)]
        dg, db = torch.empty_like(g), torch.empty_like(beta)
        del w, u, new, dv, h, dh, dw, dk2, da
        return dq, dk, dv2, dg, db, None


def states(v: torch.Tensor) -> torch.Tensor:
    """One state of each chunk and head; keys are as wide as values."""
    return v.new_empty(1, -(-v.shape[1] // 64), v.shape[2], v.shape[3], v.shape[3])


def doubles(*, npu: bool) -> LinearKernels:
    def convolve(x: Any, weight: Any, *_: Any) -> torch.Tensor:
        return Convolution.apply(x, weight, npu)

    def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, *_: Any) -> torch.Tensor:
        return DeltaRule.apply(q, k, v, g, beta, npu)

    return LinearKernels(convolve, delta_rule)


@contextmanager
def phases_marked(tracker: PhaseTracker, policy: Any, optimizer: Any) -> Iterator[None]:
    """Set the tracker's phase by hooks of the policy, its head and the optimizer."""
    from app.model import lm_head

    kind = lm_head._TokenLogprobs
    forward, backward = kind.forward, kind.backward

    def enter(name: str) -> Any:
        def hook(*_: Any) -> None:
            tracker.phase = name

        return hook

    def head_forward(*given: Any) -> Any:
        tracker.phase = "head, forward"
        return forward(*given)

    def head_backward(*given: Any) -> Any:
        tracker.phase = "head, backward"
        out = backward(*given)
        tracker.phase = "backward of a layer"
        return out

    policy.register_forward_pre_hook(enter("forward"))
    embedding = policy.causal_lm.get_decoder().embed_tokens
    if embedding.weight.requires_grad:
        embedding.register_forward_hook(
            lambda _m, _i, out: out.register_hook(enter("backward of the embedding")) and None
        )
    optimizer.torch_optimizer.register_step_pre_hook(enter("optimizer update"))
    with mock.patch.multiple(kind, forward=staticmethod(head_forward), backward=staticmethod(head_backward)):
        yield


def measure(case: Case) -> dict[str, int]:
    """Return the peak of each phase, in bytes."""
    from app.config.algorithm import AlgorithmConfig, Correction
    from app.config.device import DeviceKind
    from app.config.trainer import TrainerConfig
    from app.device import device_of
    from app.trainer.host_state import HostTensors
    from app.trainer.optimizer import PolicyOptimizer
    from app.trainer.step import StepSettings, TrainStep

    adds = mock.patch("app.model.lm_head.adds_products", return_value=case.device == "cuda")
    with fake_ranks(case.ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True), without_values(), adds:
        policy = build(case, mesh)
        fused = device_of(DeviceKind[case.device]).fused_optimizer
        host = HostTensors(torch.device(TYPE, INDEX)) if case.moments == "update" else None
        optimizer = PolicyOptimizer(policy.parameters(), TrainerConfig(), fused=fused, host=host)
        settings = StepSettings(AlgorithmConfig(updates_per_step=1), Correction.none, 1.0, 8192, case.tokens)
        step = TrainStep(policy, optimizer, settings, torch.device(TYPE, INDEX))
        tracker = PhaseTracker(policy, optimizer.torch_optimizer)
        with phases_marked(tracker, policy, optimizer), tracker:
            for version in range(1, STEPS + 1):
                tracker.phases.clear()
                step.begin(version)
                for _ in range(MICROBATCHES):
                    tracker.reset_mod_stats()
                    step.add_groups(groups(case.tokens) * case.ranks)
                tracker.phase = "optimizer update"
                step.finish()
                gc.collect()
        return dict(tracker.phases)


def planned(case: Case) -> dict[str, float]:
    """Return the bytes of the trainer's tensors in its phases of `mode=plan`."""
    from app.device import device_of
    from app.mode.plan.memory import plan_memory
    from app.model.architecture import QWEN3_4B as FOUR
    from app.model.architecture import QWEN35_9B as NINE
    from tests.compose import composed

    config = composed(
        f"device={case.device}",
        "placement=fully_async",
        f"model={case.model}{'_lora' if case.rank else ''}",
        f"model.lora.rank={case.rank}",
        f"placement.trainer_devices={case.ranks}",
        f"trainer.activation_checkpointing={case.checkpointing}",
        f"offload.optimizer={case.moments}",
        f"trainer.tokens_per_microbatch={case.tokens}",
        "rollout.max_prompt_tokens=2048",
        f"rollout.max_completion_tokens={case.tokens - 2048}",
    )
    device = device_of(config.device.kind)
    if case.loop:
        device = replace(device, linear_attention=None)
    model = FOUR if case.model == "qwen3_4b" else NINE
    if case.layers is not None:
        full = case.layers if model.linear is None else case.layers // 4
        model = replace(model, layers=case.layers, full_layers=full)

    phases = plan_memory(config, device, model).phases
    return {
        phase.name: sum(size for item, size in phase.items.items() if item not in NOT_FOUND)
        for phase in phases
        if phase.device == "trainer device"
    }


def compared(case: Case) -> dict[str, Any]:
    """Return plan and measurement of each phase, in bytes."""
    found, plan = measure(case), planned(case)
    phases = {
        name: {"plan": plan.get(name), "found": max(found.get(part, 0) for part in parts)}
        for name, parts in PHASES.items()
    }
    return {"case": asdict(case), "phases": phases}


def main() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from app.device.torchvision_shim import define_operators
    from tests.standin.still_device import StillDevice

    _setup_privateuseone_for_python_backend(TYPE, backend_module=StillDevice())
    define_operators()
    results = [compared(Case(**case)) for case in json.loads(sys.argv[2])]
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
