"""What `weight_sync.probe` costs: of the quickstart's time, and of the computation of each large preset.

    python -m tests.bench.probe --rounds 3 --out tests/bench/results/probe.json

The quickstart's shares of seconds and of sampled tokens are measured. A preset's share is counted: the forward FLOPs of
its probes over those of the trajectories between two probes, forward and backward.
"""

import json
import tempfile
from pathlib import Path

from app.weight_sync.probe import COMPLETIONS, INTERVAL, MAX_TOKENS, PROMPT_TOKENS
from tests.bench.machine import Options, busy, conditions, machine, publish, spread
from tests.compose import composed
from tests.runs import Run

PLACEMENTS = ("colocate", "fully_async")
PRESETS = ("npu8_fully_async_9b", "npu4_colocate_4b", "npu4_colocate_9b", "cuda8_fully_async_4b", "cuda4_colocate_4b")
SPAN = "compare with engines"
FORWARD_SHARE = 1 / 3  # of the FLOPs of forward and backward


def measured(placement: str) -> dict[str, float]:
    """Return the shares of one quickstart."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), f"placement={placement}", imports_sglang=True)
        assert run.wait() == 0, run.text
        steps = [line for line in run.metrics() if "time/step" in line]
        events = json.loads((run.folder / "timeline.json").read_text())["traceEvents"]
    probes = [event["dur"] / 1e6 for event in events if event["name"] == SPAN]
    tokens = len(probes) * COMPLETIONS * MAX_TOKENS
    return {
        "probes": len(probes),
        "of_step_time": sum(probes) / sum(line["time/step"] for line in steps),
        "of_sampled_tokens": tokens / (tokens + sum(line["tokens/completion"] for line in steps)),
    }


def counted(preset: str) -> float:
    """Return the share of a preset's computation, with half of its length limit in each completion."""
    config = composed(f"experiment={preset}")
    rollout = config.rollout
    engines = config.placement.engine_devices // rollout.tensor_parallel
    probe = engines * COMPLETIONS * (PROMPT_TOKENS + MAX_TOKENS) * (1 + FORWARD_SHARE)  # sampled, and compared
    trajectory = rollout.max_completion_tokens / 2 * (1 + FORWARD_SHARE)  # sampled, and trained on
    return probe / (INTERVAL * config.algorithm.trajectories_per_step * trajectory)


def main() -> None:
    given, _ = Options(__doc__).parse()
    before = []
    rounds: dict[str, list[dict[str, float]]] = {placement: [] for placement in PLACEMENTS}
    for _ in range(given.rounds):
        for placement in PLACEMENTS:
            before.append(conditions())
            rounds[placement].append(measured(placement))
    result = {
        "benchmark": "probe",
        "quickstart": {
            placement: {name: spread([each[name] for each in found], 4) for name in found[0]}
            for placement, found in rounds.items()
        },
        "presets": {preset: float(f"{counted(preset):.1e}") for preset in PRESETS},
        "target": {"quickstart": 0.01, "presets": 0.001},
        "before": before,
        "busy": busy(before),
        "machine": machine(),
    }
    publish(result, given.out)


if __name__ == "__main__":
    main()
