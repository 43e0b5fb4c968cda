"""Whole runs of SmolLM2-135M: training, weight syncs, export, resume, LoRA, parity. Real SGLang, FSDP2 and Ray."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.mode.parity.compare import FILE
from app.model.hf_directory import load_tokenizer
from app.model.hf_import import transformers
from tests.real_models import MAKE_S, real_model
from tests.runs import Run

Start = Callable[..., Run]

LIMIT_S = 1500.0
ROUNDING = 1e-4  # nats a token, float32
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + 3 * LIMIT_S)]

SMALL = [
    "data=arithmetic",
    "data.template=chat",
    "data.arithmetic.eval_problems=16",
    "reward=math",
    "device.dtype=float32",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "rollout.max_prompt_tokens=64",
    "rollout.max_completion_tokens=16",
    "trainer.tokens_per_microbatch=512",
    "trainer.lr=1e-5",
    "eval.every=1",
]


def smollm2(*overrides: str) -> list[str]:
    return ["model=hf", f"model.path={real_model('smollm2')}", *SMALL, *overrides]


def finished(run: Run) -> list[dict[str, float]]:
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.gone_within(15), run.processes()
    return [line for line in run.metrics() if "time/step" in line]


def accuracies(run: Run) -> dict[int, float]:
    return {line["step"]: line["eval/accuracy"] for line in run.metrics() if "eval/accuracy" in line}


@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
def test_a_run_syncs_exports_and_goes_on(placement: str, start: Start, tmp_path: Path) -> None:
    """`weight_sync.verify=always`: after each sync the engine's weights are those of an exported checkpoint."""
    given = smollm2(f"placement={placement}", "weight_sync.verify=always", "checkpoint.every=1", "checkpoint.keep=1")
    steps = finished(start(*given, "steps=2"))
    run = start(*given, "steps=3", f"resume={tmp_path / 'run'}")
    resumed = finished(run)
    assert resumed[:2] == steps
    assert [line["step"] for line in resumed] == [1, 2, 3]
    assert all(line["mismatch/abs_difference"] < ROUNDING for line in resumed if line["staleness/max"] == 0)

    (export,) = run.folder.glob("export")
    trained, base = weights_of(export), weights_of(real_model("smollm2"))
    assert trained.keys() == base.keys()
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    evaluation = start("mode=eval", *given, f"model.path={export}", "model.name=exported")
    finished(evaluation)
    assert accuracies(evaluation)[0] == accuracies(run)[3]


def test_adapters_are_served_and_load_in_peft(start: Start) -> None:
    peft = pytest.importorskip("peft")
    run = start(*smollm2("model.lora.rank=8", "trainer.lr=1e-3", "steps=2", "checkpoint.keep=1"))
    steps = finished(run)
    assert all(line["mismatch/abs_difference"] < ROUNDING for line in steps)
    assert steps[-1]["lora/norm"] > steps[0]["lora/norm"] > 0

    merged = model_of(run.folder / "export")
    adapted = peft.PeftModel.from_pretrained(model_of(real_model("smollm2")), run.folder / "export" / "adapter")
    tokens = torch.tensor([load_tokenizer(real_model("smollm2")).encode("The sum of 12 and 30 is")])
    with torch.no_grad():
        expected, base = adapted(input_ids=tokens).logits, adapted.unload()(input_ids=tokens).logits
        actual = merged(input_ids=tokens).logits
    assert (actual - expected).abs().max() < 0.1 * (base - expected).abs().max()


@pytest.mark.parametrize("lora", ["model.lora.rank=0", "model.lora.rank=8"])
@pytest.mark.parametrize("name", ["smollm2", "qwen25"])
def test_parity_passes(name: str, lora: str, start: Start) -> None:
    model = ["model=hf", f"model.path={real_model(name)}", *SMALL, lora]
    run = start("mode=parity", *model)
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.gone_within(15), run.processes()
    result = json.loads((run.folder / FILE).read_text())
    assert result["passed"]
    assert len(result["comparisons"]) > 24


def model_of(folder: Path) -> torch.nn.Module:
    return transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return model_of(folder).state_dict()
