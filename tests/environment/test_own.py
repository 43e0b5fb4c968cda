import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from app.environment.own import Stepwise, WrongValue, make, messages_of
from app.environment.protocol import OutOfTurns, Policy, Reply, Task
from app.utils.dotted_path import LoadError
from tests.environment.pools import a_task


class Whole:
    def __init__(self, size: int = 1, *, name: str = "x") -> None:
        self.size = size

    def begin(self, task: Task) -> None: ...

    def step(self, reply: Reply) -> None: ...


class Driving:
    async def run(self, task: Task, policy: Policy) -> None: ...


class OnlyBegin:
    def begin(self, task: Task) -> None: ...


class NoTask:
    def begin(self) -> None: ...

    def step(self, reply: Reply) -> None: ...


class Attribute:
    begin = "hello"

    def step(self, reply: Reply) -> None: ...


class NeedsMore:
    async def run(self, task: Task, policy: Policy, more: object) -> None: ...


class Static:
    @staticmethod
    def begin(task: Task) -> None: ...

    @classmethod
    def step(cls, reply: Reply) -> None: ...


def factory(size: int = 1) -> Whole:
    return Whole(size)


HERE = __name__
SHAPE = "give it `run(self, task, policy)`, or `begin(self, task)` and `step(self, reply)`"


@pytest.mark.parametrize("name", ["Whole", "Driving", "Static", "factory"])
def test_what_is_an_environment_is_made_anew_for_each_episode(name: str) -> None:
    made = make({"target": f"{HERE}.{name}"})
    assert made() is not made()


def test_arguments_reach_the_constructor() -> None:
    assert make({"target": f"{HERE}.Whole", "args": {"size": 3}})().size == 3
    assert make({"target": f"{HERE}.factory", "args": {"size": 4}})().size == 4


@pytest.mark.parametrize(
    ("target", "args", "problem"),
    [
        ("no_such_module.Env", {}, "there is no module no_such_module (searched the working directory and PYTHONPATH)"),
        (f"{HERE}.Nothing", {}, f"module {HERE} has no Nothing"),
        (f"{HERE}.HERE", {}, "it is not a function or class"),
        (f"{HERE}.Whole", {"length": 3}, 'it does not take environment.args={"length": 3} (got an unexpected keyword'),
        (f"{HERE}.OnlyBegin", {}, f"it is no environment: {SHAPE}"),
        (f"{HERE}.NoTask", {}, f"its begin(self) -> None cannot be called (too many positional arguments): {SHAPE}"),
        (f"{HERE}.Attribute", {}, f"its begin is not a method: {SHAPE}"),
        (
            f"{HERE}.NeedsMore",
            {},
            "its run(self, task: app.environment.protocol.Task, ",
        ),
    ],
)
def test_what_is_no_environment_is_refused_before_any_episode(target: str, args: Any, problem: str) -> None:
    with pytest.raises(LoadError) as refused:
        make({"target": target, "args": args})
    assert str(refused.value).startswith(problem)


def test_an_environment_without_a_score_is_refused_where_the_reward_is_its_score() -> None:
    target = "tests.mode.own_environments.Unscored"
    make({"target": target})
    with pytest.raises(LoadError, match=r"it has no `score\(self\)`, which reward=environment takes"):
        make({"target": target, "scored": True})
    make({"target": "tests.mode.own_environments.Guess", "scored": True})


def test_an_observation_is_text_or_messages() -> None:
    assert messages_of(None, "step") is None
    assert messages_of("x", "step") == [{"role": "user", "content": "x"}]
    tool = {"role": "tool", "content": "3", "tool_call_id": "1"}
    assert messages_of([tool, tool], "step") == [tool, tool]
    assert messages_of(tool, "step") == [tool]
    for wrong in ([], [1], {"role": "user"}, b"x", 1.0):
        with pytest.raises(WrongValue, match=r"step returned an? "):
            messages_of(wrong, "step")


class Counting:
    """Ends after three turns."""

    def __init__(self, ends_itself: bool) -> None:
        self.turns = 0
        self.ends_itself = ends_itself

    def begin(self, task: Task) -> None:
        return None

    def step(self, reply: Reply) -> str | None:
        self.turns += 1
        return None if self.ends_itself and self.turns == 3 else f"turn {self.turns}"

    def score(self) -> int:
        return self.turns


@pytest.mark.parametrize("ends_itself", [True, False])
def test_the_conversation_grows_until_the_environment_or_a_limit_ends_it_and_then_it_is_scored(
    ends_itself: bool,
) -> None:
    asked: list[Any] = []

    async def policy(messages: Sequence[Mapping[str, Any]] | None) -> Reply:
        if len(asked) == 4:
            raise OutOfTurns
        asked.append(messages)
        return Reply(f"reply {len(asked)}")

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    of_a_test: Any = policy
    score = asyncio.run(Stepwise(Counting(ends_itself), call).run(a_task(), of_a_test))
    contents = [None if messages is None else [message["content"] for message in messages] for messages in asked]
    assert (
        contents
        == [
            None,
            ["reply 1", "turn 1"],
            ["reply 1", "turn 1", "reply 2", "turn 2"],
            ["reply 1", "turn 1", "reply 2", "turn 2", "reply 3", "turn 3"],
        ][: 3 if ends_itself else 4]
    )
    assert score == (3 if ends_itself else 4)
