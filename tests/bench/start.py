"""Seconds from the command of a run until its first trained step stands in `metrics.jsonl`, on a CPU.

    python -m tests.bench.start --rounds 5 --out tests/bench/results/start.json

The run is `python -m app steps=1 eval.before_train=false` with the tiny model.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.machine import Options, busy, conditions, machine, publish, spread

POLL_INTERVAL_S = 0.02
LIMIT_SECONDS = 300.0
RUN = ["steps=1", "eval.before_train=false", "checkpoint.keep=0", "checkpoint.export=false"]
TARGET = 12.0  # seconds


def run_seconds(folder: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "app", *RUN, f"hydra.run.dir={folder}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and "time/step" in metrics.read_text()):
        if process.poll() not in (None, 0) or time.perf_counter() - began > LIMIT_SECONDS:
            raise SystemExit(f"the run in {folder} made no step")
        time.sleep(POLL_INTERVAL_S)
    seconds = time.perf_counter() - began
    process.wait(LIMIT_SECONDS)
    return seconds


def main() -> None:
    given, _ = Options(__doc__, rounds=5).parse()
    rounds: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        before = conditions()
        with tempfile.TemporaryDirectory() as folder:
            rounds.append({"seconds": round(run_seconds(Path(folder) / "run"), 2), "before": before})
    result = {
        "what": "start",
        "run_forked": spread((each["seconds"] for each in rounds), 1),
        "target": TARGET,
        "rounds": rounds,
        "busy": busy(each["before"] for each in rounds),
        "machine": machine(),
    }
    publish(result, given.out)


if __name__ == "__main__":
    main()
