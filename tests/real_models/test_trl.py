"""The trainer computes the losses and gradients of TRL's GRPOTrainer for the same completions of SmolLM2.

In float64 both agree but for what is kept in float32, such as old log-probabilities: the definitions are the same.
Float32 shows what a user sees. A loss may cancel to nearly zero: its difference is given in mean |advantage|. Each
case is a step of two updates of plain SGD: the second one has ratios, clips and a KL. Where the two divide by
other counts, `factor` is the quotient of the counts; docs/coming_from.md names every difference.
"""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from app.algorithm.advantage import STD_EPSILON, score
from app.config import RunConfig
from app.config.algorithm import Aggregation, AlgorithmConfig
from app.device.torchvision_shim import transformers
from app.model.hf_directory import load_tokenizer
from app.model.load import load
from app.trainer.step import StepSettings, TrainStep
from app.types import Completion, FinishReason, Group, Prompt, ScoredGroup, Trajectory, VersionSpan
from tests.bench.to_accuracy import TRL_ON_A_CPU
from tests.compose import composed
from tests.folders import ROOT
from tests.real_models import MAKE_S, real_model, trl_python
from tests.trainer.support import RecordingOptimizer, Scenario, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * MAKE_S)]

SCRIPT = str(ROOT / "tests" / "bench" / "trl_loss.py")
GROUPS, GROUP_SIZE, UPDATES, MAX_TOKENS = 8, 8, 2, 24
MICROBATCH = 8  # TRL's, in completions
RANK = 8
TOLERANCE = {"float64": 1e-5, "float32": 1e-4}
ALL, WHOLE = "all", "of completions that were not truncated"  # values of Case.shares
TRL_STD_EPSILON = 1e-4  # added to the standard deviation of a group


@dataclass(frozen=True)
class Case:
    """The same algorithm in the settings of both."""

    ours: str
    trl: dict[str, Any]
    shares: str = ""  # tokens of the step that TRL divides an update's loss by its even share of, in place of its own
    adapters: bool = False
    lr: float = 0.002


