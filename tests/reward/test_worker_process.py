"""Worker processes of a reward that die, freeze, or are closed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.reward.scorers import OWN, failed, pids, running_scorer, score, trajectory


def test_a_worker_that_dies_is_named_with_its_exit_status_and_log_and_replaced_also_while_it_loads(
    tmp_path: Path,
) -> None:
    log, warned = tmp_path / "reward.log", list[str]()
    with running_scorer(_target_=f"{OWN}.touchy", log=log, warned=warned) as scorer:
        assert score(scorer, [trajectory("die")]) == [0]
        assert f"died: the worker process died (exit code 3); log: {log}" in warned[0]

        while not pids(scorer):
            scorer.runner.run(asyncio.sleep(0.01))  # its successor starts
        os.kill(pids(scorer)[0], signal.SIGKILL)
        assert score(scorer, [trajectory("a")]) == [1.0]
        assert failed(scorer) == {"died": 1}


def test_a_frozen_worker_that_reads_nothing_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    log, warned = tmp_path / "reward.log", list[str]()
    with running_scorer(_target_=f"{OWN}.works", timeout_s=1.0, log=log, warned=warned) as scorer:
        (frozen,) = pids(scorer)
        os.kill(frozen, signal.SIGSTOP)
        assert score(scorer, [trajectory("a" * 2**23)]) == [0]  # more than the pipe holds
        assert "timeout: no result for 1 completion(s) within 1 s, see reward.timeout_s" in warned[0]

        assert score(scorer, [trajectory("a")]) == [1.0]
        assert "works is replaced: no result for" in log.read_text()
        assert log.stat().st_mode & 0o111 == 0  # nobody runs a log
        assert not os.path.exists(f"/proc/{frozen}")


def test_a_trajectory_whose_worker_is_killed_keeps_its_reward(tmp_path: Path) -> None:
    with running_scorer(_target_=f"{OWN}.killed_once") as scorer:
        assert score(scorer, [trajectory(str(tmp_path / "mark"))]) == [1.0]
        assert failed(scorer) == {}
        assert scorer.metrics["reward/retried"] == 1


def test_a_call_goes_on_when_its_caller_is_cancelled_and_ends_at_its_deadline() -> None:
    with running_scorer(_target_=f"{OWN}.touchy", timeout_s=0.5) as scorer:

        async def cancelled() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scorer.score([trajectory("hang")]), 0.1)

        scorer.runner.run(cancelled())
        assert score(scorer, [trajectory("a")]) == [1.0]  # on the worker that took its place


def test_closing_stops_every_worker_and_every_call_in_flight() -> None:
    with running_scorer(_target_=f"{OWN}.hangs", timeout_s=100.0, workers=2) as scorer:
        workers = pids(scorer)

        async def close_while_scoring() -> list[float]:
            scoring = asyncio.create_task(scorer.score([trajectory("a")]))
            await asyncio.sleep(0.3)
            scorer.close()
            return [scored.reward for scored in await asyncio.wait_for(scoring, 50)]

        assert scorer.runner.run(close_while_scoring()) == [0]
        assert len(workers) == 2
        assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
