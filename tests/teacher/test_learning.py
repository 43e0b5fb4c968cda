"""A tiny student learns from a teacher alone, through real servers: no reward takes part."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from app.rollout.engine.client import Client
from tests.runs import Run
from tests.teacher.servers import Address, Handler, double, sglang

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


def shuffling(server: Address) -> Handler:
    """Answer with the log-probabilities of a real teacher, dealt out to other tokens of other sequences."""
    random, pool = np.random.default_rng(0), [-1.0]

    async def generate(request: web.Request) -> web.Response:
        client = Client("teacher", server.url, server.key)
        try:
            reply = await client.post("/generate", await request.json())
        finally:
            await client.close()
        entries = reply["meta_info"]["input_token_logprobs"]
        pool.extend(entry[0] for entry in entries[1:])
        entries[1:] = [[float(random.choice(pool)), token, text] for _, token, text in entries[1:]]
        return web.json_response(reply)

    return generate


def tokenizing(server: Address) -> Handler:
    async def tokenize(request: web.Request) -> web.Response:
        client = Client("teacher", server.url, server.key)
        try:
            return web.json_response(await client.post("/tokenize", await request.json()))
        finally:
            await client.close()

    return tokenize


async def student(server: Address, start: Callable[..., Run], *overrides: str) -> Run:
    run = start(*STUDENT, f"teacher.urls=[{server.url}]", *overrides)
    code = await asyncio.to_thread(run.wait, 500)
    assert code == 0, run.text
    return run


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
        run = await student(server, start, f"placement={placement}")

    summary, steps = run.summary(), [line for line in run.metrics() if "time/step" in line]
    for name in ("first", "last"):
        record_property(f"accuracy_{name}", summary[f"eval/accuracy_{name}"])
    record_property("reverse_kl", [steps[0]["teacher/kl"], steps[-1]["teacher/kl"]])
    assert steps[-1]["teacher/kl"] < 0.2 * steps[0]["teacher/kl"]
    assert summary["eval/accuracy_first"] < 0.6
    assert summary["eval/accuracy_last"] > 0.9
    assert {line["advantage/std"] for line in steps} == {0.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("control", ["shuffled teacher", "fixed negative advantage"])
async def test_controls_of_distillation(
    control: str,
    trained: Path,
    start: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Shuffled log-probabilities teach nothing; the constant of arXiv 2608.31046 is reported beside it."""
    async with sglang(trained, tmp_path) as server, double(shuffling(server), tokenizing(server)) as shuffled:
        monkeypatch.setenv("POSTTRAIN_TEACHER_KEY", server.key)
        if control == "shuffled teacher":
            run = await student(Address(shuffled, server.key), start)
        else:
            run = await student(server, start, "algorithm.objective=tests.teacher.controls.fixed_negative")

    summary = run.summary()
    for name in ("first", "last"):
        record_property(f"accuracy_{name}", summary[f"eval/accuracy_{name}"])
    if control == "shuffled teacher":
        assert summary["eval/accuracy_last"] < summary["eval/accuracy_first"] + 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_run_ends_with_a_sentence_when_its_teacher_is_gone_and_resumes_with_another(
    tiny_model: Path, start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["steps=200", "eval.before_train=false", "checkpoint.every=2"]
    async with sglang(tiny_model, tmp_path) as server:
        monkeypatch.setenv("POSTTRAIN_TEACHER_KEY", server.key)
        run = start("algorithm=opd", f"teacher.urls=[{server.url}]", *few)
        await asyncio.to_thread(run.wait_for_step, 3)
    assert await asyncio.to_thread(run.wait, 120) == 1
    assert "6 times" in run.text
    assert run.gone_within(15)

    async with sglang(tiny_model, tmp_path) as server:
        monkeypatch.setenv("POSTTRAIN_TEACHER_KEY", server.key)
        done = max(line["step"] for line in run.metrics())
        line = [f"resume={run.folder}", f"teacher.urls=[{server.url}]", f"steps={done + 2}"]
        again = start(*line)
        assert await asyncio.to_thread(again.wait, 280) == 0, again.text
    steps = [line["step"] for line in again.metrics() if "time/step" in line]
    assert steps == list(range(1, done + 3))
