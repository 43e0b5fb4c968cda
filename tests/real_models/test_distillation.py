"""Distillation of real pretrained models: who can be a teacher of SmolLM2."""

import pytest

from app.mode.input_checks import teacher
from app.mode.inputs import CheckStage, RunInputs
from tests.compose import composed
from tests.real_models import MAKE_S, real_model
from tests.refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + 300)]


def distilled(name: str) -> RunInputs:
    """The inputs of a run that distills a model into SmolLM2."""
    student = ["model=hf", f"model.path={real_model('smollm2')}", "data=arithmetic", "data.template=chat"]
    return RunInputs(composed(*student, "algorithm=opd", f"teacher.path={real_model(name)}"), CheckStage.start)


def test_a_model_of_another_family_is_refused_as_teacher() -> None:
    with refused("teacher.path", str(real_model("qwen25")), "other tokens than model.path"):
        list(teacher(distilled("qwen25")))


def test_a_model_of_the_same_family_is_accepted_as_teacher() -> None:
    (found,) = teacher(distilled("smollm2"))
    assert str(real_model("smollm2")) in found.message
