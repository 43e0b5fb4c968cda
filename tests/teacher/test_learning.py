"""A tiny student learns from a teacher alone, through real servers: no reward takes part."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import Run
from tests.teacher.servers import sglang

STUDENT = ["algorithm=opd", "steps=20", "eval.every=20", "tracking.samples_per_step=4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher: the tiny model after a supervised run on sums."""
    folder = tmp_path_factory.mktemp("teacher")
    line = ["mode=sft", "steps=60", "algorithm.prompts_per_step=64", "eval.every=60", "eval.before_train=false"]
    run = Run(folder, *line, "checkpoint.export=true")
    assert run.wait() == 0, run.text
    assert run.summary()["eval/accuracy_last"] > 0.95
    return run.folder / "export"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", ["colocate", "fully_async"])
async def test_a_student_learns_from_a_teacher_without_any_reward(
    placement: str,
    trained: Path,
    start: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    async with sglang(trained, tmp_path) as server:
        monkeypatch.setenv("POSTTRAIN_TEACHER_KEY", server.key)
        run = start(*STUDENT, f"teacher.urls=[{server.url}]", f"placement={placement}")
        assert await asyncio.to_thread(run.wait, 500) == 0, run.text

    summary, steps = run.summary(), [line for line in run.metrics() if "time/step" in line]
    for name in ("first", "last"):
        record_property(f"accuracy_{name}", summary[f"eval/accuracy_{name}"])
    record_property("reverse_kl", [steps[0]["teacher/kl"], steps[-1]["teacher/kl"]])
    assert steps[-1]["teacher/kl"] < 0.2 * steps[0]["teacher/kl"]
    assert summary["eval/accuracy_first"] < 0.6
    assert summary["eval/accuracy_last"] > 0.9
    assert {line["advantage/std"] for line in steps} == {0.0}
