"""Errors of actor calls, and where and why an actor died, from messages of Ray 2.60."""

import asyncio
from pathlib import Path

import pytest
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from app.errors import EngineError, EngineLost, SyncError
from app.utils.ray_calls import keep_ray_logs, run_error

BASH = "bash: line 1: /home/my: No such file or directory"
FACTS = """
\tclass_name: EngineHost
\tactor_id: 2a04b521ebf483dd623b0ccd01000000
\tpid: 11179
\tnamespace: 88135738-d252-4847-bbe3-a9abeefb997b
\tip: 10.77.0.2
"""
LOST_NODE = f"""The actor died unexpectedly before finishing this task.{FACTS}\
The actor died because its node has died. Node Id: b25d55b440596925b84f00cdf71704b2cc778a303ec1882ab7b685f9
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""


def converted(error: BaseException) -> BaseException:
    return run_error(error, "engine 2: its host", "start", failed=EngineError, lost=EngineLost)


def test_an_error_of_the_run_stays_as_it_is() -> None:
    cause = SyncError("bucket 3")
    assert converted(RayTaskError("start", "", cause)) is cause


def test_another_error_of_a_call_becomes_its_cause() -> None:
    error = RayTaskError("start", "", ValueError("first\nsecond"))
    failure = converted(error)
    assert (type(failure), failure.__cause__) == (EngineError, error)
    assert str(failure) == "engine 2: its host failed during start: ValueError: first"


def test_a_dead_actor_is_lost() -> None:
    error = RayActorError(error_msg=LOST_NODE)
    assert type(converted(error)) is EngineLost
    assert str(converted(error)).endswith("missing too many heartbeats (on 10.77.0.2)")


def test_a_process_that_ray_could_not_start_is_reported_with_rays_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray 2.60 says why in a file alone, which goes with the run's temporary files."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    unstarted = ActorUnschedulableError("Could not create the actor because worker startup repeatedly failed.")
    silent = run_error(unstarted, "trainer rank 0", "start", failed=EngineError, lost=EngineLost)
    assert str(silent).endswith("repeatedly failed.")

    session = tmp_path / "ray" / "session_1" / "logs"
    session.mkdir(parents=True)
    (session / "raylet.err").write_text(f"first\n{BASH}\n\n")
    (tmp_path / "ray" / "session_latest").symlink_to("session_1")
    error = run_error(unstarted, "trainer rank 0", "start", failed=EngineError, lost=EngineLost)
    assert str(error).endswith(f"logs/ray/raylet.err: {BASH}")
    keep_ray_logs(tmp_path / "logs", None)
    keep_ray_logs(tmp_path / "logs", asyncio.CancelledError)
    assert not (tmp_path / "logs").exists()
    keep_ray_logs(tmp_path / "logs", EngineError)
    assert (tmp_path / "logs" / "ray" / "raylet.err").read_text().splitlines()[1] == BASH