MASKED = {"mask_truncated_completions": True}
GRPO_KL = (
    "algorithm=grpo algorithm.kl=k3 algorithm.kl_coefficient=0.04",
    {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
)
BOUNDS = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
DAPO_TIS = (
    "algorithm=dapo algorithm.correction=tis",
    DAPO | dict(zip(BOUNDS, ("token_truncate", None, 2.0), strict=True)),
    ALL,
)
GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
CASES = {
    "grpo k3": Case(*GRPO_KL),
    "grpo k3, adapters": Case(*GRPO_KL, adapters=True),
    "grpo delta, masked": Case(
        "algorithm=grpo algorithm.dual_clip=1.3 algorithm.mask_truncated=true",
        {"loss_type": "grpo", "delta": 1.3, **MASKED},
    ),
    "grpo icepop": Case(
        "algorithm=grpo algorithm.correction=icepop",
        {"loss_type": "grpo", **dict(zip(BOUNDS, ("token_mask", 0.5, 5.0), strict=True))},
    ),
    "dapo tis": Case(*DAPO_TIS),
    "dapo tis, adapters": Case(*DAPO_TIS, adapters=True),
    "dapo, masked": Case("algorithm=dapo algorithm.mask_truncated=true", DAPO | MASKED, WHOLE),
    "dr_grpo, masked": Case(
        "algorithm=dr_grpo algorithm.mask_truncated=true", {"loss_type": "dr_grpo", "scale_rewards": "none", **MASKED}
    ),
    "bnpo in one pass": Case(
        "algorithm=grpo algorithm.aggregation=token_mean",
        {"loss_type": "bnpo", "per_device_train_batch_size": GROUPS * GROUP_SIZE // UPDATES},
    ),
    "gspo": Case("algorithm=gspo", {"loss_type": "grpo", **GSPO}),
    "luspo": Case("algorithm=gspo algorithm.aggregation=seq_mean_token_sum", {"loss_type": "luspo", **GSPO}, lr=0.0001),
    "cispo": Case(
        "algorithm=cispo algorithm.old_policy=trainer algorithm.clip_high=0.1",
        {"loss_type": "cispo", "epsilon_high": 1.1},
        ALL,
    ),
    "sapo": Case("algorithm=sapo", {"loss_type": "sapo"}),
}


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Completions of sums, with the mismatch of an engine and arbitrary rewards."""
    model = real_model("smollm2")
    tokenizer = load_tokenizer(model)
    policy = transformers().AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    options = {"max_new_tokens": MAX_TOKENS, "num_return_sequences": GROUP_SIZE, "do_sample": True, "top_k": 0}
    made = []
    for number in range(GROUPS):
        question = f"What is {random.integers(10, 100)}+{random.integers(10, 100)}?"
        ids = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        out = policy.generate(torch.tensor([ids]), return_dict_in_generate=True, output_logits=True, **options)
        exact = policy.compute_transition_scores(out.sequences, out.logits, normalize_logits=True).numpy()

        prompt = Prompt(f"sums/{number}@0", np.array(ids, dtype=np.int32), "", "sums")
        members = []
        for tokens, logprobs in zip(out.sequences[:, len(ids) :].numpy(), exact, strict=True):
            ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
            length = int(ends[0]) + 1 if len(ends) else len(tokens)
            noisy = (logprobs[:length] + random.normal(0, 0.4, length)).astype(np.float32)
            reason = FinishReason.stop if len(ends) else FinishReason.length
            spans = (VersionSpan(0, 0, length),)
            completion = Completion(tokens[:length].astype(np.int32), noisy, reason, spans)
            members.append(Trajectory(prompt, completion, "", reward=float(tokens[:length].sum() % 7) / 7))
        made.append(Group(prompt, tuple(members)))
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_step_has_the_losses_and_gradients_of_trl(
    dtype: str, name: str, groups: list[Group], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    halves = [count_tokens(groups[: GROUPS // 2]), count_tokens(groups[GROUPS // 2 :])]
    counted = count_tokens(groups, truncated=case.shares != WHOLE)
    factors = [counted / UPDATES / tokens if case.shares else 1.0 for tokens in halves]
    losses, their_gradients, advantages = trl(case, dtype, groups, [case.lr * each for each in factors], tmp_path)
    config = configuration(case, tmp_path)
    assert_same_advantages(groups, advantages, config.algorithm)
    scored = [ScoredGroup(group, own) for group, own in zip(groups, advantages, strict=True)]
    step = make_step(config, getattr(torch, dtype))
    metrics = train(step, Scenario(config.algorithm, scored)).metrics

    by_tokens = config.algorithm.aggregation is Aggregation.token_mean
    loss = np.average(np.multiply(factors, losses), weights=halves if by_tokens else None)
    difference = float(abs(metrics["loss/total"] - loss) / np.abs(advantages).mean())
    largest = {"loss": difference, "gradient norm": 0.0, "gradient": 0.0}
    assert isinstance(step.optimizer, RecordingOptimizer)
    for own, theirs, factor in zip(step.optimizer.gradients, their_gradients, factors, strict=True):
        assert own.keys() == theirs.keys()
        for tensor, gradient in own.items():
            expected = factor * theirs[tensor].double()
            norm = expected.norm()
            largest["gradient norm"] = max(largest["gradient norm"], abs(float(gradient.double().norm() / norm) - 1))
            largest["gradient"] = max(largest["gradient"], float((gradient - expected).norm() / norm))
    record_property("largest_relative_difference", {what: float(f"{each:.1e}") for what, each in largest.items()})
    assert max(largest["loss"], largest["gradient norm"]) < TOLERANCE[dtype], largest


def count_tokens(groups: Sequence[Group], *, truncated: bool = True) -> int:
    completions = [each.completion for group in groups for each in group.trajectories]
    return sum(len(each.token_ids) for each in completions if truncated or not each.truncated)


def assert_same_advantages(groups: Sequence[Group], theirs: np.ndarray, config: AlgorithmConfig) -> None:
    """TRL's are ours, but for what is added to the standard deviation."""
    config = replace(config, overlong_buffer_fraction=0.0)  # not in TRL
    for group, advantages in zip(groups, theirs, strict=True):
        std = np.std([each.reward for each in group.trajectories], ddof=1)
        factor = (std + STD_EPSILON) / (std + TRL_STD_EPSILON) if config.normalize_by_std else 1.0
        own = score(group, config, max_completion_tokens=MAX_TOKENS).advantages
        np.testing.assert_allclose(factor * own, advantages, rtol=1e-5, atol=1e-6)


def trl(
    case: Case, dtype: str, groups: Sequence[Group], rates: list[float], folder: Path
) -> tuple[np.ndarray, list[dict[str, Any]], np.ndarray]:
    """TRL's loss and gradients of each update, and its advantages [groups, members]."""
    members = [each for group in groups for each in group.trajectories]
    config = {"loss_type": "grpo", "per_device_train_batch_size": MICROBATCH, **TRL_ON_A_CPU, **case.trl}
    passes = len(members) // config["per_device_train_batch_size"]
    task = {
        "model": str(real_model("smollm2")),
        "dtype": dtype,
        "prompt_ids": [each.prompt.token_ids.tolist() for each in members],
        "completion_ids": [each.completion.token_ids.tolist() for each in members],
        "logprobs": [each.completion.logprobs.tolist() for each in members],
        "rewards": [each.reward for each in members],
        "learning_rates": rates,
        "corrected": BOUNDS[0] in case.trl,
        "lora": {"r": RANK, "lora_alpha": 32} if case.adapters else None,
        "config": {
            **config,
            **{"num_generations": GROUP_SIZE, "max_completion_length": MAX_TOKENS, "max_steps": UPDATES},
            **{"steps_per_generation": passes, "gradient_accumulation_steps": passes // UPDATES},
            **{"optim": "sgd", "learning_rate": case.lr, "lr_scheduler_type": "constant", "max_grad_norm": 1e9},
        },
    }
    (folder / "task.json").write_text(json.dumps(task))
    subprocess.run([trl_python(), SCRIPT, str(folder / "task.json")], check=True, timeout=MAKE_S)

    found = json.loads((folder / "found.json").read_text())
    gradients = [load_file(folder / f"update_{update}.safetensors") for update in range(UPDATES)]
    advantages = np.array(found["advantages"], dtype=np.float32).reshape(GROUPS, GROUP_SIZE)
    return np.reshape(found["losses"], (UPDATES, -1)).sum(axis=1), gradients, advantages


def configuration(case: Case, folder: Path) -> RunConfig:
    """As the command line composes it; adapters begin as TRL's."""
    lora = f"model.lora.rank={RANK} model.lora.path={folder / 'adapter'}" if case.adapters else ""
    return composed(
        *f"model=hf model.path={real_model('smollm2')} {case.ours} {lora}".split(),
        *(f"algorithm.prompts_per_step={GROUPS}", f"algorithm.group_size={GROUP_SIZE}"),
        *(f"algorithm.updates_per_step={UPDATES}", f"rollout.max_completion_tokens={MAX_TOKENS}"),
        *("trainer.optimizer=sgd", f"trainer.lr={case.lr}", "trainer.weight_decay=0", "trainer.max_grad_norm=1e9"),
        "trainer.tokens_per_microbatch=512",
    )


def make_step(config: RunConfig, dtype: torch.dtype) -> TrainStep:
    """The step of a single rank, with a frozen reference if the loss has a KL."""
    path, lora = config.model.local, config.model.lora
    policy = load(path, mesh=None, device="cpu", lora=lora).to(dtype)
    reference = None
    if config.algorithm.needs_reference:
        reference = policy
        if not lora.enabled:
            reference = load(path, mesh=None, device="cpu").to(dtype).requires_grad_(False)
    sizes = (config.rollout.max_completion_tokens, config.trainer.tokens_per_microbatch)
    settings = StepSettings(config.algorithm, config.correction, config.rollout.temperature, *sizes)
    return TrainStep(policy, RecordingOptimizer(policy, config.trainer), settings, torch.device("cpu"), reference)
