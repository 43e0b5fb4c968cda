"""How well fully_async overlaps generation and training: step time over the ideal, max(generation, training).

    python -m tests.bench.overlap

The real controllers, staleness manager and buffer; engines and trainer are simulated in virtual time. The seconds of a
group are log-normal, with a long tail truncated at the length limit, and independent of the engine's load (decoding is
bound by memory bandwidth). So generating a step takes the sum of its groups' seconds over the groups in flight.
colocate uses both halves of the devices in each phase. The verl presets take lengths and times from its published runs
(Qwen2.5-Math-7B, DAPO, H20; 512 prompts per step): the longest group takes as long as its colocate generation, training
as long as its update_actor.
"""

import json
import os
import platform
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from app.config.placement import PlacementKind
from app.placement.colocate import Colocate
from app.placement.fully_async import FullyAsync
from app.types import InFlight
from tests.simulation import SimEngine, SimTrainer, World, config, now, run_virtual

SIGMA, CUT = 0.6, 5.0  # of the log-normal; limit over median
WARM_UP, MEASURED = 4, 10  # steps
COOL_DOWN = 6  # more steps, not measured: the last one has to wait for the longest completion of the run
ENGINES = 16
MODES = {
    "staleness 0 streamed": (0, InFlight.drain),
    "staleness 1 drained": (1, InFlight.drain),
    "staleness 1": (1, InFlight.retract),
    "staleness 2": (2, InFlight.retract),
    "staleness 4": (4, InFlight.retract),
}


@dataclass(frozen=True)
class Preset:
    """A workload: seconds and groups of one step."""

    prompts: int  # groups per step
    in_flight: int  # groups that the rollout half of the devices generates concurrently
    longest: float  # seconds of the longest group
    training: float  # on the trainer's half of the devices
    colocate_training: float  # on all devices, including all other phases that colocate runs in sequence
    push: float
    dominated: bool  # one side takes at most half as long as the other
    published: float | None = None  # speedup over colocate


def synthetic(generation: float, training: float) -> Preset:
    """A preset with a quarter of a step's groups in flight. `generation` and `training`: each side's seconds alone."""
    longest = generation / 4 / MEAN
    return Preset(
        128, 32, longest, training, training / 2, 0.5, 2 * min(generation, training) <= max(generation, training)
    )


def _mean_over_longest() -> float:
    rng = random.Random(0)
    return fmean(min(1.0, rng.lognormvariate(0.0, SIGMA) / CUT) for _ in range(100_000))


MEAN = _mean_over_longest()
PRESETS = {
    "generation takes twice as long": synthetic(100, 50),
    "training takes twice as long": synthetic(50, 100),
    "balanced": synthetic(100, 100),
    "verl 7B, 32 cards": Preset(512, 256, 357.41, 313.81, 790.10 - 357.41, 3.0, False, 790.10 / 294.77),
    "verl 7B, 128 cards": Preset(512, 256, 177.85, 113.16, 356.30 - 177.85, 3.0, False, 356.30 / 150.63),
}
# Training takes longer than generation, but the longest completions take 3 and 6 steps: a bound of fewer steps aborts
# them and samples them again.
LONG_TAIL = {
    "longest completion 3 steps": Preset(128, 384, 100, 33, 17, 0.5, True),
    "longest completion 6 steps": Preset(128, 768, 200, 33, 17, 0.5, True),
}


def durations(longest: float) -> Callable[[str], float]:
    """Return the seconds of a group as a function of its prompt id."""
    return lambda prompt_id: longest * min(1.0, random.Random(f"overlap/{prompt_id}").lognormvariate(0, SIGMA) / CUT)


def measure(preset: Preset, staleness: int | None, in_flight: InFlight, folder: Path) -> dict[str, float]:
    """Measure the mean step between warm-up and cool-down. `staleness` None measures colocate."""
    colocate = staleness is None
    settings = config(
        PlacementKind.colocate if colocate else PlacementKind.fully_async,
        steps=WARM_UP + MEASURED + COOL_DOWN,
        prompts_per_step=preset.prompts,
        max_staleness=staleness or 0,
        in_flight=in_flight,
        max_inflight_groups=preset.in_flight * (2 if colocate else 1),
    )
    training = preset.colocate_training if colocate else preset.training
    trainer = SimTrainer(seconds=training / preset.prompts)
    world = World(
        settings,
        folder,
        durations(preset.longest),
        engine_count=ENGINES,
        push_seconds=preset.push,
        rows=20 * preset.prompts,
        eval_rows=1,
        trainer=trainer,
    )
    controller = Colocate if colocate else FullyAsync

    async def scenario() -> float:
        await controller(world.context()).run()
        return now()

    run_virtual(scenario())
    step = (trainer.finished_at[WARM_UP + MEASURED - 1] - trainer.finished_at[WARM_UP - 1]) / MEASURED
    trained = trainer.trained[WARM_UP : WARM_UP + MEASURED]
    mean = fmean(world.seconds(group.prompt.id) for _, groups in trained for group in groups)
    ideal = max(preset.prompts * mean / preset.in_flight, preset.training)
    staleness_seen = [version - group.oldest_version for version, groups in trained for group in groups]
    lost = sum(line["rollout/aborted_groups"] + line["rollout/dropped_groups"] for line in world.recorder.lines)
    return {
        "step_seconds": step,
        "over_ideal": step / ideal,
        "staleness_mean": fmean(staleness_seen),
        "staleness_max": max(staleness_seen),
        "lost_groups_fraction": lost / (preset.prompts * settings.steps),
        "discarded_sampling_fraction": 1 - sum(map(world.seconds, trainer.ids)) / sum(map(busy_seconds, world.engines)),
    }


def busy_seconds(engine: SimEngine) -> float:
    """Seconds of groups that the engine sampled, in use or not."""
    return engine.busy


def compare(preset: Preset, folder: Path) -> dict[str, dict[str, float]]:
    """Measure every schedule on a workload."""
    colocate = measure(preset, None, InFlight.drain, folder)
    rows = {"colocate": colocate}
    for mode, (staleness, in_flight) in MODES.items():
        row = measure(preset, staleness, in_flight, folder)
        row["speedup_over_colocate"] = colocate["step_seconds"] / row["step_seconds"]
        rows[mode] = row
    return rows


def worst_of_partial_rollouts(rows: Mapping[str, Mapping[str, float]]) -> float:
    """The largest step time over the ideal, of the schedules whose completions continue across a sync."""
    partial = [mode for mode, (staleness, in_flight) in MODES.items() if staleness and in_flight is not InFlight.drain]
    return max(rows[mode]["over_ideal"] for mode in partial)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        compared = {title: compare(preset, Path(name)) for title, preset in {**PRESETS, **LONG_TAIL}.items()}

    worst = max(worst_of_partial_rollouts(compared[title]) for title, preset in PRESETS.items() if preset.dominated)
    result: dict[str, dict[str, object]] = {
        title: {mode: rounded(row) for mode, row in rows.items()} for title, rows in compared.items()
    }
    for title, preset in PRESETS.items():
        if preset.published:
            result[title]["published_speedup"] = round(preset.published, 2)
    print(
        json.dumps(
            {
                "benchmark": "overlap",
                "worst_over_ideal_where_one_side_dominates": round(worst, 3),
                "target": 1.10,
                "worst_over_ideal_with_a_long_tail": {
                    title: round(worst_of_partial_rollouts(compared[title]), 3) for title in LONG_TAIL
                },
                "presets": result,
                "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}; virtual time",
            }
        )
    )


def rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in row.items()}


if __name__ == "__main__":
    main()
