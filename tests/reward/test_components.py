from typing import Any

import pytest

from app.config.reward import BUILT_IN
from app.reward.answer import extract_final_answer
from app.reward.component import IN_PROCESS, built_in
from app.reward.environment import NoScore
from app.reward.exact import exact
from app.reward.format import format
from tests.reward.scorers import trajectory


def test_exact_ignores_surrounding_whitespace() -> None:
    texts = ["42", " 42\n", "42.", "4 2", "", "The answer is 42"]
    assert exact([trajectory(text) for text in texts]) == [1, 1, 0, 0, 0, 0]


def test_format_rewards_any_marked_answer() -> None:
    texts = [
        "\\boxed{7}",
        "so\n#### 7",
        "####7",
        "7",
        "\\boxed{}",
        "\\boxed{7",
        "####",
        "#### \n7",
        "\\boxed{\\frac{1}{2}}",
    ]
    assert format([trajectory(text) for text in texts]) == [1, 1, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("first \\boxed{1}, then \\boxed{2}.", "2"),
        ("\\boxed{\\frac{1}{2}} and more", "\\frac{1}{2}"),
        ("#### 1\n#### 1,234 dollars\nbye", "1,234 dollars"),
        ("#### 1 but \\boxed{3}", "3"),
        ("plain 3", None),
    ],
)
def test_the_last_mark_wins_and_a_box_beats_hashes(text: str, answer: str | None) -> None:
    assert extract_final_answer(text) == answer


def test_every_built_in_component_loads() -> None:
    for name in {*BUILT_IN} - {"environment", "code"}:
        score: Any = built_in(name, 1.0).load()
    assert list(score([trajectory("\\boxed{42}")])) == [float(name != "exact")]
    score = built_in("environment", 1.0).load()
    (without_episode,) = score([trajectory("46")])
    assert isinstance(without_episode, NoScore)  # a failure
    assert str(without_episode) == "its run or score returned none"
    assert set(IN_PROCESS) < set(BUILT_IN)
