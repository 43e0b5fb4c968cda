"""Programs a second of `reward=code`, through the scorer.

python -m tests.bench.code [--programs 400] [--rounds 3] [--out FILE]
"""

import time
from typing import Any

from tests.bench.machine import Options, busy, conditions, machine, publish, spread
from tests.reward.scorers import running_scorer, trajectory

PROGRAM = "```python\nimport math\ndef root(n):\n    return math.isqrt(n)\n```"
TESTS = ["assert root(16) == 4", "assert root(17) == 4", "assert root(1) == 1"]
WORKERS = 2
KIND = "process"  # of confinement: the only one; earlier results had two
TARGETS = {KIND: 100}


def rate(programs: int) -> float:
    """Return programs a second; each has to pass."""
    trajectories = [trajectory(PROGRAM, prompt_id=f"set/{number}", test_list=TESTS) for number in range(programs)]
    with running_scorer(components={"code": 1.0}, workers=WORKERS, timeout_s=60.0) as scorer:
        scorer.scored(trajectories[: 4 * WORKERS])
        begin = time.perf_counter()
        scored = scorer.scored(trajectories)
        seconds = time.perf_counter() - begin
    assert all(each.reward == 1 for each in scored)
    return programs / seconds


def measure(rounds: int, programs: int) -> dict[str, Any]:
    before = []
    rates = []
    for _ in range(rounds):
        before.append(conditions())
        rates.append(rate(programs))
    return {
        "what": "code",
        "programs_per_second": {KIND: spread(rates, 1)},
        "targets": TARGETS,
        "programs": programs,
        "workers": WORKERS,
        "rounds": rounds,
        "before": {name: max(each[name] for each in before) for name in before[0]},
        "busy": busy(before),
        "machine": machine(),
    }


def main() -> None:
    options = Options(__doc__)
    options.add_argument("--programs", type=int, default=400)
    given, _ = options.parse()
    publish(measure(given.rounds, given.programs), given.out)


if __name__ == "__main__":
    main()
