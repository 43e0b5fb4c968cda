"""`mode=parity`: does this device compute the same as a CPU in float32?

- Engine: a weight sync into a real engine must equal the exported checkpoint, and the log-probabilities of the engine's
  completions must equal those of the reference model, also after a sync of weights with noise and one that takes it
  back; with LoRA, for each of several versions of random adapters.
- Trainer: a fixed packed batch runs forward and backward on the device and on the CPU, with the loading, packing,
  attention and head of training. Log-probabilities, a policy-gradient loss and the gradients of each layer must agree.

The bounds are above the rounding error of the dtype and below the error of a wrong kernel. On the tiny model, bfloat16
is off by 0.027 per log-probability and by 1.4 % in gradients; attention across sequence boundaries by 0.09 and 8 %.
"""

import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.config import RunConfig
from app.config.device import Dtype
from app.config.model import LoraConfig
from app.device import device_of
from app.errors import FAILED_EXIT
from app.mode import ModeResult
from app.mode.parity.engine import ADAPTER_SEEDS, Sampled, sample, set_weights
from app.model.hf_directory import locate
from app.model.kernels import CPU_KERNELS, Kernels, kernels_of
from app.model.load import load
from app.model.lora.layer import randomize
from app.model.policy import PolicyModel, named_trained_tensors
from app.start.inputs import RunInputs
from app.trainer.microbatch import MicroBatch, Sample, pack
from app.types import Completion, FinishReason, Prompt, TokenSequence

LENGTHS = (37, 5, 64, 18)  # tokens of the packed sequences: no boundary is aligned with a kernel's block size
FILE = "parity.json"
SEED = 0
CPU = torch.device("cpu")

SYNCED = "weight syncs unlike the exported checkpoint"
SYNCED_BOUND = 0.5  # the error is the number of such syncs, 0 or 1
ENGINE = "engine's log-probabilities"
PERTURBED = (ENGINE, f"{ENGINE} with noise in the weights", f"{ENGINE} without it again")  # by version
ADAPTED = tuple(f"{ENGINE} under adapter {version}" for version in range(len(ADAPTER_SEEDS)))
ENGINE_FLOAT32 = 1e-4  # bound for another implementation of the same model
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Errors that rounding explains."""

    logprob: float  # mean absolute difference, nats
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

    logprobs: Tensor  # [N]
    loss: float
    gradients: dict[str, Tensor]  # checkpoint name → gradient


def run(config: RunConfig, folder: Path, inputs: RunInputs) -> ModeResult:
    """Print all comparisons and write `parity.json`. The metric is the worst error as a share of its bound."""
    device = device_of(config.device.kind)
    dtype = config.device.dtype
    trust = config.model.trust_remote_code
    path = locate(config.model)

    # the engine first: later this process holds device memory
    engine_lines = engine_comparisons(config, path, folder, inputs)
    lora = config.model.lora
    reference = compute(path, CPU, Dtype.float32, CPU_KERNELS, trust, lora)
    outcome = compute(path, device.torch_device(), dtype, kernels_of(device, config.trainer.compile), trust, lora)

    lines = [*comparisons(outcome, reference, BOUNDS[dtype]), *engine_lines]
    worst = max(line.error / line.bound if math.isfinite(line.error) else math.inf for line in lines)
    passed = all(line.passed for line in lines)
    result = {
        "device": device.kind.name,
        "dtype": dtype.name,
        "model": config.model.path,
        "torch": torch.__version__,
        "passed": passed,
        "comparisons": [{**asdict(line), "passed": line.passed} for line in lines],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(table(lines, f"{device.kind.name} in {dtype.name} against cpu in float32", folder / FILE) + "\n")
    return ModeResult(worst, 0 if passed else FAILED_EXIT)


def engine_comparisons(config: RunConfig, path: Path, folder: Path, inputs: RunInputs) -> list[Comparison]:
    """Compare an engine's synced weights and its log-probabilities, with LoRA those of each version of the adapters."""
    sampled = sample(config, folder, inputs)
    if error := sampled[-1].error:
        log.error(error)
        return [Comparison(SYNCED, 1.0, SYNCED_BOUND)]

    bound = max(BOUNDS[config.device.dtype].logprob, ENGINE_FLOAT32)
    names = ADAPTED if config.model.lora.enabled else PERTURBED
    differences = mean_differences(config, path, sampled)
    lines = [Comparison(name, error, bound) for name, error in zip(names, differences, strict=True)]
    return [Comparison(SYNCED, 0.0, SYNCED_BOUND), *lines]


