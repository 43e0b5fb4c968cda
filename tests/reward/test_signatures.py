"""The four signatures of a custom reward, what it sees of a row, and what it can return."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from app.algorithm.metrics import group_metrics
from app.reward.component import Failure, LoggedScore, RewardComponent, evaluate, failures
from app.types import Group, Trajectory
from app.utils.user_code import LoadError
from tests.reward.scorers import OWN, failed, running_scorer, trajectory

Batch = Sequence[Trajectory]
Texts = list[str]
BATCH = [trajectory(text, points={"a": 1, "b": 2.5}, level="hard") for text in "ab"]


def component_of(reward: Callable[..., Any], **args: Any) -> RewardComponent:
    return RewardComponent("own", 1.0, f"{__name__}.{reward.__name__}", args, key="reward._target_")


def outcome(reward: Callable[..., Any], trajectories: Batch = BATCH, **args: Any) -> Any:
    """What a worker makes of a call: failures by their kind."""
    with asyncio.Runner() as runner:
        made = evaluate(component_of(reward, **args).load(), trajectories, runner)
    if isinstance(made, Failure):
        return made.kind.name
    return [each.kind.name if isinstance(each, Failure) else each for each in made]


def rubric(trajectories: Batch) -> list[float]:
    return [each.prompt.row["points"][each.text] + len(each.prompt.question) for each in trajectories]


def judged(
    prompts: Texts, completions: Texts, points: list[dict[str, float]], bonus: float, **others: Any
) -> list[float]:
    assert prompts == ["what is it?"] * 2
    assert others == {"answer": ["42"] * 2, "completion_ids": [[0] * 8] * 2, "level": ["hard"] * 2}
    return [bonus + each[text] for text, each in zip(completions, points, strict=True)]


async def lengths(completions: Texts, **_: Any) -> list[int]:
    return [len(each) for each in completions]


def columns(completions: Texts, answer: Texts) -> list[float]:
    return [float(answer == ["#### 7", "#### 7"])] * 2


def test_a_reward_sees_the_question_and_every_column_of_the_rows_as_fields_or_as_lists_by_keyword() -> None:
    assert outcome(rubric) == [12, 13.5]
    assert outcome(judged, bonus=0.5) == [1.5, 3]
    assert outcome(lengths) == [1, 1]
    # a column of that name comes before the reference answer
    answered = [trajectory("7") for _ in range(2)]
    for each in answered:
        each.prompt.row["answer"] = "#### 7"  # type: ignore[index]  # its own dictionary
    assert outcome(columns, answered) == [1.0, 1.0]


def of_messages(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """As TRL's own rewards read a conversation."""
    contents = [completion[0]["content"] for completion in completions]
    assert [[message["role"] for message in prompt] for prompt in prompts] == [["system", "user"]] * len(prompts)
    assert [completion[0]["role"] for completion in completions] == ["assistant"] * len(completions)
    return [float(len(each)) for each in contents]


def of_either(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(each if isinstance(each, str) else each[0]["content"])) for each in completions]


def test_a_reward_written_for_trl_gets_messages_where_the_row_is_a_conversation_and_texts_elsewhere() -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "what is it?"})
    chats = [replace(each, prompt=replace(each.prompt, messages=messages)) for each in map(trajectory, ("a", "bcd"))]
    assert outcome(of_messages, chats) == [1, 3]
    assert outcome(of_either, [chats[1], trajectory("ab")]) == [3, 2]
    assert outcome(of_messages, [trajectory("ab")]) == "exception"  # which the try before a run refuses


def needy(completions: Texts, solution: Texts, points: Any) -> list[float]:
    return [1.0]


def test_a_column_that_rows_lack_is_named() -> None:
    (failure,) = failures(evaluate(component_of(needy).load(), BATCH[:1], None))
    assert failure.kind.name == "value"
    assert "it takes solution" in failure.message
    assert "answer, points, level" in failure.message


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, scale: int = 1
) -> dict[str, Any]:
    assert (data_source, extra_info) == ("openai/gsm8k", {"index": 7})
    return {"score": scale * (ground_truth in solution_str), "length": len(solution_str), "pred": "text"}


