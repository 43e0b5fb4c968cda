"""CPU time of the driver per completion, Ray included, with payloads of realistic size.

    python -m tests.bench.controller [--rounds N] [--out FILE]

The real controller of fully_async, rollouter, scorer (`exact`), staleness manager, buffer and recorder in real time,
with the product's proxies of 1,000 engines and of one trainer rank, whose actors are processes of a local Ray. An
engine answers a group of 8 completions of 8,000 tokens, with log-probabilities and text, after a second or so; the rank
takes 10 ms a group and is the slower side. The time is that of the whole driver process, all threads of Ray in it
included. Ray's own processes are not counted.

In each round the same run without Ray takes turns with it: engines and trainer answer inside the driver, without a copy
of anything. The difference is Ray's share. Weight syncs, and what each step asks every engine, are answered inside the
driver on both sides.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.placement.fully_async import FullyAsync
from app.rollout.engine.pool import EnginePool
from app.rollout.engine.remote import RemoteEngine
from app.tracking.recorder import RunFolderRecorder
from app.types import (
    Completion,
    FinishReason,
    GroupRequest,
    InFlight,
    MemoryUse,
    ScoredGroup,
    StepReport,
    SyncReport,
    VersionSpan,
)
from tests.bench.machine import MIB, Options, busy, conditions, machine, publish, spread
from tests.simulation import SimSync, SimTrainer, World, config

ENGINES, GROUP, TOKENS = 1000, 8, 8000
PROMPTS, STEPS = 250, 6  # groups a step
COMPLETIONS = PROMPTS * STEPS * GROUP
HOSTS = 4  # processes of the engines
TRAIN_SECONDS = 0.01  # of a group
STORE_BYTES = 1024 * MIB  # a step's groups twice, and those in the buffer
TARGET_US = 100


def arrays() -> list[tuple[np.ndarray, np.ndarray, str]]:
    """Return tokens, log-probabilities and text of a group's completions. The answer is 1: every other one is right."""
    rng = np.random.default_rng(0)
    texts = ["\n" * (TOKENS - 1) + "1" if member % 2 else "x" * TOKENS for member in range(GROUP)]
    return [
        (rng.integers(5, 99, TOKENS, dtype=np.int32), rng.normal(-1, 1, TOKENS).astype(np.float32), text)
        for text in texts
    ]


class Replies:
    """Answers a group after a second or so, under the policy version of its request."""

    def __init__(self) -> None:
        self.arrays = arrays()

    async def generate(self, request: GroupRequest) -> list[Completion]:
        await asyncio.sleep(random.Random(request.prompt_id).lognormvariate(0, 0.5))
        spans = (VersionSpan(request.version, 0, TOKENS),)
        return [Completion(tokens, logprobs, FinishReason.stop, spans, text) for tokens, logprobs, text in self.arrays]

    async def memory(self) -> MemoryUse:
        return MemoryUse(0, 0.0)


class Rank:
    """Takes `TRAIN_SECONDS` for each group."""

    def begin_step(self, version: int) -> None:
        self.version = version

    def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        assert all(len(each.completion.logprobs) == TOKENS for group in groups for each in group.group.trajectories)
        time.sleep(TRAIN_SECONDS * len(groups))

    def finish_step(self) -> StepReport:
        return StepReport(self.version, 1, {"loss/policy": 0.0})

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0.0)


class ReplayEngine(RemoteEngine):
    """The product's proxy. Only `generate` calls the actor."""

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None: ...

    async def memory(self) -> MemoryUse:
        return MemoryUse(0, 0.0)


class LocalEngine(ReplayEngine):
    """Answers inside the driver."""

    async def generate(self, request: GroupRequest) -> list[Completion]:
        return await self.actor.generate(request)


class NoSync(SimSync):
    async def sync(self, version: int) -> SyncReport:
        return SyncReport(version, 0, 0, {"total": 0.0})


class Actors:
    """The processes of a local Ray."""

    def __init__(self) -> None:
        import ray

        from app.trainer.rank import CONCURRENCY_GROUPS

        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES
        )
        make_host = ray.remote(Replies).options(max_concurrency=4096, num_cpus=0)
        self.hosts = [make_host.remote() for _ in range(HOSTS)]
        make_rank = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Rank)  # type: ignore[call-overload]
        self.rank = make_rank.options(num_cpus=0).remote()
        ray.get([each.memory.remote() for each in (*self.hosts, self.rank)])

    def engines(self) -> list[RemoteEngine]:
        return [ReplayEngine(f"engine {index}", self.hosts[index % HOSTS]) for index in range(ENGINES)]

    def trainer(self, folder: Path) -> Any:
        from app.trainer.remote import RemoteTrainer

        return RemoteTrainer([self.rank], timeout_s=600.0, logs=folder)


def run_once(actors: Actors | None) -> float:
    """Return the CPU microseconds of a whole run in this process, per completion."""
    settings = config(
        steps=STEPS,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        max_staleness=2,
        in_flight=InFlight.retract,
        max_inflight_groups=ENGINES,
        max_completion_tokens=TOKENS,
    )
    with tempfile.TemporaryDirectory() as name, RunFolderRecorder(settings, Path(name)) as recorder:
        trainer = actors.trainer(Path(name)) if actors else SimTrainer(seconds=TRAIN_SECONDS)
        world = World(settings, Path(name), rows=5000, eval_rows=1, trainer=trainer)

        async def scenario() -> float:
            world.recorder = recorder  # type: ignore[assignment]
            parts = world.context()
            parts.weight_sync.synchronizer = NoSync([], settings.placement.in_flight_or_default())
            replies = Replies()
            local = [LocalEngine(f"engine {index}", replies) for index in range(ENGINES)]
            EnginePool.__init__(parts.pool, actors.engines() if actors else local)
            began = time.process_time()
            await FullyAsync(parts).run()
            return time.process_time() - began

        return round(asyncio.run(scenario()) / COMPLETIONS * 1e6, 1)


def one_round(actors: Actors) -> dict[str, Any]:
    before = conditions()
    with_ray, without = run_once(actors), run_once(None)
    return {
        "before": before,
        "us": with_ray,
        "us_without_ray": without,
        "us_of_ray": round(with_ray - without, 1),
    }


def main() -> None:
    given, _ = Options(__doc__).parse()
    actors = Actors()
    rounds = [one_round(actors) for _ in range(given.rounds)]
    us, ray = (spread((each[name] for each in rounds), 1) for name in ("us", "us_of_ray"))
    result = {
        "benchmark": "controller",
        "driver_cpu_us_per_completion": us,
        "of_them_ray": ray,
        "target_us": TARGET_US,
        "completions": COMPLETIONS,
        "engines": ENGINES,
        "tokens_per_completion": TOKENS,
        "rounds": rounds,
        "busy": busy(each["before"] for each in rounds),
        "machine": machine("ray", "numpy"),
    }
    publish(result, given.out)


if __name__ == "__main__":
    main()
