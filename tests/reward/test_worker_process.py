import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.config.reward import RewardConfig
from app.errors import RunError
from app.reward.component import custom
from app.reward.outcome import Failure, LoggedScore
from app.reward.reward_pool import RewardPool
from app.reward.scorer import Scorer
from app.types import Trajectory
from tests.descriptors import none_left
from tests.reward.scorers import TOWER, WriteReward, failed, pids, running_scorer, score, trajectory


def test_workers_import_no_torch_and_no_hydra(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "import sys\n"
        "def heavy(trajectories):\n"
        "    return [sum(name in sys.modules for name in ('torch', 'hydra', 'omegaconf', 'ray', 'transformers'))]\n"
    )
    with running_scorer(_target_=f"{module}.heavy") as scorer:
        assert score(scorer, [trajectory("a")]) == [0]
        assert failed(scorer) == {}


@dataclass
class OneWorker:
    """One worker, whose reward runs the text of the first completion."""

    pool: RewardPool
    runner: asyncio.Runner
    slow: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        (pid,) = self.pool.pids
        return pid

    def call(
        self, trajectories: Sequence[Trajectory], timeout_s: float = 60.0, slow_after_s: float = 1000.0
    ) -> list[float | LoggedScore | Failure | None] | Failure:
        return self.runner.run(self.pool.call(trajectories, timeout_s, slow_after_s, lambda: self.slow.append("slow")))


@pytest.fixture
def worker(custom_reward: WriteReward, tmp_path: Path) -> Iterator[OneWorker]:
    module = custom_reward("import os\ndef run(trajectories):\n    exec(trajectories[0].text)\n    return [1.0]\n")
    component, log = custom(f"{module}.run", {}), tmp_path / "reward.log"
    with asyncio.Runner() as runner:
        pool = RewardPool(component, workers=1, timeout_s=60.0, log=log, warn=lambda text: None)

        async def start() -> None:
            await pool.start_workers()

        try:
            runner.run(start())
            yield OneWorker(pool, runner)
        finally:
            pool.close()


def test_a_worker_that_dies_is_reported_with_its_exit_status_and_log(worker: OneWorker, tmp_path: Path) -> None:
    log = tmp_path / "reward.log"
    ends = {"os._exit(3)": "exit code 3", "os.kill(os.getpid(), 9)": "signal 9"}
    for code, status in ends.items():
        outcome = worker.call([trajectory(code)])
        assert str(outcome) == f"died: the worker process died ({status}); log: {log}"
    assert worker.call([trajectory("pass")]) == [1.0]


def test_a_worker_that_is_killed_while_it_loads_is_replaced(worker: OneWorker) -> None:
    worker.call([trajectory("os._exit(3)")])

    while not worker.pool.pids:
        worker.runner.run(asyncio.sleep(0.01))  # its successor starts
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.call([trajectory("pass")]) == [1.0]


def test_a_trajectory_whose_worker_is_killed_keeps_its_reward(custom_reward: WriteReward, tmp_path: Path) -> None:
    module = custom_reward(
        "import os, pathlib\n"
        "def killed_once(trajectory):\n"
        "    mark = pathlib.Path(trajectory.text)\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return 1.0\n"
    )
    with running_scorer(_target_=f"{module}.killed_once") as scorer:
        assert score(scorer, [trajectory(str(tmp_path / "mark"))]) == [1.0]
        assert failed(scorer) == {}
        assert scorer.metrics["reward/retried"] == 1


def test_a_deadline_that_passes_names_its_setting_and_the_trajectories_and_is_in_the_log(
    worker: OneWorker, tmp_path: Path
) -> None:
    hang = "import threading; threading.Event().wait()"
    outcome = worker.call([trajectory(hang)], 0.5)
    assert str(outcome) == "timeout: no result for 1 completion(s) within 0.5 s, see reward.timeout_s"
    assert worker.slow == []
    outcome = worker.call([trajectory(hang)] * 2, 0.5, 0.1)
    assert str(outcome) == "timeout: no result for 2 completion(s) within 0.5 s, see reward.timeout_s"
    assert worker.slow == ["slow"]
    assert (tmp_path / "reward.log").read_text().count("run is replaced: no result for") == 2


