"""How well schedules use the devices: step time over the ideal of separate ones, max(generation, training).

    python -m tests.bench.overlap

The real controllers, staleness manager and buffer; engines and trainer are simulated in virtual time. The seconds of a
group are log-normal, with a long tail truncated at the length limit, and independent of the engine's load (decoding is
bound by memory bandwidth). So generating a step takes the sum of its groups' seconds over the groups in flight.
colocate uses both halves of the devices in each phase, so that it can be below 1. A sync that retracts requests costs
their prefill.
"""

import os
import platform
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from app.config.placement import PlacementKind
from app.placement.colocate import Colocate
from app.placement.fully_async import FullyAsync
from app.types import InFlight
from tests.bench.machine import publish
from tests.simulation import SimTrainer, World, config, now, run_virtual

SIGMA, CUT = 0.6, 5.0  # of the log-normal; limit over median
WARM_UP, MEASURED = 4, 10  # steps
COOL_DOWN = 6  # more steps, not measured: the last one has to wait for the longest completion of the run
ENGINES = 16
# Seconds of an engine to prefill what a group sampled in a second: 8 completions at 40 tokens a second each, over
# 32,000 tokens a second (4B on an H100). colocate has twice the devices for as many engines.
PREFILL = 0.01
COLOCATE, ASYNC = PlacementKind.colocate, PlacementKind.fully_async
MODES = {
    "colocate": (COLOCATE, 0, InFlight.drain),
    "colocate staleness 1": (COLOCATE, 1, InFlight.retract),
    "colocate staleness 2": (COLOCATE, 2, InFlight.retract),
    "colocate staleness 4": (COLOCATE, 4, InFlight.retract),
    "staleness 0 streamed": (ASYNC, 0, InFlight.drain),
    "staleness 1 drained": (ASYNC, 1, InFlight.drain),
    "staleness 1": (ASYNC, 1, InFlight.in_place),
    "staleness 1 retracted": (ASYNC, 1, InFlight.retract),
    "staleness 2": (ASYNC, 2, InFlight.in_place),
    "staleness 4": (ASYNC, 4, InFlight.in_place),
    "staleness 4 retracted": (ASYNC, 4, InFlight.retract),
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


def synthetic(generation: float, training: float) -> Preset:
    """A preset with a quarter of a step's groups in flight. `generation` and `training`: each side's seconds alone."""
    longest = generation / 4 / MEAN
    return Preset(128, 32, longest, training, training / 2, 0.5)


def _mean_over_longest() -> float:
    rng = random.Random(0)
    return fmean(min(1.0, rng.lognormvariate(0.0, SIGMA) / CUT) for _ in range(100_000))


MEAN = _mean_over_longest()
PRESETS = {
    "generation takes twice as long": synthetic(100, 50),
    "training takes twice as long": synthetic(50, 100),
    "balanced": synthetic(100, 100),
    # Training takes longer than generation, but the longest completions take 3 and 6 steps: a bound of fewer steps
    # aborts them and samples them again.
    "longest completion 3 steps": Preset(128, 384, 100, 33, 17, 0.5),
    "longest completion 6 steps": Preset(128, 768, 200, 33, 17, 0.5),
}


def durations(longest: float) -> Callable[[str], float]:
    """Return the seconds of a group as a function of its prompt id."""
    return lambda prompt_id: longest * min(1.0, random.Random(f"overlap/{prompt_id}").lognormvariate(0, SIGMA) / CUT)


def measure(preset: Preset, kind: PlacementKind, staleness: int, in_flight: InFlight, folder: Path) -> dict[str, float]:
    """Measure the mean step between warm-up and cool-down."""
    colocate = kind is COLOCATE
    settings = config(
        kind,
        steps=WARM_UP + MEASURED + COOL_DOWN,
        prompts_per_step=preset.prompts,
        max_staleness=staleness,
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
        prefill=PREFILL / 2 if colocate else PREFILL,
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
    sampled = sum(engine.busy for engine in world.engines)  # seconds of groups, in use or not
    ideal = max(preset.prompts * mean / preset.in_flight, preset.training)
    return {
        "step_seconds": step,
        "over_ideal": step / ideal,
        "discarded_sampling_fraction": 1 - sum(map(world.seconds, trainer.ids)) / sampled,
    }


def compare(preset: Preset, folder: Path) -> dict[str, dict[str, float]]:
    """Measure every schedule on a workload."""
    rows = {mode: measure(preset, *schedule, folder) for mode, schedule in MODES.items()}
    return {mode: {name: round(value, 3) for name, value in row.items()} for mode, row in rows.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        presets = {title: compare(preset, Path(name)) for title, preset in PRESETS.items()}
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}; virtual time"
    publish({"benchmark": "overlap", "presets": presets, "machine": machine}, None)


if __name__ == "__main__":
    main()
