"""Runs with tools whose processes are killed, and which are interrupted, at random moments.

KILLS_SEED (0 by default) chooses the moments, which are printed, KILLS_ROUNDS the number of kills.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.recovery.private_folders import PrivateFolders
from tests.recovery.test_recovery_runs import PLACEMENTS, PROBLEMS, assert_ledger, kill, saved_on_sigterm
from tests.runs import Run

ROUNDS = int(os.environ.get("KILLS_ROUNDS", "20"))
INTERRUPTS = ROUNDS // 2
GROUP, EVALUATE_EVERY = 8, 3
START_SECONDS = 25.0  # from the command to the first step, about
LIMIT_SECONDS = 900.0  # for the next step, on a busy machine
STEP_SECONDS = 3.0  # a few steps, or an evaluation, or a restart's beginning
TOOLS = [
    "experiment=tiny_tools",
    "reward=math",  # in a worker process
    "+reward.components.exact=0",  # without one
    f"algorithm.group_size={GROUP}",
    f"data.products.problems={PROBLEMS}",
    "data.products.eval_problems=100",
    f"eval.every={EVALUATE_EVERY}",
    "checkpoint.every=2",
    "checkpoint.export=false",
    "tracking.samples_per_step=1000",
    "rollout.stall_timeout_s=8",
    "weight_sync.timeout_s=15",
    "environment.retries=10",  # an episode that a sync cut lives through several kills on a slow machine
    "recovery.max_restarts=1000",
    "recovery.max_engine_failures=50",
    "resume=auto",
]
LONG = "steps=100000"
ALL = pytest.mark.parametrize("placement", list(PLACEMENTS))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


class Attempts:
    """The attempts of one run, in folders of their own."""

    def __init__(self, placement: str, kind: str, folders: PrivateFolders) -> None:
        self.seed = f"{placement} {kind} {os.environ.get('KILLS_SEED', '0')}"
        self.random = random.Random(self.seed)
        self.overrides = [*TOOLS, *PLACEMENTS[placement]]
        self.max_staleness = 0 if placement == "colocate" else 2
        self.folders = folders
        self.runs: list[Run] = []

    def start(self, steps: str = LONG) -> Run:
        base, prefix = self.folders.base, self.folders.prefix
        self.runs.append(Run(base, steps, *self.overrides, prefix=prefix, imports_sglang=True))
        return self.runs[-1]

    def wait_for_moment(self, run: Run, *, during_start: bool = False) -> None:
        """Wait for a random moment after the next step, or while the run starts."""
        seconds = self.random.uniform(0.0, START_SECONDS if during_start else STEP_SECONDS)
        if not during_start:
            run.wait_for_step(reached(run) + 1, LIMIT_SECONDS)
        after = "the start" if during_start else f"step {reached(run)}"
        sys.stdout.write(f"seed {self.seed!r}: {seconds:.2f} s after {after}\n")
        time.sleep(seconds)
        assert run.process.poll() is None, run.text

    def finish(self) -> None:
        """Make three more steps in a new process, and check the whole run."""
        steps = reached(self.runs[-1]) + 3
        run = self.start(f"steps={steps}")
        assert run.wait(LIMIT_SECONDS) == 0, run.text
        self.assert_nothing_left(run)
        assert run.summary()["status"] == "finished"
        assert_ledger(run.folder, steps)
        assert_records(run, steps)
        assert_samples(run, steps, self.max_staleness)
        self.folders.remove()

    def assert_nothing_left(self, run: Run) -> None:
        assert run.gone_within(15), run.processes()
        assert self.folders.left() == []


def reached(run: Run) -> int:
    lines = run.metrics()
    return lines[-1]["step"] if lines else 0


def assert_records(run: Run, steps: int) -> None:
    """Each step and each evaluation was recorded once, with its version."""
    lines = run.metrics()
    made = [line for line in lines if "time/step" in line]
    assert [line["step"] for line in made] == list(range(1, steps + 1))
    assert [line["policy_version"] for line in made] == list(range(1, steps + 1))
    assert len((run.folder / "prompts.jsonl").read_text().splitlines()) == steps

    evaluated = [line["step"] for line in lines if "eval/accuracy" in line]
    assert evaluated == [0, *(step for step in range(1, steps + 1) if step % EVALUATE_EVERY == 0 or step == steps)]
    assert run.summary()["steps"] == steps
    assert run.summary()["eval/accuracy_last"] == lines[-1]["eval/accuracy"]

    # A reward may exceed its deadline on a busy machine, or for what was sampled; a kill makes none fail.
    assert [made[-1][f"reward/failed_{kind}"] for kind in ("exception", "value", "died")] == [0, 0, 0], reward_log(run)
    assert max(line["environment/failed_fraction"] for line in made) == 0
    on_policy = [line["mismatch/kl"] for line in made if line["staleness/max"] == 0]
    assert on_policy
    assert max(on_policy) < 1e-6


def reward_log(run: Run) -> str:
    """What failed, for the test's report."""
    path = run.folder / "logs" / "reward.log"
    return path.read_text() if path.exists() else ""


