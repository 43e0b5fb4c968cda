"""Parity between devices: the CPU agrees with itself, bfloat16 stays within its bounds, a wrong kernel is detected."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from app.config.device import Dtype
from app.config.model import LoraConfig
from app.errors import FAILED_EXIT
from app.mode import ModeResult, parity
from app.mode.parity import (
    ADAPTED,
    BOUNDS,
    ENGINE_FLOAT32,
    FILE,
    LENGTHS,
    PERTURBED,
    SYNCED,
    Outcome,
    comparisons,
    compute,
    fixed_batch,
    mean_differences,
)
from app.mode.parity.engine import NOISE, Sampled, Versions, set_weights
from app.model.kernels import CPU_KERNELS
from app.model.load import load
from app.model.packing import Packing
from app.model.policy import named_checkpoint_tensors
from app.start.inputs import CheckStage, RunInputs
from app.types import Completion, FinishReason
from tests.compose import composed
from tests.rollout.caching_double import REFRESHED, assignments, environment
from tests.runs import Run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Outcome:
    return compute(tiny_model, CPU, Dtype.float32, CPU_KERNELS, False)


def failing(outcome: Outcome, reference: Outcome, dtype: Dtype) -> list[str]:
    return [line.what for line in comparisons(outcome, reference, BOUNDS[dtype]) if not line.passed]


def errors_of(run: Run) -> dict[str, float]:
    """By the name of their line."""
    return {line["what"]: line["error"] for line in json.loads((run.folder / FILE).read_text())["comparisons"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["tiny", "tiny_lora"])
@pytest.mark.parametrize("placement", [["colocate", "placement.devices=2"], ["fully_async"]], ids=lambda each: each[0])
def test_the_engine_agrees_too(placement: list[str], model: str, start: Callable[..., Run]) -> None:
    kind, *devices = placement
    run = start("mode=parity", f"model={model}", f"placement={kind}", *devices)
    assert run.wait() == 0, run.text
    assert run.gone_within(15), run.processes()
    errors = errors_of(run)
    assert errors[SYNCED] == 0
    assert all(0 < errors[name] < 1e-5 for name in (ADAPTED if model == "tiny_lora" else PERTURBED))
    assert ("gradient of embed_tokens" in errors) == (model == "tiny")  # frozen beside adapters


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
@pytest.mark.parametrize("refreshed", [False, True])
def test_an_engine_with_old_copies_of_weights_fails(refreshed: bool, placement: str, tmp_path: Path) -> None:
    """Its weights are those of the checkpoint, and so are its copies: only noise shows that it keeps some."""
    variables = assignments(environment(tmp_path, REFRESHED) if refreshed else environment(tmp_path))
    run = Run(tmp_path, "mode=parity", f"placement={placement}", prefix=["env", *variables], imports_sglang=True)
    try:
        assert run.wait() == (0 if refreshed else FAILED_EXIT), run.text
    finally:
        run.end()
    errors = errors_of(run)
    assert errors[SYNCED] == 0
    checkpoint, noise, again = (errors[name] for name in PERTURBED)
    assert max(checkpoint, again) < ENGINE_FLOAT32
    assert noise < 1e-5 if refreshed else noise > 100 * ENGINE_FLOAT32


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_of_another_version_are_detected(rank: int, tiny_model: Path) -> None:
    """Those of the checkpoint with noise, or those of adapters."""
    config = composed(f"model.path={tiny_model}", f"model.lora.rank={rank}")
    prompt = np.arange(4, 10, dtype=np.int32)
    tokens = np.arange(20, 29, dtype=np.int32)
    completion = Completion(tokens, np.zeros(9, dtype=np.float32), FinishReason.stop, spans=())
    sampled = [Sampled(prompt, [completion], seed) for seed in (None, 1, 2, 1)]
    checkpoint, first, second, again = mean_differences(config, tiny_model, sampled)
    assert first == again
    assert all(
        abs(a - b) > 10 * ENGINE_FLOAT32 for a, b in ((checkpoint, first), (first, second), (second, checkpoint))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_changes_every_entry_by_five_percent(dtype: torch.dtype, tiny_model: Path) -> None:
    plain, noisy = (load(tiny_model, mesh=None, device=CPU) for _ in range(2))
    set_weights(noisy, 1, dtype)
    ratios = []
    for (name, before), (_, after) in zip(
        named_checkpoint_tensors(plain), named_checkpoint_tensors(noisy), strict=True
    ):
        assert torch.equal(after, after.to(dtype).float()), name
        ratios.append((after / before)[before != 0].flatten())
    ratio = torch.cat(ratios)
    assert (ratio - 1).abs().tolist() == pytest.approx(
        [NOISE] * len(ratio), abs=1e-5 if dtype is torch.float32 else 0.01
    )
    assert 0.45 < (ratio > 1).double().mean() < 0.55
    assert noisy.causal_lm.lm_head.weight is noisy.causal_lm.get_input_embeddings().weight  # tied, and noisy once


def test_the_weights_of_the_checkpoint_come_back(tiny_model: Path) -> None:
    rank = SimpleNamespace(
        model=load(tiny_model, mesh=None, device=CPU),
        spec=SimpleNamespace(lora=LoraConfig(), model_path=tiny_model, dtype=Dtype.float32),
    )
    before = {name: tensor.clone() for name, tensor in named_checkpoint_tensors(rank.model)}
    versions = Versions(rank)
    versions.set(1)
    assert not any(torch.equal(before[name], tensor) for name, tensor in named_checkpoint_tensors(rank.model))
    versions.set(None)
    assert all(torch.equal(before[name], tensor) for name, tensor in named_checkpoint_tensors(rank.model))


def run_parity(model: Path, folder: Path) -> ModeResult:
    config = composed(f"model.path={model}")
    return parity.run(config, folder, RunInputs(config, CheckStage.start))


def test_a_weight_sync_that_differs_fails(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    different = Sampled(np.zeros(1, dtype=np.int32), (), error="a tensor differs")
    monkeypatch.setattr(parity, "sample", lambda *_: [different])
    assert run_parity(tiny_model, tmp_path).exit_code == FAILED_EXIT


def test_the_cpu_agrees_with_itself(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "engine_comparisons", lambda *_: [])  # it starts a whole run
    result = run_parity(tiny_model, tmp_path)
    assert result.exit_code == 0
    assert result.metric < 0.01
    written = json.loads((tmp_path / FILE).read_text())
    assert written["passed"] is True
    names = {"log-probabilities", "loss", "gradient of layer 0", "gradient of embed_tokens"}
    assert {line["what"] for line in written["comparisons"]} >= names


def test_the_reference_equals_transformers_sequence_by_sequence(tiny_model: Path, reference: Outcome) -> None:
    from app.device.torchvision_shim import transformers

    model = transformers().AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    batch = fixed_batch(model.config.vocab_size, CPU)
    start = 0
    expected = []
    for length in LENGTHS:
        tokens = batch.input_ids[:, start : start + length]
        logprobs = model(tokens).logits[0].log_softmax(-1)
        positions = range(length // 2 - 1, length - 1)
        expected += [logprobs[position, tokens[0, position + 1]].item() for position in positions]
        start += length
    assert reference.logprobs.tolist() == pytest.approx(expected, abs=2e-5)


def test_the_engine_difference_is_the_mean_over_completion_tokens(tiny_model: Path) -> None:
    from app.device.torchvision_shim import transformers

    model = transformers().AutoModelForCausalLM.from_pretrained(tiny_model)
    prompt = np.arange(4, 10, dtype=np.int32)
    completions = []
    for length, error in ((3, 0.0), (9, 0.4)):
        tokens = np.arange(20, 20 + length, dtype=np.int32)
        logits = model(torch.tensor(np.concatenate([prompt, tokens]))[None].long()).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(length), torch.tensor(tokens).long()].detach().numpy()
        completions.append(Completion(tokens, logprobs - np.float32(error), FinishReason.stop, spans=()))

    sampled = Sampled(prompt, completions)
    config = composed(f"model.path={tiny_model}")
    assert mean_differences(config, tiny_model, [sampled]) == pytest.approx([9 * 0.4 / 12], abs=1e-5)


def test_bfloat16_stays_within_its_bounds(tiny_model: Path, reference: Outcome) -> None:
    outcome = compute(tiny_model, CPU, Dtype.bfloat16, CPU_KERNELS, False)
    assert failing(outcome, reference, Dtype.bfloat16) == []
    assert "gradient of layer 0" in failing(outcome, reference, Dtype.float32)  # rules out that float32 was used


def test_attention_across_sequence_boundaries_is_detected_even_within_bfloat16_bounds(
    tiny_model: Path, reference: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = fixed_batch(100, CPU)
    boundless = replace(batch, packing=Packing.of([0, sum(LENGTHS)]))
    monkeypatch.setattr(parity, "fixed_batch", lambda *_: boundless)
    outcome = compute(tiny_model, CPU, Dtype.float32, CPU_KERNELS, False)
    assert {"log-probabilities", "gradient of layer 0"} <= set(failing(outcome, reference, Dtype.bfloat16))


def test_a_missing_or_broken_gradient_fails(reference: Outcome) -> None:
    name = next(name for name in reference.gradients if "layers.1." in name)
    missing = {key: value for key, value in reference.gradients.items() if key != name}
    assert failing(replace(reference, gradients=missing), reference, Dtype.bfloat16) == ["gradient of layer 1"]
    broken = {**reference.gradients, name: reference.gradients[name] * math.nan}
    assert failing(replace(reference, gradients=broken), reference, Dtype.bfloat16) == ["gradient of layer 1"]
