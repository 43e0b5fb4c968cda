"""Which classes are environments, and what their methods may return."""

from typing import Any

import pytest

from app.environment.own import WrongValue, make, messages_of, scores_of
from app.environment.protocol import Policy, Reply, Task
from app.utils.user_code import LoadError


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
def test_what_is_an_environment_is_made_anew_for_each_episode_with_its_arguments(name: str) -> None:
    args = {"size": 3} if name in ("Whole", "factory") else {}
    made = make({"target": f"{HERE}.{name}", "args": args})
    assert made() is not made()
    assert getattr(made(), "size", None) == args.get("size")


@pytest.mark.parametrize(
    ("target", "args", "problem"),
    [
        (f"{HERE}.Whole", {"length": 3}, 'it does not take environment.args={"length": 3} (got an unexpected keyword'),
        (f"{HERE}.OnlyBegin", {}, f"it is no environment: {SHAPE}"),
        (f"{HERE}.NoTask", {}, f"its begin(self) -> None cannot be called (too many positional arguments): {SHAPE}"),
        (f"{HERE}.Attribute", {}, f"its begin is not a method: {SHAPE}"),
        (f"{HERE}.NeedsMore", {}, "its run(self, task: app.environment.protocol.Task, "),
    ],
)
def test_what_is_no_environment_is_refused_before_any_episode(target: str, args: Any, problem: str) -> None:
    with pytest.raises(LoadError) as refused:
        make({"target": target, "args": args})
    assert str(refused.value).startswith(problem)


def test_an_observation_is_text_or_messages() -> None:
    assert messages_of(None, "step") is None
    assert messages_of("x", "step") == [{"role": "user", "content": "x"}]
    tool = {"role": "tool", "content": "3", "tool_call_id": "1"}
    assert messages_of([tool, tool], "step") == [tool, tool]
    assert messages_of(tool, "step") == [tool]
    for wrong in ([], [1], {"role": "user"}, b"x", 1.0):
        with pytest.raises(WrongValue, match=r"step returned an? "):
            messages_of(wrong, "step")


def test_a_score_is_a_finite_number_or_finite_numbers_by_name() -> None:
    assert [scores_of(value) for value in (None, True, {"b": 1, "a": 0.5})] == [{}, {"score": 1.0}, {"b": 1, "a": 0.5}]
    for wrong, problem in (
        ({1}, "the score is a set ({1}); give a number, numbers by name, or None"),
        ("0.5", "the score is a str ('0.5'); give a number, numbers by name, or None"),
        (float("nan"), "the score is nan; give a finite number"),
        ({"a": 1, "b": float("inf")}, "the score b is inf; give a finite number"),
        ({"a": "x"}, "the score a is a str ('x'); give a number, numbers by name, or None"),
    ):
        with pytest.raises(WrongValue) as refused:
            scores_of(wrong)
        assert str(refused.value) == problem
