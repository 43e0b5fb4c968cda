"""Parity between devices: the CPU agrees with itself, bfloat16 stays within its bounds, a wrong kernel is detected."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from app.config.device import Dtype
from app.config.model import LoraConfig
from app.errors import FAILED_EXIT
from app.mode import parity
from app.mode.parity import (
    BOUNDS,
    ENGINE_FLOAT32,
    FILE,
    LENGTHS,
    Outcome,
    comparisons,
    compute,
    fixed_batch,
    layer_of,
    mean_difference,
)
from app.mode.parity.engine import Sampled
from app.model.kernels import CPU_KERNELS
from app.model.packing import Packing
from app.types import Completion, FinishReason
from tests.compose import composed
from tests.runs import Run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Outcome:
    return compute(tiny_model, CPU, Dtype.float32, CPU_KERNELS, False)


def failing(outcome: Outcome, reference: Outcome, dtype: Dtype) -> list[str]:
    return [line.what for line in comparisons(outcome, reference, BOUNDS[dtype]) if not line.passed]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
def test_the_engine_agrees_too(placement: str, start: Callable[..., Run]) -> None:
    run = start("mode=parity", f"placement={placement}")
    assert run.wait() == 0, run.text
    assert run.gone_within(15), run.processes()
    lines = {line["what"]: line for line in json.loads((run.folder / FILE).read_text())["comparisons"]}
    assert lines["weight syncs unlike the exported checkpoint"]["error"] == 0
    assert 0 < lines["engine's log-probabilities"]["error"] < 1e-5
    assert "all within bounds" in run.text


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
def test_the_engine_agrees_under_every_version_of_the_adapters(placement: str, start: Callable[..., Run]) -> None:
    run = start("mode=parity", "model=tiny_lora", f"placement={placement}")
    assert run.wait() == 0, run.text
    lines = {line["what"]: line for line in json.loads((run.folder / FILE).read_text())["comparisons"]}
    for version in (0, 1):
        assert 0 < lines[f"engine's log-probabilities under adapter {version}"]["error"] < 1e-5
    assert {"gradient of layer 0", "gradient of layer 1"} <= set(lines)
    assert "gradient of embed_tokens" not in lines  # frozen


def test_adapters_of_another_version_are_detected(tiny_model: Path) -> None:
    lora = LoraConfig(rank=4)
    prompt = np.arange(4, 10, dtype=np.int32)
    tokens = np.arange(20, 29, dtype=np.int32)
    completion = Completion(tokens, np.zeros(9, dtype=np.float32), FinishReason.stop, spans=())
    differences = [
        mean_difference(tiny_model, Sampled(True, "", prompt, [completion], seed), trust_remote_code=False, lora=lora)
        for seed in (1, 1, 2)
    ]
    assert differences[0] == differences[1]
    assert abs(differences[2] - differences[0]) > ENGINE_FLOAT32


def test_a_weight_sync_that_differs_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    different = Sampled(False, "a tensor differs", np.zeros(1, dtype=np.int32), ())
    monkeypatch.setattr(parity, "sample", lambda *_: [different])
    assert parity.run(composed(f"model.path={tiny_model}"), tmp_path).exit_code == FAILED_EXIT
    assert "FAIL  weight syncs unlike the exported checkpoint" in capsys.readouterr().out


def test_the_cpu_agrees_with_itself(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "engine_comparisons", lambda *_: [])  # it starts a whole run
    result = parity.run(composed(f"model.path={tiny_model}"), tmp_path)
    assert result.exit_code == 0
    assert result.metric < 0.01
    assert "ok    gradient of layer 1" in capsys.readouterr().out
    written = json.loads((tmp_path / FILE).read_text())
    assert written["passed"] is True
    assert {line["what"] for line in written["comparisons"]} >= {"log-probabilities", "loss", "gradient of layer 0"}


def test_the_reference_equals_transformers_sequence_by_sequence(tiny_model: Path, reference: Outcome) -> None:
    from app.model.hf_import import transformers

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
    from app.model.hf_import import transformers

    model = transformers().AutoModelForCausalLM.from_pretrained(tiny_model)
    prompt = np.arange(4, 10, dtype=np.int32)
    completions = []
    for length, error in ((3, 0.0), (9, 0.4)):
        tokens = np.arange(20, 20 + length, dtype=np.int32)
        logits = model(torch.tensor(np.concatenate([prompt, tokens]))[None].long()).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(length), torch.tensor(tokens).long()].detach().numpy()
        completions.append(Completion(tokens, logprobs - np.float32(error), FinishReason.stop, spans=()))

    sampled = Sampled(True, "", prompt, completions)
    assert mean_difference(tiny_model, sampled, trust_remote_code=False) == pytest.approx(9 * 0.4 / 12, abs=1e-5)


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


def test_gradients_are_grouped_by_layer() -> None:
    assert layer_of("model.language_model.layers.12.mlp.up_proj.weight") == "layer 12"
    assert layer_of("model.embed_tokens.weight") == "embed_tokens"
    assert layer_of("lm_head.weight") == "lm_head"
