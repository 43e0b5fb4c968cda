"""Groups of episodes on the driver: sticky engines, retries, failures, aborts and limits. In virtual time."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from app.environment.protocol import Task
from app.errors import EngineLost, RunError
from app.rollout.episodes import EpisodeLimits, Episodes
from app.rollout.episodes.episode_group import episode_failures
from app.rollout.requests import Aborted
from app.types import Completion, Ending, Group, GroupRequest, Sampling
from tests.rollout.episodes import rollouter_with
from tests.simulated_environments import OBSERVATION, Script, SimEnvironments
from tests.simulation import SimEngine, now, prompts, run_virtual, virtual

PROMPT = [0, 1, 2]


class RecordingEngine(SimEngine):
    """Keeps each request; a completion takes a second."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requests: list[GroupRequest] = []

    async def generate(self, request: GroupRequest) -> list[Completion]:
        self.requests.append(request)
        return await super().generate(request)


class Setting:
    """A rollouter with simulated environments and engines."""

    def __init__(
        self,
        script: Callable[[Task, int], Script] = lambda task, number: Script(score=float(number % 2)),
        *,
        engines: int = 1,
        max_response_tokens: int = 64,
        retries: int = 1,
        max_failed_fraction: float = 0.5,
    ) -> None:
        self.engines = [RecordingEngine(lambda _: 1.0, lambda p, m: True, name=f"engine {i}") for i in range(engines)]
        self.environments = SimEnvironments(script)
        self.warnings: list[str] = []
        limits = EpisodeLimits(8, max_response_tokens, retries)
        failures = episode_failures(max_failed_fraction, 8, self.warnings.append)
        environments: Any = self.environments
        self.episodes = Episodes(environments, limits, failures, seed=0)
        self.rollouter = rollouter_with(self.episodes, self.engines)

    async def group(self, size: int = 2, prompt: int = 0, max_tokens: int = 64) -> Group:
        sampling = Sampling(1.0, 1.0, max_tokens)
        return await self.rollouter.group(prompts(9)[prompt], size=size, sampling=sampling, version=lambda: 3)

    @property
    def requests(self) -> list[GroupRequest]:
        return [request for engine in self.engines for request in engine.requests]


def test_every_request_begins_with_all_tokens_of_the_sequence_and_only_sampled_ones_are_trained_on() -> None:
    setting = Setting(lambda task, number: Script(turns=3, score=float(number)))
    group = run_virtual(setting.group())
    assert group.rewards.tolist() == [0.0, 1.0]

    for member, trajectory in enumerate(group.trajectories):
        sequence = trajectory.sequences[0]
        reply = trajectory.completion.token_ids.tolist()
        assert sequence.token_ids.tolist() == [*PROMPT, *reply, *OBSERVATION, *reply, *OBSERVATION, *reply]
        assert np.flatnonzero(~sequence.sampled).tolist() == [0, 1, 2, 7, 8, 13, 14]
        sent = [r.token_ids.tolist() for r in setting.requests if r.turn.endswith(f"of member {member}")]
        assert sent == [sequence.token_ids[:end].tolist() for end in (3, 9, 15)]
        assert [span.end - span.start for span in sequence.spans] == [12]
        assert (trajectory.prompt_tokens, trajectory.sampled_tokens, trajectory.response_tokens) == (3, 12, 16)
        assert trajectory.episode is not None
        assert trajectory.episode.metrics["turns"] == 3
        assert trajectory.episode.metrics["tool_calls"] == 1


@virtual
async def test_the_turns_of_a_group_stay_on_one_engine_with_one_seed_and_groups_spread_over_engines() -> None:
    setting = Setting(engines=2)

    await asyncio.gather(*(setting.group(prompt=number) for number in range(4)))
    served = [{request.prompt_id for request in engine.requests} for engine in setting.engines]
    assert not served[0] & served[1]
    assert [len(each) for each in served] == [2, 2]
    assert setting.rollouter.pool._sticky_episodes.tolist() == [0, 0]
    seeds = {(session.task.id, session.task.seed) for session in setting.environments.sessions}
    assert len(seeds) == len({seed for _, seed in seeds}) == 4


