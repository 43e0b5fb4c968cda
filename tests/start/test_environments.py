"""An environment that cannot be loaded is refused before a run's folder exists."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.compose import problems_of

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
        (own("Guess", "environment.args.hint=colder"), ""),
        (own("Guess", "environment.python=/no/such/python"), "/no/such/python"),
        (["environment._target_=tests.mode.dying_environment.Guess"], "(exit code 4); its last line: no license was f"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_sentence_and_leaves_no_process(
    settings: list[str], named: str, tiny_model: Path
) -> None:
    found = problems_of(*settings).get("environment", "")
    assert named in found
    assert (found == "", found.count("\n")) == (named == "", 0)
    assert workers() == []
