"""Syncs and handovers of the first hour, each under a clock: `python -m tests.bench.first_hour_syncs [key=value …]`.

Starts the engines and the trainer of a run, as training does, and then makes the calls that a schedule makes. Shared
devices (colocate): handovers with a sync in each. Devices of their own (fully_async): syncs with idle engines, a sync
while completions are in flight, and a sync during which an engine's scheduler is killed. Prints one JSON line.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.cluster.process_reaper import MARK, marked_processes, process_reaper
from app.config import RunConfig
from app.config.placement import PlacementKind
from app.errors import EngineError
from app.placement.time_sharing import TimeSharing
from app.recovery.retrying_sync import RetryingWeightSync
from app.start.preflight import preflight
from app.start.session import RolloutWorkers, TrainerWorkers, start_rollout_workers, start_trainer_workers
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, GroupRequest, Sampling
from app.utils.tasks import until_signal
from tests.compose import composed

SYNCS = 3
SYNCS_IN_FLIGHT = 10
SAMPLING_SECONDS = 0.02  # with all prompts in flight, before a sync
STREAMS = 4  # prompts in flight
GROUP_SIZE = 8
PROMPT_TOKENS = 16
KILLS = 5  # at most, until one falls into a sync
KILL_AFTER = 0.3  # of the seconds that a sync takes
SCHEDULER = "sglang::scheduler"


@dataclass
class Recorder:
    """Collects warnings, and says on stderr what happens."""

    timeline: Timeline = field(default_factory=Timeline)
    warnings: list[str] = field(default_factory=list)

    def status(self, text: str) -> None:
        sys.stderr.write(f"{text} …\n")

    def note(self, text: str, facts: Mapping[str, str | int] | None = None) -> None:
        self.status(text)

    def warn(self, text: str) -> None:
        sys.stderr.write(f"warning: {text}\n")
        self.warnings.append(text)


@dataclass
class Bench:
    """The running components, and the version that the next sync makes."""

    config: RunConfig
    workers: RolloutWorkers
    trainer_workers: TrainerWorkers
    sync: RetryingWeightSync
    devices: TimeSharing
    recorder: Recorder
    version: int = 0

    async def sync_once(self) -> float:
        """Return the seconds of one sync."""
        self.version += 1
        report = await self.sync.sync(self.version)
        return report.seconds["total"]


async def measure(config: RunConfig, folder: Path) -> dict[str, Any]:
    recorder = Recorder()
    began = time.perf_counter()
    async with (
        start_rollout_workers(config, folder, preflight(config), recorder) as workers,
        start_trainer_workers(folder, workers, first=True) as made,
    ):
        started = time.perf_counter() - began
        devices = TimeSharing(
            config.offload, made.trainer, workers.pool, workers.supervisor, adapters=config.serves_adapters
        )
        shared = config.placement.kind is PlacementKind.colocate
        sync = RetryingWeightSync(
            made.synchronizer,
            made.trainer,
            workers.supervisor,
            version=0,
            params_on_device=devices.params_onloaded if shared else None,
        )
        workers.supervisor.attach(sync.sync_restarted)
        bench = Bench(config, workers, made, sync, devices, recorder)
        async with workers.supervisor.monitor():
            measured = await (handovers(bench) if shared else separate_syncs(bench))
        return {"start_seconds": round(started, 1), **measured}


# --- shared devices


async def handovers(bench: Bench) -> dict[str, Any]:
    """Hand the devices back and forth. The engines answer after each sync."""
    to_engines, to_trainer, syncs = [], [], []

    async def sync() -> Any:
        bench.version += 1
        report = await bench.sync.sync(bench.version)
        syncs.append(report.seconds["total"])
        return report

    for _ in range(SYNCS):
        to_engines.append(await seconds_of(lambda: bench.devices.give_to_engines(sync)))
        await generate(bench, f"handover/{bench.version}@0")
        to_trainer.append(await seconds_of(bench.devices.give_to_trainer))
    return {
        "sync_seconds": rounded(syncs),
        "engines_wake_trainer_sleeps_seconds": rounded(to_engines),
        "engines_sleep_trainer_wakes_seconds": rounded(to_trainer),
    }


# --- devices of their own


async def separate_syncs(bench: Bench) -> dict[str, Any]:
    idle = [await bench.sync_once() for _ in range(SYNCS)]
    in_flight = await sync_in_flight(bench)
    killed = await sync_with_a_kill(bench, min(idle))
    return {"sync_seconds": rounded(idle), "in_flight": in_flight, "killed": killed}


async def sync_in_flight(bench: Bench) -> dict[str, Any]:
    """Sync while completions are sampled; count those that several policies sampled."""
    running = True
    completions: list[Completion] = []

    async def stream(index: int) -> None:
        count = 0
        while running:
            completions.extend(await generate(bench, f"flight/{index}-{count}@0"))
            count += 1

    streams = [asyncio.create_task(stream(index)) for index in range(STREAMS)]
    seconds = []
    for _ in range(SYNCS_IN_FLIGHT):
        await in_flight(bench)
        seconds.append(await bench.sync_once())
    running = False
    await asyncio.gather(*streams)

    spanning = sum(len({span.version for span in each.spans}) > 1 for each in completions)
    return {"seconds": rounded(seconds), "completions": len(completions), "of_several_versions": spanning}


async def sync_with_a_kill(bench: Bench, idle_seconds: float) -> dict[str, Any]:
    """Kill a scheduler while weights are loaded. The sync must end well, on an engine that was started again."""
    for attempt in range(1, KILLS + 1):
        before = len(bench.recorder.warnings)

        async def kill() -> None:
            await asyncio.sleep(KILL_AFTER * idle_seconds)
            kill_a_scheduler()

        killing = asyncio.create_task(kill())
        seconds = await seconds_of(bench.sync_once)
        await killing
        said = bench.recorder.warnings[before:]
        if any("repeating sync" in each for each in said):
            answered = await generate(bench, f"killed/{attempt}@0")
            version = answered[0].spans[-1].version
            return {
                "kills": attempt,
                "in_a_sync": True,
                "seconds_until_synced": round(seconds, 1),
                "answers_as_version": version,
                "synced_version": bench.version,
                "said": said,
            }
        await engine_is_back(bench)
    return {"kills": KILLS, "in_a_sync": False}


def kill_a_scheduler() -> None:
    """Kill the scheduler of one engine, as the kernel would."""
    for process in marked_processes(os.environ[MARK]):
        if SCHEDULER in " ".join(process.cmdline()):
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError("no scheduler runs")


async def engine_is_back(bench: Bench) -> None:
    """The kill came after the sync: wait until the supervisor has replaced the engine."""
    deadline = time.monotonic() + bench.config.rollout.start_timeout_s + 60
    restarts = bench.workers.supervisor.restarts
    while bench.workers.supervisor.restarts == restarts or bench.workers.pool.lost:
        assert time.monotonic() < deadline, "the killed engine was not replaced"
        await asyncio.sleep(0.2)


# --- helpers


async def generate(bench: Bench, prompt_id: str) -> list[Completion]:
    prompt = np.random.default_rng(bench.version).integers(4, 60, PROMPT_TOKENS).astype(np.int32)
    tokens = bench.config.rollout.max_completion_tokens
    request = GroupRequest(prompt_id, prompt, GROUP_SIZE, Sampling(1.0, 1.0, tokens), bench.version)
    async with bench.workers.pool.least_busy(GROUP_SIZE) as (_, engine):
        return await engine.generate(request)


async def in_flight(bench: Bench, seconds: float = 120.0) -> None:
    """Wait until every stream has a prompt on an engine, and then for a few tokens."""
    deadline = time.monotonic() + seconds
    while sum([(await engine.stats()).groups for engine in bench.workers.pool.alive]) < STREAMS:
        assert time.monotonic() < deadline, f"not {STREAMS} prompts were in flight within {seconds:g} s"
        await asyncio.sleep(0.001)
    await asyncio.sleep(SAMPLING_SECONDS)


async def seconds_of(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def rounded(seconds: list[float]) -> list[float]:
    return [round(each, 3) for each in seconds]


def main() -> None:
    config = composed(*sys.argv[1:])
    with process_reaper(), tempfile.TemporaryDirectory() as folder:
        try:
            measured = asyncio.run(until_signal(measure(config, Path(folder))))
        except EngineError as error:
            sys.exit(f"failed: {error}")
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
