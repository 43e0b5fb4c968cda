"""The inputs of a run: its model, rows and prompts, each loaded once, when it is first needed.

`app/start/preflight.py` checks them; a run takes what its checks have loaded. `mode=doctor` prints the findings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import app.data.prompts as data
from app.config import Mode, RunConfig
from app.data import rows
from app.data.counts import RowCounts, steps_of_epochs
from app.data.row import Row
from app.device import Device, device_of
from app.errors import named
from app.model.hf_directory import load_tokenizer, local_folder, locate, own_template, stop_ids
from app.start.environments import require_environment

if TYPE_CHECKING:
    from app.data.demonstrations import DemonstrationStream, Demonstrator


class CheckStage(Enum):
    """When inputs are checked."""

    plan = "plan"  # needs no device, and no library that takes seconds to import
    doctor = "doctor"  # downloads nothing
    start = "start"


class CheckStatus(Enum):
    """Result of a check."""

    ok = "ok"
    warn = "warn"  # the run starts, but something is worse than it could be
    fail = "fail"  # the run does not start, or fails later


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    subject: str
    message: str
    status: CheckStatus = CheckStatus.ok
    hint: str = ""  # how to fix it; empty if there is nothing to do


def outcome(subject: str, good: bool, message: str, hint: str, *, otherwise: CheckStatus = CheckStatus.fail) -> Finding:
    """Return an ok finding if `good`; else one with status `otherwise` and the hint."""
    return Finding(subject, message) if good else Finding(subject, message, otherwise, hint)


@dataclass(eq=False)
class RunInputs:
    """The inputs of a run. What cannot be loaded raises `ConfigError`."""

    config: RunConfig  # its `steps` follow from its `epochs` once the rows are counted
    moment: CheckStage
    folder: Path | None = None  # where the run writes; None: not checked
    checkpoint: Path | None = None  # what the run starts from
    warnings: tuple[str, ...] = ()  # for the run to record
    missing: set[str] = field(default_factory=set)  # `model` and `data` that only a start loads, and failed checks

    def __post_init__(self) -> None:
        if self.moment is not CheckStage.start:
            self.missing |= {"model"} if self.local_model is None else set()
            self.missing |= set() if rows.sets_of(self.config.data).are_local else {"data"}

    @property
    def trains(self) -> bool:
        """Whether this is about a training run."""
        return self.config.mode not in (Mode.eval, Mode.parity)

    @property
    def replies(self) -> bool:
        """Whether the rows of the run have replies that it imitates."""
        return self.config.mode is Mode.sft

    @cached_property
    def device(self) -> Device:
        return device_of(self.config.device.kind)

    @cached_property
    def local_model(self) -> Path | None:
        """The model's directory, unless it has to be downloaded."""
        return local_folder(self.config.model)

    @cached_property
    def model_path(self) -> Path:
        if self.moment is not CheckStage.start and self.local_model is not None:
            return self.local_model
        return locate(self.config.model)

    @cached_property
    def teacher_path(self) -> Path | None:
        """The directory of `teacher.path`, downloaded for a start; None without one."""
        model = self.config.teacher.model(self.config.model)
        if model is None or not self.trains:
            return None
        with named("teacher.path"):
            found = local_folder(model)
            if self.moment is CheckStage.start or found is not None:
                found = locate(model)
            return found

    @cached_property
    def chat_template(self) -> str | None:
        return own_template(self.config.model)

    @cached_property
    def tokenizer(self) -> Any:
        trusted = self.config.model.trust_remote_code
        return load_tokenizer(self.model_path, trust_remote_code=trusted, chat_template=self.chat_template)

    @cached_property
    def tasks(self) -> Sequence[Mapping[str, Any]]:
        """With `data.name=environment` the tasks of the environment, which a worker process loads in any case."""
        return require_environment(self.config, self.model_path)

    @cached_property
    def rows(self) -> rows.DataRows:
        tasks = self.tasks if self.config.data.from_environment else ()
        return rows.load(self.config.data, tasks=tasks, replies=self.replies)

    @cached_property
    def prompts(self) -> data.PromptData:
        longest = self.config.rollout.max_prompt_tokens
        seed = self.config.seed
        return data.build(self.config.data, self.tokenizer, seed=seed, max_prompt_tokens=longest, loaded=self.rows)

    @cached_property
    def demonstrator(self) -> "Demonstrator":
        from app.data.demonstrations import Demonstrator

        return Demonstrator(self.config.data, self.tokenizer, stop_ids(self.model_path), self.config.rollout.max_tokens)

    @cached_property
    def demonstration_rows(self) -> tuple[list[Row], list[str]]:
        """Rows to imitate beside the run's own, and warnings."""
        return rows.demonstrations(self.config.data, chain(*self.rows.evals.values()))

    @cached_property
    def demonstrations(self) -> "DemonstrationStream":
        from app.data.demonstrations import DemonstrationStream

        config = self.config
        return DemonstrationStream(
            self.demonstrator,
            self.demonstration_rows[0],
            per_step=config.algorithm.demonstrations_per_step,
            seed=config.seed,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue in the data from `RunState.extra`. Raises `ConfigError` if it was saved over other rows.

        Checkpoints of earlier versions have no fingerprint of demonstrations.
        """
        from app.placement.controller import CURSOR, DEMONSTRATIONS

        self.prompts.train.restore(saved[CURSOR])
        if self.config.data.demonstrations is not None and DEMONSTRATIONS in saved:
            self.demonstrations.require_same(saved[DEMONSTRATIONS])

    def count_steps(self, counts: RowCounts) -> None:
        """Set the steps of `epochs`."""
        config = self.config
        if config.epochs is not None and self.trains:
            steps = steps_of_epochs(config.epochs, counts.epoch, config.algorithm.prompts_per_step)
            self.config = replace(config, steps=steps)