def mean_differences(config: RunConfig, path: Path, sampled: Sequence[Sampled]) -> list[float]:
    """Return the mean absolute differences between engine and reference log-probabilities, in nats, by version."""
    trust, lora = config.model.trust_remote_code, config.model.lora
    differences = [math.nan] * len(sampled)
    for seed in dict.fromkeys(each.seed for each in sampled):
        model = load(path, mesh=None, device=CPU, trust_remote_code=trust, lora=lora)
        if seed is not None:
            set_weights(model, seed, getattr(torch, config.device.dtype.name))

        for version, each in enumerate(sampled):
            if each.seed == seed:
                batch = packed([(each.prompt, completion) for completion in each.completions], CPU)
                with torch.no_grad():
                    difference = logprobs_of(model, batch) - batch.rollout_logprobs
                differences[version] = difference.abs().mean().item()
        del model  # before the next one is loaded
    return differences


def compute(
    path: Path,
    device: torch.device,
    dtype: Dtype,
    kernels: Kernels,
    trust_remote_code: bool,
    lora: LoraConfig | None = None,
) -> Outcome:
    """Run forward and backward on the fixed batch, with LoRA through random adapters."""
    torch_dtype = getattr(torch, dtype.name)
    model = load(
        path,
        mesh=None,
        device=device,
        param_dtype=torch_dtype,
        compute_dtype=torch_dtype,
        kernels=kernels,
        trust_remote_code=trust_remote_code,
        lora=lora,
    )
    randomize(model.causal_lm, SEED)
    batch = fixed_batch(model.config.vocab_size, device)

    # the scale makes the loss about 1 for any vocabulary
    logprobs = logprobs_of(model, batch)
    loss = -(batch.advantages[batch.sequence] * logprobs).mean() / math.log(model.config.vocab_size)
    loss.backward()

    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in named_trained_tensors(model)
        if parameter.grad is not None
    }
    return Outcome(logprobs.detach().float().cpu(), loss.item(), gradients)


def fixed_batch(vocabulary: int, device: torch.device) -> MicroBatch:
    """Pack random tokens, the same on every machine; the second half of each sequence is the completion."""
    rng = np.random.default_rng(SEED)
    pairs = []
    for length in LENGTHS:
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        prompt, completion = np.split(tokens, [length // 2])
        logprobs = np.zeros(len(completion), dtype=np.float32)
        pairs.append((prompt, Completion(completion, logprobs, FinishReason.stop, spans=())))
    return packed(pairs, device, advantages=1.0 + 0.5 * rng.standard_normal(len(LENGTHS)))


def packed(
    pairs: Sequence[tuple[np.ndarray, Completion]], device: torch.device, advantages: np.ndarray | None = None
) -> MicroBatch:
    """Pack prompts [P] int32 and their completions as the trainer does; advantages [S] default to 1."""
    samples = []
    for index, (prompt, completion) in enumerate(pairs):
        sequence = TokenSequence.of(Prompt("parity/0@0", prompt, answer="", source="parity"), completion)
        advantage = 1.0 if advantages is None else float(advantages[index])
        samples.append(Sample(sequence, advantage, 1.0, ("parity/0@0", index, 0), len(completion.token_ids)))
    return pack(samples, device)


def logprobs_of(model: PolicyModel, batch: MicroBatch) -> Tensor:
    """Return the log-probabilities of the completion tokens, [N]."""
    logprobs, _ = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        packing=batch.packing,
        logit_positions=batch.logit_positions,
        targets=batch.targets,
        temperature=1.0,
    )
    return logprobs


def comparisons(outcome: Outcome, reference: Outcome, bounds: Bounds) -> list[Comparison]:
    """Compare two outcomes. The gradients of a layer are compared as one vector."""
    difference = (outcome.logprobs - reference.logprobs).abs().mean().item()
    lines = [
        Comparison("log-probabilities", difference, bounds.logprob),
        Comparison("loss", abs(outcome.loss - reference.loss), bounds.loss),
    ]

    errors: dict[str, float] = defaultdict(float)  # by layer: squared norm of the difference
    sizes: dict[str, float] = defaultdict(float)  # and of the reference
    for name, expected in reference.gradients.items():
        actual = outcome.gradients.get(name)
        words = name.split(".")  # of `model.layers.3.mlp.up_proj.weight`: `layer 3`; outside of layers the module
        layer = f"layer {words[words.index('layers') + 1]}" if "layers" in words else words[-2]
        errors[layer] += math.inf if actual is None else (actual - expected).double().square().sum().item()
        sizes[layer] += expected.double().square().sum().item()

    for layer, error in errors.items():
        relative = math.sqrt(error / (sizes[layer] or 1.0))
        lines.append(Comparison(f"gradient of {layer}", relative, bounds.gradient))
    return lines


def table(lines: list[Comparison], title: str, file: Path) -> str:
    """Format the comparisons, one line each, and a summary."""
    width = max(len(line.what) for line in lines)
    rows = [
        f"{'ok' if line.passed else 'FAIL':<4}  {line.what:<{width}}  {line.error:.2e}  allowed {line.bound:.0e}"
        for line in lines
    ]
    failed = sum(not line.passed for line in lines)
    summary = f"{failed} of {len(lines)} out of bounds" if failed else "all within bounds"
    return "\n".join([title, *rows, f"{summary}; {file}"])
