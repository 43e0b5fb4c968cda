"""The components that a placement controller uses. The composition root (`app/mode/train.py`) wires them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.checkpoint.manager import CheckpointManager
from app.cluster.memory_monitor import MemoryMonitor
from app.config import RunConfig
from app.data.cursor import PromptCursor
from app.placement.concurrency import Concurrency
from app.placement.time_sharing import TimeSharing
from app.protocols import Trainer
from app.recovery.engine_supervisor import EngineSupervisor
from app.recovery.retrying_sync import RetryingWeightSync
from app.rollout.engine.pool import EnginePool
from app.rollout.rollouter import Rollouter
from app.tracking.recorder import RunFolderRecorder
from app.types import Prompt
from app.weight_sync.probe import EngineProbe

if TYPE_CHECKING:
    from app.data.demonstrations import DemonstrationStream, Demonstrator


@dataclass(frozen=True, slots=True)
class RunContext:
    """The components of one run, with one trainer."""

    config: RunConfig
    trainer: Trainer
    pool: EnginePool
    supervisor: EngineSupervisor
    weight_sync: RetryingWeightSync
    probe: EngineProbe
    time_sharing: TimeSharing
    rollouter: Rollouter
    concurrency: Concurrency
    cursor: PromptCursor
    evals: Mapping[str, Sequence[Prompt]]  # by evaluation set
    recorder: RunFolderRecorder
    checkpoints: CheckpointManager
    memory: MemoryMonitor
    model: Mapping[str, Any]  # `identity` of the source checkpoint
    demonstrator: "Demonstrator | None" = None  # of a supervised run
    demonstrations: "DemonstrationStream | None" = None  # imitated beside the rewards
