import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from app.config.reward import RewardConfig
from app.errors import RunError
from app.reward.component import custom
from app.reward.scorer import Scorer
from app.reward.workers import worker_process
from app.reward.workers.worker_process import WorkerProcess
from tests.descriptors import none_left
from tests.reward.scorers import TOWER, failed, pids, running_scorer, score


def test_workers_import_no_torch_and_no_hydra(custom_reward, trajectory):
    module = custom_reward(
        "import sys\n"
        "def heavy(trajectories):\n"
        "    return [sum(name in sys.modules for name in ('torch', 'hydra', 'omegaconf', 'ray', 'transformers'))]\n"
    )
    with running_scorer(_target_=f"{module}.heavy") as scorer:
        assert score(scorer, [trajectory("a")]) == [0]
        assert failed(scorer) == {}


@pytest.fixture
def worker(custom_reward, tmp_path) -> Iterator[WorkerProcess]:
    """A worker whose reward runs the text of the first completion."""
    module = custom_reward("import os\ndef run(trajectories):\n    exec(trajectories[0].text)\n    return [1.0]\n")
    process = WorkerProcess(custom(f"{module}.run", {}), tmp_path / "reward.log")
    try:
        yield process
    finally:
        process.close()
        process.kill()


def test_a_worker_that_dies_is_reported_with_its_exit_status_and_log(worker, trajectory, tmp_path):
    log = tmp_path / "reward.log"
    ends = {"os._exit(3)": "exit code 3", "os.kill(os.getpid(), 9)": "signal 9"}
    for code, status in ends.items():
        outcome = worker.call([trajectory(code)], 60.0)
        assert str(outcome) == f"died: the worker process died ({status}); log: {log}"
    assert worker.call([trajectory("pass")], 60.0) == [1.0]


def test_a_worker_that_is_killed_while_it_loads_is_replaced(worker, trajectory):
    worker.call([trajectory("os._exit(3)")], 60.0)  # its successor loads in the background
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.call([trajectory("pass")], 60.0) == [1.0]


def test_a_trajectory_whose_worker_is_killed_keeps_its_reward(custom_reward, trajectory, tmp_path):
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


def test_a_deadline_that_passes_names_its_setting_and_the_trajectories_and_is_in_the_log(worker, trajectory, tmp_path):
    hang = "import threading; threading.Event().wait()"
    outcome = worker.call([trajectory(hang)], 0.5)
    assert str(outcome) == "timeout: no result for 1 completion(s) within 0.5 s, see reward.timeout_s"
    said = []
    outcome = worker.call([trajectory(hang)] * 2, 0.5, slow_after_s=0.1, on_slow=lambda: said.append("slow"))
    assert str(outcome) == "timeout: no result for 2 completion(s) within 0.5 s, see reward.timeout_s"
    assert said == ["slow"]
    assert (tmp_path / "reward.log").read_text().count("run failed: timeout: no result for") == 2


def test_a_frozen_worker_that_reads_nothing_is_given_up(worker, trajectory, monkeypatch):
    monkeypatch.setattr(worker_process, "SEND_LIMIT_S", 1.0)
    worker.start()
    frozen = worker.pid
    os.kill(frozen, signal.SIGSTOP)
    outcome = worker.call([trajectory("a" * 2**23)], 1000.0)  # more than the pipe holds
    assert str(outcome) == "timeout: the worker read no trajectories for 1 s"
    assert not os.path.exists(f"/proc/{frozen}")
    assert worker.call([trajectory("pass")], 60.0) == [1.0]


def test_a_failed_call_is_written_to_the_log(worker, trajectory, tmp_path):
    worker.call([trajectory("raise KeyError('score')")] * 2, 60.0)
    log = (tmp_path / "reward.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert log.endswith("run failed on set/0@0, 2 trajectories: exception: KeyError: 'score' at <string>:1\n")


def test_a_process_that_starts_while_its_worker_is_closed_is_killed(worker, trajectory, monkeypatch):
    spawned = []
    spawn = worker._spawn

    def close_meanwhile(worker_end):
        spawned.append(spawn(worker_end))
        worker.close()  # as from another thread, before the process is known
        return spawned[0]

    monkeypatch.setattr(worker, "_spawn", close_meanwhile)
    outcome = worker.call([trajectory("pass")], 1000.0)
    assert str(outcome) == "died: the scorer was closed"
    assert [process.returncode for process in spawned] == [-signal.SIGKILL]


def test_closing_stops_every_worker_and_every_call_in_flight(custom_reward, trajectory):
    module = custom_reward("import time\ndef hang(trajectories):\n    time.sleep(1000)\n")

    async def close_while_scoring(scorer: Scorer) -> list[float]:
        scoring = asyncio.create_task(scorer.score([trajectory("a")]))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(scorer.close)
        return [scored.reward for scored in await scoring]

    scorer = Scorer(RewardConfig(_target_=f"{module}.hang", timeout_s=100.0, workers=2), step_trajectories=1000)
    workers = pids(scorer)
    begin = time.perf_counter()
    assert asyncio.run(close_while_scoring(scorer)) == [0]
    assert time.perf_counter() - begin < 50  # the reward would hang until its timeout of 100 s
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
    scorer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_workers_die_with_a_parent_that_is_killed_even_while_they_hang(trajectory, tmp_path):
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


def test_a_worker_that_cannot_be_started_again_ends_the_run_in_a_sentence(custom_reward, trajectory):
    module = custom_reward("def run(trajectories):\n    return [1.0]\n")
    with running_scorer(_target_=f"{module}.run", workers=1) as scorer:
        (pool,) = scorer.pools

        def scored() -> object:
            return pool.threads.submit(pool.score, [trajectory("a")]).result(60)

        assert scored() == [1.0]
        os.kill(pool.pids[0], signal.SIGKILL)
        with none_left(), pytest.raises(RunError, match="Too many open files"):
            scored()
        assert scored() == [1.0]
