"""Distillation of real pretrained models: who can be a teacher of SmolLM2, and what it learns from one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.mode.input_checks import teacher
from app.mode.inputs import CheckStage, RunInputs
from tests.compose import composed
from tests.real_models import MAKE_S, real_model
from tests.refusals import refused
from tests.runs import Run

LIMIT_S = 3000.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + 2 * LIMIT_S)]
STEPS = 8


def distilled(name: str) -> RunInputs:
    """The inputs of a run that distills a model into SmolLM2."""
    student = ["model=hf", f"model.path={real_model('smollm2')}", "data=arithmetic", "data.template=chat"]
    return RunInputs(composed(*student, "algorithm=opd", f"teacher.path={real_model(name)}"), CheckStage.start)


def test_a_model_of_another_family_is_refused_as_teacher() -> None:
    with refused("teacher.path", str(real_model("qwen25")), "other tokens than model.path"):
        list(teacher(distilled("qwen25")))


def sums(*overrides: str) -> list[str]:
    return ["experiment=cpu1_smollm2", f"model.path={real_model('smollm2')}", *overrides]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher: SmolLM2 after a supervised run on sums."""
    batch = ["steps=20", "algorithm.prompts_per_step=64", "trainer.lr=3e-5", "eval.every=20", "eval.before_train=false"]
    run = Run(tmp_path_factory.mktemp("teacher"), *sums("mode=sft", *batch, "checkpoint.every=20", "checkpoint.keep=1"))
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.summary()["eval/accuracy_last"] > 0.6
    return run.folder / "export"


def test_smollm2_learns_from_a_trained_smollm2_without_any_reward(
    trained: Path, start: Callable[..., Run], record_property: Callable[[str, object], None]
) -> None:
    few = [f"steps={STEPS}", f"eval.every={STEPS}", "checkpoint.keep=0"]
    run = start(*sums("algorithm=opd", f"teacher.path={trained}", *few))
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.gone_within(15), run.processes()

    summary, steps = run.summary(), [line for line in run.metrics() if "time/step" in line]
    for name in ("first", "last"):
        record_property(f"accuracy_{name}", summary[f"eval/accuracy_{name}"])
    record_property("reverse_kl", [steps[0]["teacher/kl"], steps[-1]["teacher/kl"]])
    assert {line["advantage/std"] for line in steps} == {0.0}
    assert steps[-1]["teacher/kl"] < steps[0]["teacher/kl"]
    assert summary["eval/accuracy_last"] > summary["eval/accuracy_first"]