async def fewer(solution_str: str, extra_info: Any, **others: Any) -> int:
    assert (extra_info, others) == (None, {"data_source": "set", "ground_truth": "42"})
    return len(solution_str)


def test_a_reward_written_for_verl_gets_its_arguments_and_may_take_fewer() -> None:
    rows = [trajectory(text, data_source="openai/gsm8k", extra_info={"index": 7}) for text in ("so 42", "7")]
    assert outcome(compute_score, rows, scale=2) == [LoggedScore(2, {"length": 5}), LoggedScore(0, {"length": 1})]
    assert outcome(fewer) == [1, 1]


@pytest.mark.parametrize(
    "value",
    [np.array([0.1, 0.2]), np.zeros((2, 2)), [0.5], (), "text", b"1", None, {}, 1j, 10**400, math.nan, len],
    ids=repr,
)
def test_what_cannot_be_logged_beside_a_score_is_left_out(value: object) -> None:
    made = outcome(returns, [trajectory("a")], value=[{"score": np.float32(1), "words": np.int64(3), "other": value}])
    assert made == [LoggedScore(1.0, {"words": 3.0})]
    assert outcome(returns, [trajectory("a")], value=[{"score": Decimal(1), "words": np.array(3)}]) == [
        LoggedScore(1.0, {"words": 3.0})
    ]
    assert outcome(returns, [trajectory("a")] * 2, value=[1.0, {"score": np.zeros((2, 2))}]) == [1.0, V]


def of_texts(text: str, reference: str) -> float:
    return 1.0


def of_nothing() -> list[float]:
    return []


class Needs:
    def __init__(self, needed: object) -> None:
        pass


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (of_texts, r"\(text, reference\): write \(trajectories\) or \(trajectory\) or .*extra_info\)"),
        (of_nothing, r"its parameters are \(\)"),
        (Needs, r"cannot be constructed or called with \{\} \(TypeError: Needs.__init__\(\) missing 1"),
    ],
)
def test_another_signature_is_refused(reward: Callable[..., Any], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        component_of(reward).load()


def returns(trajectories: Batch, value: object) -> object:
    return value


V = "value"  # a failure


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.arange(3, dtype=np.float32), [0, 1, 2]),
        ([True, np.int64(7), None], [1, 7, None]),
        ([1.0, math.nan, -math.inf], [1, V, V]),
        ([1.0, "1.0", [1.0]], [1, V, V]),
        ([{"reward": 1.0}, {"score": "high"}, {"score": math.nan}], [V] * 3),
        ([1.0, 0.5], [V] * 3),
        ("111", [V] * 3),
        (1.0, [V] * 3),
        ({"a": 1, "b": 1, "c": 1}, [V] * 3),
        (iter([1.0, 1.0, 1.0]), [V] * 3),
    ],
)
def test_anything_but_one_finite_number_per_trajectory_is_a_failure(value: object, expected: list[object]) -> None:
    assert outcome(returns, [trajectory("a")] * 3, value=value) == expected


def test_none_leaves_a_component_out_of_the_sum_and_of_its_mean_and_nothing_but_none_has_failed() -> None:
    batch = [trajectory("a", kind="code"), trajectory("please", kind="prose")]
    components = {"kind": {"_target_": f"{OWN}.of_code"}, "polite": {"_target_": f"{OWN}.polite"}}
    with running_scorer(components=components) as scorer:
        scored = scorer.scored(batch)
        assert failed(scorer) == {}
    assert [each.reward for each in scored] == [1.0, 1.0]
    assert [each.reward_components for each in scored] == [{"kind": 1.0, "polite": 0.0}, {"polite": 1.0}]
    means = group_metrics([Group(scored[0].prompt, tuple(scored))])
    assert (means["reward/kind"], means["reward/polite"]) == (1.0, 0.5)

    with running_scorer(_target_=f"{OWN}.of_code", max_failed_fraction=1) as scorer:
        assert [each.reward for each in scorer.scored(batch)] == [1.0, 0]
        assert failed(scorer) == {"value": 1}
