"""The table of input checks: what is cheap comes first, and what is downloaded or started last.

`mode=plan` lists what fails, `mode=doctor` prints every finding, and a run raises the first `ConfigError` before its
folder exists, so that an invalid run leaves nothing behind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config import RunConfig
from app.errors import ConfigError
from app.start import input_checks as checks
from app.start.inputs import CheckStage, CheckStatus, Finding, RunInputs


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table: `find` yields findings or raises `ConfigError`, unless one of `needs` is missing."""

    name: str
    find: Callable[[RunInputs], Iterable[Finding] | None]
    moments: Sequence[CheckStage]
    needs: Sequence[str] = ()


ALWAYS = tuple(CheckStage)
ON_THIS_MACHINE = (CheckStage.doctor, CheckStage.start)
CHECKS = (
    Check("sizes", checks.sizes, ALWAYS),
    Check("model", checks.model, ALWAYS),
    Check("disk", checks.disk, ON_THIS_MACHINE),
    Check("data", checks.data, ALWAYS),
    Check("own code", checks.own_code, ALWAYS),
    Check("devices", checks.devices, ON_THIS_MACHINE),
    # from here on a start downloads models and data sets
    Check("model files", checks.model_files, ON_THIS_MACHINE, ("sizes", "model")),
    Check("disk", checks.disk, (CheckStage.start,)),  # sizes of a hub model may be known only now
    Check("linear attention", checks.linear_attention, ON_THIS_MACHINE),
    Check("prompts", checks.prompts, ON_THIS_MACHINE, ("model", "data")),
    Check("demonstrations", checks.demonstrations, ON_THIS_MACHINE, ("model", "data", "prompts")),
    Check("teacher", checks.teacher, ALWAYS, ("model",)),
    Check("checkpoint", checks.same_run, (CheckStage.start,)),
    # and from here on processes try code of the user's
    Check("environment", checks.environment, ALWAYS, ("model",)),
    Check("code", checks.code, ALWAYS),
    Check("reward", checks.reward, ALWAYS),
)


def findings(run: RunInputs) -> Iterator[Finding]:
    """Yield what the checks of this moment find, in the order of the table.

    Raises:
        ConfigError: At a start, by the first check that fails; else that is a finding.
        CheckpointError: The checkpoint of the run is of another model.
    """
    for check in CHECKS:
        if run.moment not in check.moments or run.missing.intersection(check.needs):
            continue
        try:
            yield from check.find(run) or ()
        except ConfigError as error:
            if run.moment is CheckStage.start:
                raise
            run.missing.add(check.name)
            yield Finding(check.name, str(error), CheckStatus.fail, checks.REFUSED)


def problems(run: RunInputs) -> dict[str, str]:
    """Return a sentence for each input that a run on this machine would refuse, by the name of its check."""
    return {each.subject: each.message for each in findings(run) if each.status is CheckStatus.fail}


def preflight(config: RunConfig, folder: Path | None = None, checkpoint: Path | None = None) -> RunInputs:
    """Check and load the inputs of a run, and count the steps of its epochs. Raises as `findings` does."""
    run = RunInputs(config, CheckStage.start, folder, checkpoint)
    run.warnings = tuple(each.message for each in findings(run) if each.status is CheckStatus.warn)
    del run.rows  # whose prompts have what a run needs of them
    run.__dict__.pop("demonstration_rows", None)
    return run