def assert_samples(run: Run, steps: int, max_staleness: int) -> None:
    """Whole groups were trained, sampled by versions that were not too old, with the rewards of their replies."""
    rows = [json.loads(line) for line in (run.folder / "prompts.jsonl").read_text().splitlines()]
    for step in range(1, steps + 1):
        lines = (run.folder / "samples" / f"step_{step}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert Counter(sample["prompt"] for sample in samples) == dict.fromkeys(rows[step - 1]["trained"], GROUP)
        for sample in samples:
            versions = [version for sequence in sample["sequences"] for version, _, _ in sequence["versions"]]
            assert step - 1 - max_staleness <= min(versions) <= max(versions) <= step - 1
            right = sample["completion"].strip() == sample["answer"]
            assert sample["reward_components"]["exact"] == right
            assert sample["reward_components"]["math"] >= right


@pytest.fixture
def attempts(record_property: Callable[[str, object], None]) -> Iterator[Callable[[str, str], Attempts]]:
    """Makes the attempts of a placement. The folders of a test that fails stay."""
    made: list[Attempts] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job, whose children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def make(placement: str, kind: str) -> Attempts:
        folders = PrivateFolders.make()
        if not folders.permitted:
            folders.remove()
            pytest.skip("entering a mount namespace is not permitted here")
        made.append(Attempts(placement, kind, folders))
        record_property("rounds", INTERRUPTS if kind == "Ctrl-C" else ROUNDS)
        record_property("seed", made[-1].seed)
        return made[-1]

    yield make
    for each in made:
        for run in each.runs:
            run.end()


@pytest.mark.parametrize("kind", ["engine", "stalled engine", "rank", "environment worker", "reward worker"])
@ALL
def test_parts_killed_at_random_moments(placement: str, kind: str, attempts: Callable[[str, str], Attempts]) -> None:
    """An engine's server or its scheduler; then Ctrl-C."""
    each = attempts(placement, kind)
    run = each.start()
    for _ in range(ROUNDS):
        each.wait_for_moment(run)
        kill(run, each.random.choice(["engine", "scheduler"]) if kind == "engine" else kind)
    run.wait_for_step(reached(run) + 3, LIMIT_SECONDS)
    run.press_ctrl_c()
    assert run.wait(LIMIT_SECONDS) == 130, run.text
    each.assert_nothing_left(run)
    assert_ledger(run.folder, saved_on_sigterm(run))
    each.finish()


@ALL
def test_the_driver_killed_at_random_moments(placement: str, attempts: Callable[[str, str], Attempts]) -> None:
    """Each fourth time while it starts."""
    each = attempts(placement, "driver")
    for number in range(ROUNDS):
        run = each.start()
        each.wait_for_moment(run, during_start=number % 4 == 3)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10)
        each.assert_nothing_left(run)
    each.finish()


@ALL
def test_ctrl_c_at_random_moments(placement: str, attempts: Callable[[str, str], Attempts]) -> None:
    """Each third time while it starts: by Python's own handler before the run has one. What was finished is saved."""
    each = attempts(placement, "Ctrl-C")
    for number in range(INTERRUPTS):
        run = each.start()
        starting = number % 3 == 2
        each.wait_for_moment(run, during_start=starting)
        run.press_ctrl_c()
        assert run.wait(LIMIT_SECONDS) in ([130, -signal.SIGINT] if starting else [130]), run.text
        each.assert_nothing_left(run)
        if reached(run):
            assert_ledger(run.folder, saved_on_sigterm(run))
    each.finish()
