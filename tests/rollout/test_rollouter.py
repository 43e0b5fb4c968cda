"""What becomes of a prompt whose engine fails it, and of groups that fail together. In virtual time."""

from collections.abc import Callable

import pytest

from app.errors import EngineError
from app.rollout.rollouter import Rollouter
from app.types import Completion, Group, GroupRequest, Sampling
from tests.rollout.episodes import rollouter_with
from tests.simulation import SimEngine, now, prompts, run_virtual, virtual

SAMPLING = Sampling(1.0, 1.0, 16)
Fails = Callable[[GroupRequest, int], Exception | None]  # request, its attempt from 1 → error


class FailingEngine(SimEngine):
    """Samples each group for a second, and may then fail it."""

    fails: Fails = staticmethod(lambda request, attempt: None)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        completions = await super().generate(request)
        error = self.fails(request, self.calls[request.prompt_id])
        if error is not None:
            raise error
        return completions


def rollouter(fails: Fails = lambda request, attempt: None, **limits: int) -> tuple[Rollouter, FailingEngine]:
    engine = FailingEngine(lambda prompt_id: 1.0, lambda prompt_id, member: True)
    engine.fails = fails
    return rollouter_with(None, [engine], reward="exact", **limits), engine


async def sample(made: Rollouter, count: int = 1) -> list[Group]:
    return await made.groups(prompts(count), size=2, sampling=SAMPLING, version=0, limit=count)


def out_of_memory(request: GroupRequest) -> EngineError:
    return EngineError(f"engine 0 aborted prompt {request.prompt_id}: out of memory on purpose")


@virtual
async def test_a_prompt_that_an_engine_aborts_is_sent_again_after_a_pause() -> None:
    made, engine = rollouter(lambda request, attempt: out_of_memory(request) if attempt < 3 else None)

    assert len(await sample(made)) == 1
    assert now() == pytest.approx(3 + 0.25 + 0.5)
    assert engine.calls["sim/0"] == 3


def test_a_prompt_that_an_engine_always_aborts_ends_with_its_name_and_the_engines_reason() -> None:
    made, engine = rollouter(lambda request, attempt: out_of_memory(request), max_engine_failures=2)
    sentence = (
        r"^prompt sim/0 failed on engines 3 times \(recovery.max_engine_failures=2\); last error: "
        r"engine 0 aborted prompt sim/0: out of memory on purpose$"
    )
    with pytest.raises(EngineError, match=sentence):
        run_virtual(sample(made))
    assert engine.calls["sim/0"] == 3
