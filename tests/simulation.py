"""Engines, a trainer and a push whose times are given, in virtual time, around the real placement code."""

import asyncio
import functools
import math
import random
import selectors
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest

from app.checkpoint import manager
from app.checkpoint.manager import CheckpointManager
from app.cluster.memory_monitor import MemoryMonitor
from app.config import RunConfig
from app.config.algorithm import AlgorithmConfig
from app.config.checkpoint import CheckpointConfig
from app.config.eval import EvalConfig
from app.config.placement import PlacementConfig, PlacementKind, Stream
from app.config.reward import RewardConfig
from app.config.rollout import RolloutConfig
from app.config.weight_sync import Probe
from app.data.cursor import PromptCursor
from app.errors import EngineError, EngineLost, SyncError, TrainerError
from app.mode.train import CONTROLLERS
from app.placement import controller as placement_controller
from app.placement.concurrency import Concurrency
from app.placement.context import RunContext
from app.placement.controller import PlacementController
from app.placement.time_sharing import TimeSharing
from app.recovery.engine_supervisor import EngineSupervisor
from app.recovery.retrying_sync import RetryingWeightSync
from app.reward.scorer import Scorer
from app.rollout.engine.pool import EnginePool
from app.rollout.episodes import EpisodeLimits, Episodes
from app.rollout.episodes.episode_group import episode_failures
from app.rollout.rollouter import Rollouter
from app.tracking.run_folder.timeline import Timeline
from app.types import (
    Completion,
    EngineMemory,
    EngineStart,
    EngineStats,
    FinishReason,
    Group,
    GroupRequest,
    InFlight,
    MemoryUse,
    Prompt,
    ScoredGroup,
    StepReport,
    SyncReport,
    TokenSequence,
    TrainerMemory,
    VersionSpan,
)
from app.utils import tasks
from app.weight_sync.probe import EngineProbe
from tests.tiny_models.tokenizer import build_tokenizer

P = ParamSpec("P")
T = TypeVar("T")
TOKENS_PER_SECOND = 100  # of a group, as `stats` counts them
YEAR_S = 365 * 86400.0
BOTH = pytest.mark.parametrize("kind", list(CONTROLLERS))
RIGHT, WRONG = 22, 21  # the tokens "1" and "0" of the character tokenizer; every prompt's answer is "1"


