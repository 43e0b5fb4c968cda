"""Whole runs of SmolLM2-135M: training, weight syncs, export, resume, LoRA, parity. Real SGLang, FSDP2 and Ray."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.device.torchvision_shim import transformers
from app.mode.parity import FILE, PERTURBED
from app.model.hf_directory import load_tokenizer
from tests.folders import run_new_app
from tests.real_models import MAKE_S, real_model
from tests.runs import Run

Start = Callable[..., Run]

LIMIT_S = 1500.0
EVAL_PROMPTS = 16
ROUNDING = 1e-4  # nats a token, float32
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + 3 * LIMIT_S)]

SMALL = [
    "data=arithmetic",
    "data.template=chat",
    f"data.arithmetic.eval_problems={EVAL_PROMPTS}",
    "reward=math",
    "device.dtype=float32",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "rollout.max_prompt_tokens=64",
    "rollout.max_completion_tokens=16",
    "trainer.tokens_per_microbatch=512",
    "trainer.lr=1e-5",
    "eval.every=1",
    "tracking.samples_per_step=100",
]


def smollm2(*overrides: str) -> list[str]:
    return ["model=hf", f"model.path={real_model('smollm2')}", *SMALL, *overrides]


def finished(run: Run) -> list[dict[str, float]]:
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.gone_within(15), run.processes()
    return [line for line in run.metrics() if "time/step" in line]


def completions(file: Path) -> dict[str, list[int]]:
    """Prompt id → tokens of the completion."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == EVAL_PROMPTS
    return {row["prompt"]: row["tokens"] for row in rows}


@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
def test_a_run_syncs_exports_and_goes_on(placement: str, start: Start, tmp_path: Path) -> None:
    """`weight_sync.verify=always`: after each sync the engine's weights are those of an exported checkpoint."""
    given = smollm2(f"placement={placement}", "weight_sync.verify=always", "checkpoint.every=1", "checkpoint.keep=1")
    steps = finished(start(*given, "steps=1"))
    run = start(*given, "steps=2", f"resume={tmp_path / 'run'}")
    resumed = finished(run)
    assert resumed[:1] == steps
    assert [line["step"] for line in resumed] == [1, 2]
    assert all(line["mismatch/abs_difference"] < ROUNDING for line in resumed if line["staleness/max"] == 0)
    initial, trained = (completions(run.folder / "samples" / f"eval_{step}.jsonl") for step in (0, 2))
    assert initial != trained

    export, own = run.folder / "export", tmp_path / "evaluation"
    evaluation = ["mode=eval", *smollm2(f"model.path={export}"), f"hydra.run.dir={own}"]
    code, text = run_new_app(*evaluation, cwd=tmp_path)
    assert code == 0, text
    assert completions(own / "samples" / "eval_0.jsonl") == trained


@pytest.mark.parametrize("name", ["smollm2", "qwen25"])
def test_a_cpu_in_float32_is_within_the_bounds_of_parity(name: str, start: Start) -> None:
    """The whole model, its gradients layer by layer, weight syncs and an engine's log-probabilities."""
    run = start("mode=parity", "model=hf", f"model.path={real_model(name)}", *SMALL)
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.gone_within(15), run.processes()
    lines = {line["what"]: line for line in json.loads((run.folder / FILE).read_text())["comparisons"]}
    layers = {"smollm2": 30, "qwen25": 24}[name]
    assert {f"gradient of layer {layer}" for layer in range(layers)} <= set(lines)
    assert lines["weight syncs unlike the exported checkpoint"]["error"] == 0
    assert all(0 < lines[name]["error"] < ROUNDING for name in PERTURBED)


def test_adapters_are_served_and_load_in_peft(start: Start) -> None:
    peft = pytest.importorskip("peft")
    run = start(*smollm2("model.lora.rank=8", "trainer.lr=1e-3", "steps=2", "checkpoint.keep=1"))
    steps = finished(run)
    assert all(line["mismatch/abs_difference"] < ROUNDING for line in steps)
    assert all(line["updates/relative_change"] > 0 for line in steps)

    merged = model_of(run.folder / "export")
    adapted = peft.PeftModel.from_pretrained(model_of(real_model("smollm2")), run.folder / "export" / "adapter")
    tokens = torch.tensor([load_tokenizer(real_model("smollm2")).encode("The sum of 12 and 30 is")])
    with torch.no_grad():
        expected, base = adapted(input_ids=tokens).logits, adapted.unload()(input_ids=tokens).logits
        actual = merged(input_ids=tokens).logits
    assert (actual - expected).abs().max() < 0.1 * (base - expected).abs().max()


def model_of(folder: Path) -> torch.nn.Module:
    return transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
