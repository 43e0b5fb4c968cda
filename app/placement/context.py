"""The parts of a run, introduced to each other: what both placements are told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.checkpoint.manager import Checkpoints
from app.cluster.memory_monitor import MemoryMonitor
from app.config import RunConfig
from app.data.cursor import PromptCursor
from app.protocols import Trainer
from app.recovery.engine_supervisor import EngineSupervisor
from app.rollout.pool import EnginePool
from app.rollout.rollouter import Rollouter
from app.tracking.recorder import RunFolderRecorder
from app.types import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class RunContext:
    config: RunConfig
    trainer: Trainer
    pool: EnginePool
    sync: EngineSupervisor  # pushes, and replaces engines
    rollouter: Rollouter
    cursor: PromptCursor
    evals: Mapping[str, Sequence[Prompt]]
    recorder: RunFolderRecorder
    checkpoints: Checkpoints
    memory: MemoryMonitor
    model: Mapping[str, Any]  # `identity` of the source checkpoint

    @property
    def sampling(self) -> Sampling:
        rollout = self.config.rollout
        return Sampling(rollout.temperature, rollout.top_p, rollout.max_completion_tokens)