class Deadlock(Exception):
    """Nothing is ready and no timer is set: everyone waits for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is the number of virtual seconds since it was made."""

    def __init__(self) -> None:
        super().__init__(_Jump(self))
        self.virtual = 0.0

    def time(self) -> float:
        return self.virtual


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock
        self.loop.virtual += max(0.0, timeout)
        return super().select(0)


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class SimEngine:
    """Takes `seconds(prompt id)` for a group; which members are right says `right(prompt id, member)`."""

    seconds: Callable[[str], float]
    right: Callable[[str, int], bool]
    tokens: int = 4  # per completion
    version: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    aborted: list[str] = field(default_factory=list)
    begun: list[tuple[float, int, str]] = field(default_factory=list)  # time, version, prompt id
    busy: float = 0.0  # group-seconds
    fail: Exception | None = None
    start_seconds: float = 0.0
    name: str = "engine 0"
    prefill: float = 0.0  # seconds of the engine to prefill what one request sampled in a second
    retractions = 0  # of a completion
    ended: bool = False

    def __post_init__(self) -> None:
        # By name of the request: its prompt id, or a turn of it.
        self._since: dict[str, float] = {}  # when the request that is being sampled went on
        self._running: dict[str, asyncio.Event] = {}  # set: aborted
        self._sampled: dict[str, float] = {}  # seconds of the requests in flight
        self._retracted = False
        self._prefilled_at = 0.0
        self._changed: dict[str, asyncio.Event] = {}
        self._go = asyncio.Event()
        self._go.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(self, request: GroupRequest) -> list[Completion]:
        if self.fail is not None:
            raise type(self.fail)(*self.fail.args)  # a new one each time: tracebacks grow
        name = request.name
        assert name not in self._running, "one request twice in flight"
        total = left = self.seconds(request.prompt_id)
        self.begun.append((now(), self.version, request.prompt_id))
        self.calls[request.prompt_id] += 1
        self._idle.clear()
        aborted = self._running[name] = asyncio.Event()
        self._sampled[name] = 0.0
        changed = self._changed[name] = asyncio.Event()
        shares: list[tuple[int, float]] = []  # version, seconds
        try:
            while left > 1e-9 and not aborted.is_set():
                await self._go.wait()
                changed.clear()
                if now() < self._prefilled_at and self.fail is None:
                    await _within(changed, self._prefilled_at - now())
                    continue
                started, version = now(), self.version
                if math.isinf(left):
                    await changed.wait()
                else:
                    self._since[name] = started
                    await _within(changed, left)
                    del self._since[name]
                if self.fail is not None:
                    raise type(self.fail)(*self.fail.args)
                left -= now() - started
                self.busy += now() - started
                self._sampled[name] += now() - started
                shares.append((version, now() - started))
        finally:
            self._since.pop(name, None)
            del self._running[name], self._changed[name], self._sampled[name]
            if not self._running:
                self._idle.set()
        if aborted.is_set():
            partial = int(self.tokens * (1 - left / total)) if math.isfinite(total) and total else 0
            tokens = np.full(partial, 5, dtype=np.int32)
            spans = _spans(shares, partial)
            logprobs = np.zeros(partial, dtype=np.float32)
            return request.group_size * [Completion(tokens, logprobs, FinishReason.abort, spans)]
        spans = _spans(shares, self.tokens)
        return [self._completion(self.right(request.prompt_id, member), spans) for member in range(request.group_size)]

    def _completion(self, right: bool, spans: tuple[VersionSpan, ...]) -> Completion:
        tokens = np.full(self.tokens, 5, dtype=np.int32)  # blanks: the reward strips them
        tokens[-1] = RIGHT if right else WRONG
        logprobs = np.zeros(self.tokens, dtype=np.float32)
        return Completion(tokens, logprobs, FinishReason.stop, spans, retractions=self.retractions)

    async def pause(self, in_flight: InFlight) -> None:
        if in_flight is InFlight.drain:
            await self._idle.wait()
        else:
            self._go.clear()
            self._retracted = in_flight is InFlight.retract
            self._interrupt(list(self._changed))

    async def resume(self) -> None:
        if self._retracted:
            self._retracted = False
            self._prefilled_at = now() + self.prefill * sum(self._sampled.values())
        self._go.set()

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        for name in list(self._running):
            prompt_id = name.partition(" turn ")[0]
            if prompt_ids is None or prompt_id in prompt_ids:
                self.aborted.append(prompt_id)
                self._running[name].set()
                self._interrupt([name])

    def _interrupt(self, names: Sequence[str]) -> None:
        for name in names:
            self._changed[name].set()

    async def release(self, regions: Collection[EngineMemory]) -> None: ...

    async def reload(self, regions: Collection[EngineMemory]) -> None: ...

    async def update(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    async def load_adapter(self, version: int, body: Mapping[str, Any]) -> int:
        self.version = version
        return 1

    async def stats(self) -> EngineStats:
        sampling = sum(now() - since for since in self._since.values())
        return EngineStats(len(self._running), int(TOKENS_PER_SECOND * (self.busy + sampling)))

    async def memory(self) -> MemoryUse:
        return MemoryUse(0, 0.0)

    async def check(self) -> None:
        if isinstance(self.fail, EngineLost):
            raise type(self.fail)(*self.fail.args)  # a new one each time: tracebacks grow

    async def start(self, timeout_s: float) -> dict[str, Any]:
        await asyncio.sleep(self.start_seconds)
        return {}

    async def start_phase(self) -> EngineStart:
        return EngineStart.importing

    async def end(self) -> None:
        self.ended = True

    def die(self, error: EngineError | None = None) -> None:
        """Whatever is in flight, and whatever comes, fails."""
        self.fail = error or EngineLost("engine died on purpose")
        self._go.set()
        self._interrupt(list(self._changed))


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return


def _spans(shares: Sequence[tuple[int, float]], tokens: int) -> tuple[VersionSpan, ...]:
    """Tokens in proportion to the time that each version sampled; every version at least one while there are."""
    total, spans, begin, elapsed = sum(seconds for _, seconds in shares) or 1.0, [], 0, 0.0
    for index, (version, seconds) in enumerate(shares):
        elapsed += seconds
        end = tokens if index + 1 == len(shares) else min(tokens - 1, max(begin + 1, round(tokens * elapsed / total)))
        if end > begin:
            spans.append(VersionSpan(version, begin, end))
            begin = end
    return tuple(spans)


@dataclass
class SimTrainer:
    """The split step's state machine with a ledger; `seconds` per group, `finish` per step."""

    seconds: float = 0.0
    finish: float = 0.0
    busy: float = 0.0
    open: int | None = None
    fed: list[Group] = field(default_factory=list)
    trained: list[tuple[int, list[Group]]] = field(default_factory=list)  # version trained, groups
    finished_at: list[float] = field(default_factory=list)
    calls: int = 0
    aborts: int = 0
    fail: Mapping[str, Exception] = field(default_factory=dict)  # by call; raised once
    hang: str | None = None
    restored: int = 0  # version
    offloaded: set[TrainerMemory] = field(default_factory=set)

    async def begin_step(self, *, version: int) -> None:
        self._raise("begin_step")
        assert not self.offloaded, "trained while offloaded"
        assert self.open is None, "begin twice"
        self.open, self.fed = version, []

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        assert self.open is not None
        await self._work("add_groups", self.seconds * len(groups))
        self.fed += [each.group for each in groups]

    async def finish_step(self) -> StepReport:
        assert self.open is not None
        assert self.fed, "an update without a gradient"
        await self._work("finish_step", self.finish)
        version, self.open = self.open, None
        self.trained.append((version - 1, self.fed))
        self.finished_at.append(now())
        return StepReport(version, 1, {"loss/policy": 0.0})

    async def abort_step(self) -> None:
        self.aborts += 1
        self.open, self.fed = None, []
        self._raise("abort_step")

    async def add_demonstrations(self, sequences: Sequence[TokenSequence]) -> None: ...

    async def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        return [sequence.logprobs for sequence in sequences]

    async def old_logprobs(self, groups: Sequence[ScoredGroup]) -> None: ...

    async def offload(self, region: TrainerMemory) -> None:
        if region in self.offloaded:
            raise TrainerError(f"{region.name} is offloaded already")
        self.offloaded.add(region)

    async def onload(self, region: TrainerMemory) -> None:
        self.offloaded.discard(region)

    async def version(self) -> int | None:
        self._raise("version")
        return self.trained[-1][0] + 1 if self.trained else self.restored

    async def memory(self) -> list[MemoryUse]:
        return [MemoryUse(0, 0.0)]

    async def checkpoint_bytes(self) -> int:
        return 0

    async def capture(self) -> int:
        return 0

    async def write(self, folder: Path) -> dict[str, int]:
        return {}

    async def restore(self, folder: Path, *, version: int) -> None:
        self.restored = version

    async def _work(self, call: str, seconds: float) -> None:
        self._raise(call)
        if self.hang == call:
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)
        self.busy += seconds
        self.calls += 1

    def _raise(self, call: str) -> None:
        if call in self.fail:
            raise self.fail[call]

    @property
    def ids(self) -> list[str]:
        return [group.prompt.id for _, groups in self.trained for group in groups]


