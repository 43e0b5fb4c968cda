"""Programs a second of `reward=code`, through the scorer, in each sandbox of this machine.

    python -m tests.bench.code [--programs 400] [--rounds 3]

Prints a JSON line for each sandbox: the median of the rounds, and all of them.
"""

import argparse
import json
import os
import statistics
import time

from app.reward.code.sandbox import NAMESPACES, PROCESS, available
from tests.reward.scorers import running_scorer, trajectory

PROGRAM = "```python\nimport math\ndef root(n):\n    return math.isqrt(n)\n```"
TESTS = ["assert root(16) == 4", "assert root(17) == 4", "assert root(1) == 1"]
WORKERS = 2


def rate(kind: str, programs: int) -> float:
    """Return programs a second; each has to pass."""
    trajectories = [trajectory(PROGRAM, prompt_id=f"set/{number}", test_list=TESTS) for number in range(programs)]
    with running_scorer(components={"code": 1.0}, args={"sandbox": kind}, workers=WORKERS, timeout_s=60.0) as scorer:
        scorer.scored(trajectories[: 4 * WORKERS])
        begin = time.perf_counter()
        scored = scorer.scored(trajectories)
        seconds = time.perf_counter() - begin
    assert all(each.reward == 1 for each in scored)
    return programs / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for kind in (NAMESPACES, PROCESS):
        if available(kind) is not None:
            continue
        rates = [round(rate(kind, given.programs), 1) for _ in range(given.rounds)]
        measured = {"sandbox": kind, "programs_per_second": statistics.median(rates), "rounds": rates}
        print(json.dumps({**measured, "workers": WORKERS, "cores": os.cpu_count(), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
