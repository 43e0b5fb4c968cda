"""CPU time of the driver per turn of an episode.

    python -m tests.bench.turns [--rounds N] [--out FILE]

The real controller of fully_async, rollouter, episodes, worker pool and recorder in real time, with real worker
processes at the other end of their pipes. Each episode has 8 turns of 200 sampled tokens and 100 observed ones, so the
last request has 2,100 tokens. Engines answer at once. As between Ray's processes, completions are unpickled when
they arrive and groups pickled when they go to the trainer; Ray's own calls, and the CPU time of the workers, are not
counted.
"""

import asyncio
import pickle
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from app.config.model import ModelConfig
from app.environment.pool import EnvironmentPool, EnvironmentSpec
from app.environment.wire import Limits, RendererChoice
from app.model.hf_directory import locate
from app.placement.fully_async import FullyAsync
from app.tracking.recorder import RunFolderRecorder
from app.trainer.remote import Packed
from app.types import Completion, FinishReason, GroupRequest, InFlight, ScoredGroup, VersionSpan
from tests.bench.machine import Options, busy, conditions, machine, publish, spread
from tests.simulation import SimEngine, SimTrainer, World, config

TURNS, SAMPLED, OBSERVED = 8, 200, 100
ENGINES, GROUP, PROMPTS, STEPS = 8, 8, 16, 4
TARGET_US = 700


class PicklingTrainer(SimTrainer):
    """Pickles groups and copies their arrays into shared memory, as the trainer's proxy does."""

    shared = bytearray(1024 * 1024)

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        arrays: list[pickle.PickleBuffer] = []
        pickle.dumps(Packed(groups), protocol=5, buffer_callback=arrays.append)
        for array in arrays:
            view = array.raw()
            self.shared[: view.nbytes] = view
        await super().add_groups(groups)


class EightTurns:
    """Answers every reply with a text of `OBSERVED` characters; the score differs within a group."""

    def begin(self, task: object) -> None:
        self.turns = 0

    def step(self, reply: object) -> str | None:
        self.turns += 1
        return None if self.turns == TURNS else "1" * OBSERVED

    def score(self) -> float:
        return float(id(self) // 64 % 2)


class ReplayEngine(SimEngine):
    """Answers every request at once, under the current policy version."""

    arrays = pickle.dumps(
        (
            np.random.default_rng(0).integers(5, 40, SAMPLED, dtype=np.int32),
            np.random.default_rng(0).normal(-1, 1, SAMPLED).astype(np.float32),
        )
    )

    async def generate(self, request: GroupRequest) -> list[Completion]:
        pickle.loads(pickle.dumps(request))
        await asyncio.sleep(0)
        tokens, logprobs = pickle.loads(self.arrays)
        spans = (VersionSpan(self.version, 0, SAMPLED),)
        return [Completion(tokens, logprobs, FinishReason.stop, spans) for _ in range(request.group_size)]


def measure(folder: Path, model: Path) -> tuple[float, int]:
    """Return the CPU seconds of this process in a whole run, and the turns of its episodes."""
    settings = config(
        steps=STEPS,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        max_staleness=2,
        in_flight=InFlight.retract,
        max_inflight_groups=PROMPTS,
        max_completion_tokens=TURNS * (SAMPLED + OBSERVED),
    )
    world = World(settings, folder, engine_count=ENGINES, eval_rows=1, rows=500, trainer=PicklingTrainer())
    world.push_seconds = 0.0
    target = f"{EightTurns.__module__}.{EightTurns.__qualname__}".replace("__main__", "tests.bench.turns")
    spec = EnvironmentSpec(
        {"kind": "own", "target": target, "args": {}, "tools": [], "id": None, "url": None},
        RendererChoice("plain", str(model), "template"),
        Limits(TURNS, None, 2048, 60.0, 600.0),
    )

    async def scenario(recorder: RunFolderRecorder) -> tuple[float, int]:
        world.environments = EnvironmentPool(spec, workers=2, episodes=64, log=folder / "worker.log", warn=print)
        world.recorder = recorder  # type: ignore[assignment]
        world.__post_init__()
        world.recorder = recorder  # type: ignore[assignment]
        await world.environments.start()
        try:
            parts = world.context()
            parts.pool.engines[:] = [ReplayEngine(world.seconds, world.right) for _ in range(ENGINES)]
            world.sync.engines = parts.pool.engines  # type: ignore[assignment]
            started = time.process_time()
            await FullyAsync(parts).run()
            seconds = time.process_time() - started
        finally:
            world.environments.close()
        trained = [each for _, groups in world.trainer.trained for group in groups for each in group.trajectories]
        assert all(len(each.turns) == 2 * TURNS for each in trained)
        return seconds, TURNS * len(trained)

    with RunFolderRecorder(settings, folder) as recorder:
        return asyncio.run(scenario(recorder))


def main() -> None:
    given, _ = Options(__doc__).parse()
    before = conditions()
    costs = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as name:
            seconds, turns = measure(Path(name), locate(ModelConfig()))
            costs.append(seconds / turns * 1e6)
    result = {
        "benchmark": "turns",
        "driver_cpu_us_per_turn": spread(costs, 1),
        "rounds": given.rounds,
        "target_us": TARGET_US,
        "limit_turns_per_second": round(1e6 / statistics.median(costs)),
        "turns_per_episode": TURNS,
        "sampled_tokens_per_turn": SAMPLED,
        "observed_tokens_per_turn": OBSERVED,
        "before": before,
        "busy": busy([before]),
        "machine": machine(),
    }
    publish(result, given.out)


if __name__ == "__main__":
    main()
