"""Distillation of a real pretrained model: SmolLM2 learns from SmolLM2 after GRPO."""

from collections.abc import Callable

import pytest

from tests.real_models import MAKE_S, real_model
from tests.runs import Run

LIMIT_S = 3600.0
ADAPTERS = ["model.lora.rank=16", "trainer.lr=2e-4"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + 2 * LIMIT_S)]


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
