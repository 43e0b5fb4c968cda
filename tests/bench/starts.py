"""Many starts of `python -m app steps=1` in a row: seconds, failures, and what each waited for its placement group.

    python -m tests.bench.starts --runs 50 --out tests/bench/results/starts.json
    python -m tests.bench.starts --runs 50 --spinning 4 --out tests/bench/results/starts_busy.json

`--spinning` processes that compute without pause keep the machine busy meanwhile. A start lasts from the command until
its first step stands in `metrics.jsonl`. `ready_s` is the time from the request of the placement group until it is
ready, `reserved_s` until the run goes on, so that their difference is the wait for a group that is ready.

Exits with 1 if a start failed or waited for a group that was ready.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from app.config.model import ModelConfig
from app.model.hf_directory import locate
from tests.bench.machine import busy, conditions, machine, publish, spread
from tests.bench.start import LIMIT_SECONDS, POLL_INTERVAL_S, RUN
from tests.bench.timed_app import TIMES_VARIABLE

MAX_WAIT_SECONDS = 3.0  # for a ready group: the call takes 0.2 s of CPU, so more on a busy machine; a missed one, 10 s
LAST_LINES = 6  # of a failed start's output
SPIN = "while True: pass"


@contextmanager
def spinning(processes: int) -> Iterator[None]:
    """Keep the machine busy with so many processes at the usual priority."""
    with ExitStack() as stack:
        for _ in range(processes):
            process = subprocess.Popen([sys.executable, "-c", SPIN])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def one_start(folder: Path) -> dict[str, Any]:
    """Start the application once and wait for its end."""
    times, output, metrics = folder / "times.json", folder / "output.txt", folder / "run" / "metrics.jsonl"
    began = time.perf_counter()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.timed_app", *RUN, f"hydra.run.dir={folder / 'run'}"],
            env={**os.environ, TIMES_VARIABLE: str(times)},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    first_step = None
    while process.poll() is None and time.perf_counter() - began < LIMIT_SECONDS:
        if first_step is None and metrics.exists() and "time/step" in metrics.read_text():
            first_step = time.perf_counter() - began
        time.sleep(POLL_INTERVAL_S)
    process.kill()  # of a start that is late

    found: dict[str, Any] = {"exit_code": process.wait(), "end_seconds": round(time.perf_counter() - began, 2)}
    if first_step is not None:
        found["seconds"] = round(first_step, 2)
    if times.exists():
        found |= json.loads(times.read_text())
    if process.returncode:
        found["output"] = output.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return found


def measured(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spreads of the starts that succeeded, and how many did not or waited for a group that was ready."""
    succeeded = [each for each in starts if each["exit_code"] == 0]
    waits = [each["reserved_s"] - each["ready_s"] for each in starts if "reserved_s" in each]
    return {
        "starts": len(starts),
        "failed": len(starts) - len(succeeded),
        "waited_for_ready_group": sum(wait > MAX_WAIT_SECONDS for wait in waits),
        "seconds": spread((each["seconds"] for each in succeeded), 1) if succeeded else None,
        "reserved_s": spread((each["reserved_s"] for each in succeeded), 3) if succeeded else None,
        "wait_for_ready_group_s": spread(waits, 3) if waits else None,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--runs", type=int, default=50)
    arguments.add_argument("--spinning", type=int, default=0)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()

    locate(ModelConfig())
    before = conditions()
    starts = []
    with spinning(given.spinning):
        for number in range(given.runs):
            with tempfile.TemporaryDirectory() as name:
                starts.append(one_start(Path(name)))
            print(number + 1, json.dumps(starts[-1]), file=sys.stderr)

    result = {
        "what": "starts",
        **measured(starts),
        "max_wait_s": MAX_WAIT_SECONDS,
        "load": {"busy": busy([before]) or given.spinning > 0, "spinning_processes": given.spinning, "before": before},
        "runs": starts,
        "machine": machine(),
    }
    publish(result, given.out)
    sys.exit(bool(result["failed"] or result["waited_for_ready_group"]))


if __name__ == "__main__":
    main()
