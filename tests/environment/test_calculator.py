"""The calculator: what it answers, what it refuses in words, and when an episode ends."""

import asyncio

import pytest

from app.environment.calculator import ERROR, answer, make
from app.environment.protocol import Task
from tests.environment.scripted_policy import ScriptedPolicy

TASK = Task("products/0@0", "37*84=", "3108", "products")


def played(*replies: str) -> ScriptedPolicy:
    policy = ScriptedPolicy(replies)
    assert asyncio.run(make({})().run(TASK, policy)) is None
    return policy


@pytest.mark.parametrize(
    ("question", "result"),
    [
        ("37*84", "3108"),
        ("84+30", "114"),
        ("30-84", "-54"),
        ("-3*-4", "12"),
        ("5--4", "9"),
        (" 007 * 2 ", "14"),
        ("0*0", "0"),
        ("999999999999999999*999999999999999999", "999999999999999998000000000000000001"),
    ],
)
def test_one_operation_on_two_whole_numbers_is_answered(question: str, result: str) -> None:
    assert answer(question) == f"{result}\n"


def test_a_reply_without_a_question_ends_the_episode() -> None:
    policy = played("3700", "?1+1")
    assert policy.asked == [{"messages": [], "tools": None, "max_tokens": None}]  # the prompt of the data set
    assert policy.counts == {}
    assert [len(played(reply).asked) for reply in ("", " ?37*84", "37?")] == [1, 1, 1]


def test_a_malformed_question_is_counted_and_the_episode_goes_on() -> None:
    policy = played("?12*7+30", "?12*7", "84")
    last_read = [message["content"] for message in policy.asked[2]["messages"]]
    assert last_read == ["?12*7+30", ERROR, "?12*7", "84\n"]
    assert policy.counts == {"tool_calls": 2.0, "tool_failures": 1.0}