def test_a_frozen_worker_that_reads_nothing_is_given_up(worker: OneWorker) -> None:
    frozen = worker.pid
    os.kill(frozen, signal.SIGSTOP)
    outcome = worker.call([trajectory("a" * 2**23)], 1.0)  # more than the pipe holds
    assert str(outcome) == "timeout: no result for 1 completion(s) within 1 s, see reward.timeout_s"
    assert worker.call([trajectory("pass")]) == [1.0]
    assert not os.path.exists(f"/proc/{frozen}")


def test_a_call_goes_on_when_its_caller_is_cancelled_and_ends_at_its_deadline(custom_reward: WriteReward) -> None:
    module = custom_reward(
        "import time\n"
        "def run(trajectories):\n"
        "    time.sleep(1000 if trajectories[0].text == 'hang' else 0)\n"
        "    return [1.0]\n"
    )
    with running_scorer(_target_=f"{module}.run", timeout_s=0.5) as scorer:

        async def cancelled() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scorer.score([trajectory("hang")]), 0.1)

        scorer.runner.run(cancelled())
        assert score(scorer, [trajectory("a")]) == [1.0]  # on the worker that took its place


def test_a_failed_call_is_written_to_the_log(worker: OneWorker, tmp_path: Path) -> None:
    worker.call([trajectory("raise KeyError('score')")] * 2)
    log = (tmp_path / "reward.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert log.endswith("run failed on set/0@0, 2 trajectories: exception: KeyError: 'score' at <string>:1\n")


def test_closing_stops_every_worker_and_every_call_in_flight(custom_reward: WriteReward) -> None:
    module = custom_reward("import time\ndef hang(trajectories):\n    time.sleep(1000)\n")

    async def close_while_scoring(scorer: Scorer) -> list[float]:
        await scorer.start()
        workers.extend(pids(scorer))
        scoring = asyncio.create_task(scorer.score([trajectory("a")]))
        await asyncio.sleep(0.3)
        scorer.close()
        return [scored.reward for scored in await scoring]

    scorer = Scorer(RewardConfig(_target_=f"{module}.hang", timeout_s=100.0, workers=2), step_trajectories=1000)
    workers: list[int] = []
    begin = time.perf_counter()
    assert asyncio.run(close_while_scoring(scorer)) == [0]
    assert time.perf_counter() - begin < 50  # the reward would hang until its timeout of 100 s
    assert len(workers) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
    scorer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_workers_die_with_a_parent_that_is_killed_even_while_they_hang(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "import numpy as np\n"
        "from app.config.reward import RewardConfig\n"
        "from app.reward.scorer import Scorer\n"
        "from app.types import Completion, FinishReason, Prompt, Trajectory, VersionSpan\n"
        "completion = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), FinishReason.stop,\n"
        "                        (VersionSpan(0, 0, 1),))\n"
        "def trajectory(text):\n"
        "    return Trajectory(Prompt('set/0@0', np.zeros(1, np.int32), '42', 'set'), completion, text)\n"
        "async def main():\n"
        "    scorer = Scorer(RewardConfig(components={'math': 1.0}, workers=2, timeout_s=1000.0))\n"
        "    await scorer.start()\n"
        "    await scorer.score([trajectory('42')] * 8)\n"
        "    print(*scorer.pools[0].pids, flush=True)\n"
        f"    await scorer.score([trajectory({TOWER!r})])\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            time.sleep(0.5)  # one of them is evaluating the power tower by now
        finally:
            parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if _running(pid)]:
        assert time.monotonic() < deadline, f"{alive} outlived their parent"
        time.sleep(0.05)


def _running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_cannot_be_started_again_ends_the_run_in_a_sentence(custom_reward: WriteReward) -> None:
    module = custom_reward("def run(trajectories):\n    return [1.0]\n")
    with running_scorer(_target_=f"{module}.run", workers=1) as scorer:
        assert score(scorer, [trajectory("a")]) == [1.0]
        os.kill(pids(scorer)[0], signal.SIGKILL)
        with none_left(), pytest.raises(RunError, match="Too many open files"):
            score(scorer, [trajectory("a")])
