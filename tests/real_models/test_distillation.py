"""Distillation of real pretrained models: who can be a teacher of SmolLM2, and that one teaches it."""

from collections.abc import Callable

import pytest

from app.start.input_checks import teacher
from app.start.inputs import CheckStage, RunInputs
from tests.compose import composed
from tests.real_models import MAKE_S, real_model
from tests.refusals import refused
from tests.runs import Run

LIMIT_S = 3600.0
ADAPTERS = ["model.lora.rank=16", "trainer.lr=2e-4"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + 2 * LIMIT_S)]


def distilled(name: str) -> RunInputs:
    """The inputs of a run that distills a model into SmolLM2."""
    student = ["model=hf", f"model.path={real_model('smollm2')}", "data=arithmetic", "data.template=chat"]
    return RunInputs(composed(*student, "algorithm=opd", f"teacher.path={real_model(name)}"), CheckStage.start)


def test_a_model_of_another_family_is_refused_as_teacher() -> None:
    with refused("teacher.path", str(real_model("qwen25")), "other tokens than model.path"):
        list(teacher(distilled("qwen25")))


def test_a_student_learns_sums_from_a_trained_teacher_without_any_reward(
    start: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory, record_property: Callable[[str, object], None]
) -> None:
    """The teacher is SmolLM2 after GRPO with rewards; the student begins where the teacher began."""
    smollm2 = ["experiment=cpu1_smollm2", f"model.path={real_model('smollm2')}", *ADAPTERS]
    trained = Run(tmp_path_factory.mktemp("teacher"), *smollm2, "checkpoint.export=true", "checkpoint.keep=1")
    assert trained.wait(LIMIT_S) == 0, trained.text

    opd = ["algorithm=opd", f"teacher.path={trained.folder / 'export'}", "algorithm.group_size=4"]
    student = start(*smollm2, *opd)
    assert student.wait(LIMIT_S) == 0, student.text

    steps = [line for line in student.metrics() if "time/step" in line]
    curve = {line["step"]: line["eval/accuracy"] for line in student.metrics() if "eval/accuracy" in line}
    of_teacher = trained.summary()["eval/accuracy_last"]
    record_property("accuracy_of_teacher", of_teacher)
    record_property("accuracy", curve)
    record_property("reverse_kl", [steps[0]["teacher/kl"], steps[-1]["teacher/kl"]])
    assert {line["advantage/std"] for line in steps} == {0.0}
    assert steps[-1]["teacher/kl"] < 0.5 * steps[0]["teacher/kl"]
    assert curve[0] < 0.5 < of_teacher
    assert curve[15] > (curve[0] + of_teacher) / 2
