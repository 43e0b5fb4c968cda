"""The second model family on a CPU: the real SGLang with our kernels equals transformers, before and after a push."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config.weight_sync import Verify
from app.rollout.engine.remote import RemoteEngine
from app.types import InFlight
from tests.conftest import make_engine
from tests.cpu_engine.test_batched_attention import ragged, staggered
from tests.rollout.episodes import TALK, Recording, asked, largest_difference_of_sequences, played, trained
from tests.rollout.support import HOT, in_flight, largest_difference, noisy_model, request
from tests.tiny_models.make import Recipe
from tests.weight_sync.support import make_synchronizer, make_trainer, running, set_weights

# transformers' own float32 log-probabilities of this model are up to 3e-5 from its float64 ones: its linear attention
# amplifies rounding ten times as much as Qwen3's attention does. Weights of another version differ by 0.1 and more.
ROUNDING = 5e-5


@pytest.fixture(scope="module")
def model(made_model: Callable[..., Path]) -> Path:
    """`model=tiny_qwen35` of four layers, without its warm-up."""
    return made_model(Recipe(qwen35=True, layers=4), warmed_up=False)


@pytest.fixture(scope="module")
def trainer_and_engine(
    ray_session: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    """A server and a trainer rank of this model, started at the same time."""
    folder = tmp_path_factory.mktemp("qwen35")
    engine = make_engine(model, folder, name="engine of qwen35", disable_radix_cache=True)
    with running(engine, make_trainer(model, folder)) as both:
        yield both


@pytest.fixture
def engine(trainer_and_engine: tuple[Any, Any]) -> RemoteEngine:
    return trainer_and_engine[1]


def test_requests_that_come_and_go_have_the_logprobs_of_transformers(engine: RemoteEngine, model: Path) -> None:
    requests = ragged(8)
    groups = asyncio.run(staggered(engine, requests))
    assert largest_difference(model, requests, groups) < ROUNDING


async def test_a_group_that_was_retracted_has_the_logprobs_of_transformers(engine: RemoteEngine, model: Path) -> None:
    given = request(group_size=16, temperature=HOT, max_tokens=240)

    task = await in_flight(engine, given)
    await engine.pause(InFlight.retract)
    await engine.resume()
    result = await asyncio.wait_for(task, 120)
    assert largest_difference(model, [given], [result]) < ROUNDING


async def test_all_turns_of_episodes_have_the_logprobs_of_transformers(
    engine: RemoteEngine, model: Path, own: Any
) -> None:
    """`model=tiny_qwen35` has no prefix cache, as every Qwen3.5 on a CPU: each turn computes its whole sequence."""
    recording = Recording(engine)
    spec = own(TALK, max_turn_tokens=24, model=model)
    groups = await played(spec, recording, model, prompts=2, temperature=1.0)
    sequences = [sequence for each in groups for trajectory in each.trajectories for sequence in trajectory.sequences]
    assert len(sequences) == 2 * 4 * 2
    assert asked(recording) == trained(sequences)
    assert {completion.cached_tokens for completion in recording.completions} == {0}
    assert largest_difference_of_sequences(noisy_model(model, 0), sequences) < ROUNDING
    shifted = [replace(sequence, sampled=np.roll(sequence.sampled, -1)) for sequence in sequences]
    assert largest_difference_of_sequences(noisy_model(model, 0), shifted) > 0.01


async def test_a_push_equals_the_export_and_logprobs_are_those_of_the_pushed_weights(
    trainer_and_engine: tuple[Any, Any], model: Path, tmp_path: Path
) -> None:
    trainer, engine = trainer_and_engine
    given = request("after", group_size=4, temperature=1.0, max_tokens=12)

    push = await make_synchronizer("ipc", trainer, [engine], tmp_path, verify=Verify.always)
    for version, seed in ((3, 1), (4, 2)):
        await set_weights(trainer, seed)
        await push.sync(version)
    completions = await engine.generate(given)
    await push.close()
    assert {span.version for completion in completions for span in completion.spans} == {4}
    assert largest_difference(model, [given], [completions], seed=2) < ROUNDING
    assert largest_difference(model, [given], [completions], seed=1) > 0.1
