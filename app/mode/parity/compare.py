"""`mode=parity`: does our model code compute on this device what it computes on a CPU in float32?

A fixed small batch of packed sequences goes through the trainer's model on both: the same loading, packing, attention
and head as in training. Compared are log-probabilities, a policy-gradient loss, and gradients layer by layer; each has
a bound that rounding in the device's dtype stays below and a wrong kernel does not: on the tiny model, bfloat16 is off
by 0.027 a log-probability and 1.4 % in gradients, attention over the borders by 0.09 and 8 %. Before that a push goes
into a real engine and the engine samples (parity_engine.py): the weights it then has are those of the checkpoint, its
log-probabilities those of the reference.
"""

import json
import logging
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import RunConfig
from app.config.device import Dtype
from app.device import device_of

if TYPE_CHECKING:
    import torch

LENGTHS = (37, 5, 64, 18)  # tokens of the packed sequences: borders that no kernel's block size hides
FILE = "parity.json"
SEED = 0
PUSH, NOT_ONE = "pushes unlike the exported checkpoint", 0.5
ENGINE_FLOAT32 = 1e-4  # another implementation of the same model
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What rounding explains."""

    logprob: float  # mean absolute difference
    loss: float  # absolute difference, of a loss of about 1
    gradient: float  # |difference| / |reference|, 2-norms of a layer


BOUNDS = {Dtype.float32: Bounds(1e-5, 1e-5, 1e-3), Dtype.bfloat16: Bounds(0.05, 0.02, 0.06)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.bound


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one device computed, on the host in float32."""

    logprobs: "torch.Tensor"  # [N]
    loss: float
    gradients: "dict[str, torch.Tensor]"  # checkpoint's name → gradient


def compare(config: RunConfig, folder: Path) -> tuple[str, float, bool]:
    """The table, the worst error as a share of its bound, and whether all passed; writes `parity.json` in `folder`."""
    import torch

    from app.model.attention import PACKED
    from app.model.hf_directory import locate

    device, dtype = device_of(config.device.kind), config.device.dtype
    path = locate(config.model, seed=config.seed)
    of_engine = engine_comparisons(config, path, folder)  # first: later this process holds memory of the device
    reference = compute(path, torch.device("cpu"), Dtype.float32, PACKED, config.model.trust_remote_code)
    here = compute(path, device.torch_device(), dtype, device.attention, config.model.trust_remote_code)
    lines = [*comparisons(here, reference, BOUNDS[dtype]), *of_engine]
    worst = max(line.error / line.bound if math.isfinite(line.error) else math.inf for line in lines)
    passed = all(line.passed for line in lines)
    said = {
        "device": device.kind.name,
        "dtype": dtype.name,
        "attention": device.attention,
        "model": config.model.path or config.model.name,
        "torch": torch.__version__,
        "passed": passed,
        "comparisons": [{**asdict(line), "passed": line.passed} for line in lines],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(said, indent=2) + "\n")
    return table(lines, f"{device.kind.name} in {dtype.name} against cpu in float32", folder / FILE), worst, passed


def engine_comparisons(config: RunConfig, path: Path, folder: Path) -> list[Comparison]:
    """The lines about a push and about what an engine says of the tokens that it sampled."""
    from app.mode.parity.engine import mean_difference, sample

    sampled = sample(config, folder)
    if not sampled.pushed:
        log.error(sampled.told)
        return [Comparison(PUSH, 1.0, NOT_ONE)]
    difference = mean_difference(path, sampled, trust_remote_code=config.model.trust_remote_code)
    bound = max(BOUNDS[config.device.dtype].logprob, ENGINE_FLOAT32)
    return [Comparison(PUSH, 0.0, NOT_ONE), Comparison("engine's log-probabilities", difference, bound)]


def compute(path: Path, device: "torch.device", dtype: Dtype, attention: str, trust_remote_code: bool) -> Outcome:
    """Forward and backward of the fixed batch."""
    import torch

    from app.model.load import load
    from app.model.policy import named_checkpoint_tensors

    kind = getattr(torch, dtype.name)
    model = load(
        path,
        mesh=None,
        device=device,
        param_dtype=kind,
        compute_dtype=kind,
        attention=attention,
        trust_remote_code=trust_remote_code,
    )
    batch = {name: tensor.to(device) for name, tensor in fixed_batch(model.config.vocab_size).items()}
    advantages = batch.pop("advantages")
    logprobs, _ = model(**batch, temperature=1.0)
    loss = -(advantages * logprobs).mean() / math.log(model.config.vocab_size)  # about 1, whatever the vocabulary
    loss.backward()
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in named_checkpoint_tensors(model)
        if parameter.grad is not None
    }
    return Outcome(logprobs.detach().float().cpu(), loss.item(), gradients)


def fixed_batch(vocabulary: int) -> "dict[str, torch.Tensor]":
    """Random tokens, the same on every machine; the second half of each sequence counts as completion."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    borders = [0, *accumulate(LENGTHS)]
    tokens = torch.randint(0, vocabulary, (borders[-1],), generator=generator)
    logit_positions = torch.cat(
        [torch.arange(a + n // 2 - 1, a + n - 1) for a, n in zip(borders, LENGTHS, strict=False)]
    )
    return {
        "input_ids": tokens[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "cu_seqlens": torch.tensor(borders, dtype=torch.int32),
        "logit_positions": logit_positions,
        "targets": tokens[logit_positions + 1],
        "advantages": 1.0 + 0.5 * torch.randn(len(logit_positions), generator=generator),
    }


def comparisons(here: Outcome, reference: Outcome, bounds: Bounds) -> list[Comparison]:
    """The lines of the table: a layer's gradient is compared as one vector."""
    difference = (here.logprobs - reference.logprobs).abs().mean().item()
    lines = [
        Comparison("log-probabilities", difference, bounds.logprob),
        Comparison("loss", abs(here.loss - reference.loss), bounds.loss),
    ]
    squared: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, wanted in reference.gradients.items():
        got = here.gradients.get(name)
        part = squared[layer_of(name)]
        part[0] += math.inf if got is None else (got - wanted).double().square().sum().item()
        part[1] += wanted.double().square().sum().item()
    for layer, (error, size) in squared.items():
        relative = math.sqrt(error / size) if size > 0 else math.sqrt(error)
        lines.append(Comparison(f"gradient of {layer}", relative, bounds.gradient))
    return lines


def layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` → `layer 3`; anything outside of the layers by its module's name."""
    words = name.split(".")
    return f"layer {words[words.index('layers') + 1]}" if "layers" in words else words[-2]


def table(lines: list[Comparison], title: str, file: Path) -> str:
    width = max(len(line.what) for line in lines)
    told = [
        f"{'ok' if line.passed else 'FAIL':<4}  {line.what:<{width}}  {line.error:.2e}  allowed {line.bound:.0e}"
        for line in lines
    ]
    failed = sum(not line.passed for line in lines)
    verdict = "all within their bounds" if failed == 0 else f"{failed} of {len(lines)} beyond their bounds"
    return "\n".join([title, *told, f"{verdict}; {file}"])