@virtual
async def test_a_turn_whose_engine_dies_is_asked_again_elsewhere_and_the_environment_goes_on() -> None:
    setting = Setting(engines=2)

    playing = asyncio.create_task(setting.group())
    await asyncio.sleep(3.5)  # in the second turn
    (busy,) = (engine for engine in setting.engines if engine.requests)
    busy.die(EngineLost("engine was killed"))
    group = await playing
    assert len(setting.environments.sessions) == 2  # none began again
    assert [trajectory.sampled_tokens for trajectory in group.trajectories] == [8, 8]
    assert setting.rollouter.pop_lost() == 1
    moved = [engine for engine in setting.engines if engine.fail is None]
    assert [request.token_ids.tolist()[:7] for request in moved[0].requests] == [[*PROMPT, 5, 5, 5, 22]] * 2


@pytest.mark.parametrize("kind", ["raised", "late", "died", "value"])
def test_an_episode_whose_environment_failed_once_is_played_again(kind: str) -> None:
    setting = Setting(lambda task, number: Script(fails_at=1 if number == 0 else None, kind=kind, score=number))
    group = run_virtual(setting.group())
    assert len(group.trajectories) == 2
    assert setting.rollouter.failure_metrics == {
        "environment/failed_episodes": 0.0,
        "environment/failed_fraction": 0.0,
        f"environment/failed_{kind}": 1.0,
    }
    (warning,) = setting.warnings
    assert re.search("on purpose.*environment.retries.*logs/environment.log", warning)
    assert [session.closed for session in setting.environments.sessions] == [1, 1, 1]


def test_an_episode_that_always_fails_leaves_its_group_and_has_no_reward() -> None:
    setting = Setting(lambda task, number: Script(fails_at=0 if number in (1, 4) else None, score=float(number)))
    group = run_virtual(setting.group(size=4))
    assert sorted(group.rewards.tolist()) == [0.0, 2.0, 3.0]
    assert setting.episodes.failures.failed == 1


def test_an_episode_that_was_lost_with_its_worker_is_not_charged() -> None:
    setting = Setting(lambda task, number: Script(fails_at=1 if number < 8 else None, kind="lost"), retries=0)
    group = run_virtual(setting.group())
    assert len(group.trajectories) == 2
    assert setting.episodes.failures.by_kind == {"lost": 8}


def test_too_many_failures_end_the_run_with_the_reason() -> None:
    setting = Setting(lambda task, number: Script(fails_at=0), max_failed_fraction=0.25)
    sentence = (
        r"^3 of 3 episodes failed in every attempt, more than environment.max_failed_fraction=0.25 of a step's 8 "
        r"allows; the last: the environment failed on purpose.$"
    )
    with pytest.raises(RunError, match=sentence):
        run_virtual(setting.group(size=4))
    assert all(session.ended for session in setting.environments.sessions)


@virtual
async def test_an_abort_reaches_an_episode_inside_its_environment_and_counts_what_was_sampled() -> None:
    setting = Setting(lambda task, number: Script(seconds=0.0 if number else 100.0))
    playing = asyncio.create_task(setting.group())
    await asyncio.sleep(1.5)  # one is in its environment, the other in its second turn
    await setting.rollouter.abort(["sim/0"])
    with pytest.raises(Aborted) as aborted:
        await playing
    assert now() == pytest.approx(1.5)
    assert aborted.value.tokens == 4
    assert [session.ended for session in setting.environments.sessions] == ["aborted", "aborted"]
    assert [session.closed for session in setting.environments.sessions] == [1, 1]
    assert setting.rollouter.requests.in_flight == {}


def test_observations_count_towards_the_tokens_of_a_trajectory() -> None:
    setting = Setting(lambda task, number: Script(turns=9))
    group = run_virtual(setting.group(max_tokens=11))
    first = [request for request in setting.requests if request.turn.endswith("member 0")]
    assert [request.sampling.max_tokens for request in first] == [11, 5]  # 11 - 4 sampled - 2 observed
    for trajectory in group.trajectories:
        assert trajectory.episode is not None
        assert trajectory.episode.ending is Ending.length
        assert trajectory.truncated
        assert trajectory.tokens == 3 + 4 + 2 + 4  # nothing after the last sampled token


def test_a_sequence_never_outgrows_the_context() -> None:
    setting = Setting(lambda task, number: Script(turns=9), max_response_tokens=6)
    run_virtual(setting.group(max_tokens=1000))
    assert max(len(r.token_ids) + r.sampling.max_tokens for r in setting.requests) == 8 + 6
