"""The engine of `teacher.path`: what it scores, its devices, its memory, and how it starts and ends."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cluster.placement_group import bundles
from app.config.teacher import TeacherConfig
from app.device import device_of
from app.errors import EngineLost
from app.rollout.engine.pool import EnginePool
from app.rollout.engine.remote import RemoteEngine
from app.start.input_checks import teacher
from app.start.inputs import CheckStage, RunInputs
from app.teacher import Teacher
from tests.compose import composed
from tests.refusals import refused
from tests.runs import Run
from tests.teacher.test_teacher import exact, group_of, one_turn, several_turns
from tests.trainer.plain import transformers_model

OPD = ["algorithm=opd", "teacher.path=tiny"]
SMALL = [*OPD, "eval.before_train=false", "eval.every=0", "data.arithmetic.eval_problems=8"]
QWEN = ["model=qwen3_4b", "algorithm=opd", "teacher.path=Qwen/Qwen3.5-9B"]
SPLIT = ["placement=fully_async", "placement.trainer_devices=2"]


def test_a_teacher_of_another_vocabulary_or_a_shorter_context_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    moment = CheckStage.start
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    given = ["algorithm=opd", f"teacher.path={other}", "teacher.devices=2"]
    config = composed(*given)
    (found,) = teacher(RunInputs(config, moment))
    assert (found.subject, str(other) in found.message, "2 devices" in found.message) == ("teacher", True, True)

    sizes = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 100}))
    with refused("rollout.max_prompt_tokens", 512, f"teacher.path={other}"):
        list(teacher(RunInputs(config, moment)))
    longer = composed(*given, "+teacher.engine_args.context-length=9999")
    assert len(list(teacher(RunInputs(longer, moment)))) == 1

    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refused("teacher.path", str(other), "model.path"):
        list(teacher(RunInputs(longer, moment)))


class Lost:
    """An engine that is lost by its first call."""

    name = "teacher"

    async def update(self, route: str, body: Any) -> dict[str, Any]:
        raise EngineLost("teacher was killed by SIGKILL")


async def test_an_engine_of_the_run_scores_as_transformers_does_and_requests_wait_for_its_replacement(
    engine: RemoteEngine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.teacher.RETRY_DELAY_S", 0.01)
    monkeypatch.setattr("app.teacher.RETRIES", 1)
    pool = EnginePool([Lost()])  # type: ignore[list-item]  # has what a teacher calls

    async def replace() -> None:
        await pool.engine_lost.wait()
        pool.replace(0, engine)
        pool.mark_ready(0)

    alone = one_turn([22, 23, 16, 24, 34], [25, 26, 2])
    async with Teacher(TeacherConfig(path="tiny"), pool) as scorer:
        replacing = asyncio.create_task(replace())
        scored = await scorer.score(group_of(alone, several_turns(alone)))
        await replacing

    model = transformers_model(tiny_model)
    for sequence in (each for trajectory in scored.trajectories for each in trajectory.sequences):
        assert sequence.teacher_logprobs is not None
        np.testing.assert_allclose(sequence.teacher_logprobs, exact(model, sequence), atol=2e-5)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["device=cuda", "placement.devices=2"], [1, 1, 2]),
        (["device=npu", *SPLIT, "placement.rollout_devices=4", "rollout.tensor_parallel=4"], [1, 1, 4, 2]),
        (["device=cuda", "placement.devices=2", "rollout.urls=[http://127.0.0.1:9]"], [1, 1, 2]),
        (["device=cpu", "model=tiny", "teacher.path=tiny", "data=arithmetic"], [1, 2]),
        (["device=cuda", "placement.devices=2", "mode=eval"], [1, 1]),
    ],
)
def test_the_devices_of_the_teacher_are_a_bundle_of_their_own(overrides: list[str], expected: list[int]) -> None:
    config = composed(*QWEN, "rollout.tensor_parallel=1", "teacher.devices=2", *overrides)
    device = device_of(config.device.kind)
    assert [each[device.resource] for each in bundles(config, device)] == expected
    assert config.device_count == sum(expected)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_teacher_is_replaced_and_a_resumed_run_starts_it_again(start: Callable[..., Run]) -> None:
    run = start(*SMALL, "placement=colocate", "steps=12", "checkpoint.keep=1", "checkpoint.export=false")
    run.wait_for_step(1)
    os.killpg(_server(run), signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert run.gone_within(15), run.processes()

    assert "teacher" in next(line for line in run.text.splitlines() if "attempt 1" in line)
    steps = [line for line in run.metrics() if "time/step" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert abs(steps[0]["teacher/kl"]) < 1e-4  # the policy is still its teacher
    assert {line["advantage/std"] for line in steps} == {0.0}
    assert run.summary()["status"] == "finished"

    again = start(f"resume={run.folder}", "steps=13")
    assert again.wait() == 0, again.text
    assert [line["step"] for line in again.metrics() if "time/step" in line] == list(range(1, 14))


def test_a_killed_driver_takes_its_teacher_along(start: Callable[..., Run]) -> None:
    run = start(*SMALL, "placement=colocate", "steps=1000")
    run.wait_for_step(2)
    assert _server(run) in run.processes()
    assert all(np.isfinite(line["teacher/kl"]) for line in run.metrics() if "time/step" in line)

    run.process.send_signal(signal.SIGKILL)
    run.process.wait(30)
    assert run.gone_within(20), run.processes()


def _server(run: Run) -> int:
    """The process group of the teacher's server, which writes to its log."""
    log = str(run.folder / "logs" / "teacher.log")
    for pid in run.processes():
        try:
            if os.readlink(f"/proc/{pid}/fd/1") == log:
                return os.getpgid(pid)
        except OSError:
            continue
    raise AssertionError(f"no process writes to {log}")