@dataclass
class SimSync:
    engines: list[SimEngine]
    in_flight: InFlight
    seconds: float = 0.0
    pushed: list[tuple[float, int]] = field(default_factory=list)
    fail_at: int | None = None
    trainer: Any = None  # whose parameters are read

    def set_engines(self, engines: Mapping[int, Any]) -> None:
        self.engines = list(engines.values())

    async def abort(self) -> None: ...

    async def sync(self, version: int) -> SyncReport:
        if version == self.fail_at:
            raise SyncError("push failed on purpose")
        if TrainerMemory.parameters in getattr(self.trainer, "offloaded", ()):
            raise SyncError("weight sync while offloaded: parameters")
        await asyncio.gather(*(engine.pause(self.in_flight) for engine in self.engines))
        await asyncio.sleep(self.seconds)
        for engine in self.engines:
            if engine.fail is not None:
                raise SyncError("an engine was lost")
            engine.version = version
        await asyncio.gather(*(engine.resume() for engine in self.engines))
        self.pushed.append((now(), version))
        return SyncReport(version, 0, 0, {"total": self.seconds})


@dataclass
class Lines:
    """What the placement code tells a recorder, kept in lists."""

    folder: Path
    timeline: Timeline = field(default_factory=Timeline)
    lines: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[float, int]] = field(default_factory=list)
    evaluated: dict[int, Sequence[Group]] = field(default_factory=dict)  # by step
    ledger: list[tuple[int, list[str], list[str]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    stop_reason: str | None = None

    def status(self, text: str) -> None:
        self.statuses.append(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append({"step": step, **metrics})

    used = False

    def resume(self, step: int) -> None:
        self.lines = [line for line in self.lines if line["step"] <= step]
        self.ledger = [each for each in self.ledger if each[0] <= step]

    def log_prompts(
        self, step: int, *, trained: Sequence[str], filtered: Sequence[str], unplayable: Sequence[str] = ()
    ) -> None:
        self.ledger.append((step, [*trained], [*filtered]))

    def flush(self) -> None: ...

    def note(self, text: str, facts: Mapping[str, str | int] | None = None) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def log_samples(self, step: int, groups: Sequence[Group], decode: object = None) -> None: ...

    def log_eval(
        self, step: int, results: Mapping[str, Mapping[str, float]], groups: Sequence[Group] = (), decode: object = None
    ) -> None:
        self.evaluations.append((now(), step))
        self.evaluated[step] = groups


def config(kind: PlacementKind = PlacementKind.fully_async, **changes: Any) -> RunConfig:
    """A small run; `changes` are settings by their last name."""
    made = RunConfig(
        steps=6,
        algorithm=AlgorithmConfig(prompts_per_step=4, group_size=2),
        placement=PlacementConfig(kind=kind, stream=Stream.auto),
        rollout=RolloutConfig(max_inflight_groups=8, max_completion_tokens=16),
        eval=EvalConfig(before_train=False),
        checkpoint=CheckpointConfig(keep=0, export=False),
    )
    for name, value in changes.items():
        section = next(
            each
            for each in (made.algorithm, made.placement, made.rollout, made.eval, made.trainer, made)
            if hasattr(each, name)
        )
        setattr(section, name, value)
    return made


def prompts(count: int, source: str = "sim") -> list[Prompt]:
    return [Prompt(f"{source}/{row}", np.arange(3, dtype=np.int32), "1", source) for row in range(count)]


@dataclass
class World:
    """Everything around one run."""

    config: RunConfig
    folder: Path
    seconds: Callable[[str], float] = lambda prompt_id: 1.0
    right: Callable[[str, int], bool] = lambda prompt_id, member: member % 2 == 0
    engine_count: int = 2
    push_seconds: float = 0.1
    rows: int = 50
    eval_rows: int = 2
    start_seconds: float = 5.0  # of an engine that replaces another
    tokens: int = 4  # of a completion
    prefill: float = 0.0  # of a `SimEngine`
    adapts: bool = False  # the groups in flight
    probe: Probe = Probe.never  # a simulated engine counts every request
    environments: Any = None  # a `SimEnvironments`; None: single turns
    trainer: SimTrainer = field(default_factory=lambda: SimTrainer(seconds=0.1, finish=0.2))

    def __post_init__(self) -> None:
        self.cursor = PromptCursor(prompts(self.rows), seed=0, shuffle=True)
        self.recorder = Lines(self.folder)
        self.scorer = Scorer(RewardConfig(components={"environment" if self.environments else "exact": 1.0}))

    def context(self) -> RunContext:
        """Made inside the loop that they live in."""
        self.engines = [
            SimEngine(self.seconds, self.right, self.tokens, name=f"engine {index}", prefill=self.prefill)
            for index in range(self.engine_count)
        ]
        in_flight = self.config.placement.in_flight_or_default(keeps_cache=True)
        self.sync = SimSync(self.engines, in_flight, self.push_seconds, trainer=self.trainer)
        pool = EnginePool(self.engines)
        supervisor = EngineSupervisor(self.config, pool, self.replace, self.recorder.warn)
        time_sharing = TimeSharing(
            self.config.offload,
            self.trainer,
            pool,
            supervisor,
            adapters=self.config.serves_adapters,
            in_flight=in_flight,
        )
        colocate = self.config.placement.kind is PlacementKind.colocate
        weight_sync = RetryingWeightSync(
            self.sync,
            self.trainer,
            supervisor,
            version=0,
            params_on_device=time_sharing.params_onloaded if colocate else None,
        )
        supervisor.attach(weight_sync.sync_restarted)
        recorder: Any = self.recorder  # records a run in lists instead of its folder
        return RunContext(
            config=self.config,
            trainer=self.trainer,
            pool=pool,
            supervisor=supervisor,
            weight_sync=weight_sync,
            probe=EngineProbe(self.probe, self.config.device.dtype, self.recorder.warn),
            time_sharing=time_sharing,
            rollouter=Rollouter(
                pool, self.scorer, build_tokenizer(256), self.recorder.timeline, self.config.recovery, self._episodes()
            ),
            concurrency=Concurrency(self.config, self.recorder.warn, adapts=self.adapts),
            cursor=self.cursor,
            evals={"eval": prompts(self.eval_rows, "eval")},
            recorder=recorder,
            checkpoints=CheckpointManager(
                self.folder, self.config.checkpoint.keep, keep_best=self.config.checkpoint.keep_best
            ),
            memory=MemoryMonitor(self.trainer, pool, self.recorder.warn),
            model={},
        )

    def _episodes(self) -> Episodes | None:
        if self.environments is None:
            return None
        rollout, settings = self.config.rollout, self.config.environment
        limits = EpisodeLimits(rollout.max_prompt_tokens, rollout.max_completion_tokens, settings.retries)
        window = self.config.algorithm.trajectories_per_step
        failures = episode_failures(settings.max_failed_fraction, window, self.recorder.warn)
        return Episodes(self.environments, limits, failures, self.config.seed)

    def replace(self, place: int) -> SimEngine:
        """An engine that takes the place of a lost one; it knows no pushed policy yet."""
        engine = SimEngine(self.seconds, self.right, self.tokens, version=-1, name=f"engine {place}")
        engine.start_seconds = self.start_seconds
        self.engines.append(engine)
        return engine


def play(
    world: World,
    *deaths: tuple[float, int],
    at_start: Callable[[PlacementController], None] = lambda controller: None,
    limit: float = YEAR_S,
) -> float:
    """Run a world to its end and return its virtual seconds."""

    async def kill() -> None:
        for time, number in sorted(deaths):
            await asyncio.sleep(time - now())
            world.engines[number % len(world.engines)].die()

    async def run() -> float:
        context = world.context()
        controller = CONTROLLERS[world.config.placement.kind](context)
        at_start(controller)
        killer = asyncio.create_task(kill())
        async with asyncio.timeout(limit), context.supervisor.monitor():
            await controller.run()
        killer.cancel()
        return now()

    return run_virtual(run())


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do file work at once: virtual time would run away from a thread."""

    async def at_once(work: Callable[..., object], *arguments: object) -> object:
        return work(*arguments)

    for module in (tasks, placement_controller, manager):
        monkeypatch.setattr(module, "in_thread", at_once)


def long_tailed(seed: int, *, median: float = 1.0, sigma: float = 0.8, limit: float = 20.0) -> Callable[[str], float]:
    """Log-normal seconds, the same for a prompt whenever it is asked; cut at `limit` as lengths are."""

    def seconds(prompt_id: str) -> float:
        return min(limit, median * random.Random(f"{seed}/{prompt_id}").lognormvariate(0.0, sigma))

    return seconds
