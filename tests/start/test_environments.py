"""An environment that cannot be loaded is refused before a run's folder exists; the doctor also plays an episode."""

import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from app.mode import doctor
from app.start.environments import require_environment
from app.start.finding import CheckStatus, Finding
from app.start.inputs import CheckStage, RunInputs
from app.start.preflight import problems, take_inputs
from tests.compose import composed
from tests.refusals import refused

OWN = "tests.mode.own_environments"


def own(name: str, *overrides: str) -> list[str]:
    return [f"environment._target_={OWN}.{name}", "reward=environment", *overrides]


def workers() -> list[str]:
    """Command lines of the workers that this process has; one that was killed and not reaped yet has none."""
    lines = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(child.cmdline()))
    return [line for line in lines if "app.environment.worker" in line]


def episode(*overrides: str) -> Finding:
    return doctor.play_episode(RunInputs(composed(*overrides), CheckStage.doctor))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (own("Missing"), "has no Missing"),
        (own("Guess", "environment.args.hint=colder"), ""),
        (own("Guess", "environment.args.colour=1"), "colour"),
        (own("Guess", "environment.python=/no/such/python"), "/no/such/python"),
        (["environment._target_=tests.mode.dying_environment.Guess"], "(exit code 4); its last line: no license was f"),
        (["environment=tools", "environment.tools=[no_such.tool]"], "no_such.tool"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_sentence_and_leaves_no_process(
    settings: list[str], named: str, tiny_model: Path
) -> None:
    found = problems(composed(*settings)).get("environment", "")
    assert named in found
    assert (found == "", found.count("\n")) == (named == "", 0)
    assert workers() == []


def test_another_interpreter_loads_it_from_the_working_directory(tiny_model: Path) -> None:
    require_environment(composed(*own("Guess", f"environment.python={sys.executable}")), tiny_model)
    assert workers() == []


def test_rewards_are_not_tried_on_completions_without_turns(tiny_model: Path) -> None:
    """`raises` fails on every completion, so without an environment it is refused."""
    reward = "reward._target_=tests.reward.broken.raises"
    with refused("reward._target_", "tests.reward.broken.raises", "KeyError"):
        take_inputs(composed(reward), lambda _: None)
    take_inputs(composed(f"environment._target_={OWN}.Guess", reward), lambda _: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Guess", "an episode of 1 made-up turn: found 1, polite 0.5"),
        ("Speaks", "an episode of 3 made-up turns: found 0, polite 0.5"),
        ("Raises", "an episode of made-up turns failed: step raised KeyError: 'board' at"),
        ("Dies", "an episode of made-up turns failed: the worker process died (exit code 3)"),
        ("Hangs", "an episode of made-up turns failed: step took longer than 2 s"),
    ],
)
def test_the_doctor_plays_an_episode(name: str, message: str, tiny_model: Path) -> None:
    check = episode(*own(name, "environment.timeout_s=2"))
    assert check.message.startswith(f"{OWN}.{name}, {message}")
    assert check.status is (CheckStatus.ok if name in ("Guess", "Speaks") else CheckStatus.fail)
    assert bool(check.hint) == (check.status is not CheckStatus.ok)
    assert "; log:" not in check.message
    assert workers() == []


def test_without_the_model_the_doctor_cannot_render() -> None:
    check = episode("model=hf", "model.path=owner/name", *own("Guess"))
    assert (check.status, check.hint) == (CheckStatus.warn, "examine it again when the model is on this machine")
