"""An environment that cannot be loaded is refused before a run's folder exists."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from app.start.environments import require_environment, worker_spec
from app.start.inputs import RunInputs
from app.start.preflight import preflight
from tests.compose import composed, problems_of
from tests.environment.qwen import write_model
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
    found = problems_of(*settings).get("environment", "")
    assert named in found
    assert (found == "", found.count("\n")) == (named == "", 0)
    assert workers() == []


def test_another_interpreter_loads_it_from_the_working_directory(tiny_model: Path) -> None:
    require_environment(composed(*own("Guess", f"environment.python={sys.executable}")), tiny_model)
    assert workers() == []


def test_a_job_of_a_sweep_loads_its_environment_while_its_loop_runs(tiny_model: Path) -> None:
    async def job(*overrides: str) -> RunInputs:
        return preflight(composed(*overrides))

    inputs = asyncio.run(job(*own("Guess"), f"model.path={tiny_model}"))
    assert inputs.model_path == tiny_model
    with refused("", "", "has no Missing"):
        asyncio.run(job(*own("Missing"), f"model.path={tiny_model}"))
    assert workers() == []


def test_the_renderer_opens_replies_as_the_data_does(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3")
    for thinking in (False, True):
        config = composed(*own("Guess"), "data.template=chat", f"data.thinking={str(thinking).lower()}")
        assert worker_spec(config, folder).renderer.enable_thinking is thinking


def test_rewards_are_not_tried_on_completions_without_turns(tiny_model: Path) -> None:
    """`raises` fails on every completion, so without an environment it is refused."""
    reward = "reward._target_=tests.reward.broken.raises"
    with refused("reward._target_", "tests.reward.broken.raises", "KeyError"):
        preflight(composed(reward))
    preflight(composed(f"environment._target_={OWN}.Guess", reward))
