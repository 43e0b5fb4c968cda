"""Self-distillation: engines score a completion after a prompt with the answer in it, as transformers does."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.config.recovery import RecoveryConfig
from app.model.hf_directory import load_tokenizer
from app.rollout.engine.pool import EnginePool
from app.rollout.engine.remote import RemoteEngine
from app.rollout.requests import Requests
from app.teacher.self_teacher import SelfTeacher, teacher_prompt
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, FinishReason, Group, InFlight, Prompt, TokenSequence, Trajectory, VersionSpan
from tests.compose import composed
from tests.runs import Run
from tests.teacher.test_teacher import exact
from tests.trainer.plain import transformers_model

ASKED = "teacher.prompt='{answer}={question}'"


async def test_engines_score_as_transformers_does_and_wait_for_a_pause(engine: RemoteEngine, tiny_model: Path) -> None:
    config, tokenizer, model = composed(ASKED), load_tokenizer(tiny_model), transformers_model(tiny_model)
    last = model.config.vocab_size - 1
    lengths = [[25, 26, 2], [last], [], [20] * 12]
    prompt = Prompt("sums/0@0", np.array([21, 22], np.int32), "46", "sums", "12+34=")
    group = Group(prompt, tuple(sampled(prompt, each) for each in lengths))

    teacher = SelfTeacher(config, tokenizer, EnginePool([engine]), Requests(Timeline(), RecoveryConfig()))
    before = await engine.stats()
    await engine.pause(InFlight.retract)
    scoring = asyncio.create_task(teacher.score(group))
    await asyncio.sleep(0.5)
    assert not scoring.done()
    await engine.resume()
    scored = await asyncio.wait_for(scoring, 60)
    assert (await engine.stats()).completion_tokens == before.completion_tokens  # nothing was sampled

    asked = Prompt("", np.array(tokenizer("46=12+34=")["input_ids"], np.int32), "", "")
    assert asked.token_ids.tolist() == teacher_prompt(prompt, config, tokenizer).tolist()
    for trajectory in scored.trajectories:
        found = trajectory.completion.teacher_logprobs
        assert found is not None
        np.testing.assert_allclose(found, exact(model, TokenSequence.of(asked, trajectory.completion)), atol=1e-4)
        unasked = exact(model, TokenSequence.of(prompt, trajectory.completion))
        assert not len(found) or np.abs(found - unasked).max() > 1e-2


def sampled(prompt: Prompt, tokens: list[int]) -> Trajectory:
    count = len(tokens)
    spans = (VersionSpan(0, 0, count),)
    completion = Completion(np.array(tokens, np.int32), np.zeros(count, np.float32), FinishReason.stop, spans)
    return Trajectory(prompt, completion, "")


@pytest.mark.parametrize("placement", [pytest.param("colocate", marks=pytest.mark.slow), "fully_async"])
def test_a_run_teaches_itself(placement: str, start: Callable[..., Run]) -> None:
    run = start("algorithm=opd", ASKED, f"placement={placement}", "steps=3", "eval.every=0")
    assert run.wait() == 0, run.text
    steps = [line for line in run.metrics() if "time/step" in line]
    assert len(steps) == 3
    assert all(abs(line["teacher/kl"]) > 1e-3 for line in steps)
