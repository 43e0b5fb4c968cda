"""Built-in components, and the settings that name one."""

from typing import Any

from app.reward.component import built_in
from app.reward.environment import NoScore
from app.reward.exact import exact
from app.reward.format import format
from tests.reward.scorers import trajectory


def test_exact_ignores_surrounding_whitespace() -> None:
    texts = ["42", " 42\n", "42.", "4 2", "", "The answer is 42"]
    assert exact([trajectory(text) for text in texts]) == [1, 1, 0, 0, 0, 0]


def test_format_rewards_any_marked_answer() -> None:
    marked = ["\\boxed{7}", "so\n#### 7", "####7", "\\boxed{\\frac{1}{2}}"]
    unmarked = ["7", "\\boxed{}", "\\boxed{7", "####", "#### \n7"]
    assert format([trajectory(text) for text in (*marked, *unmarked)]) == [1] * 4 + [0] * 5


def test_a_completion_without_an_episode_has_no_score_of_an_environment() -> None:
    score: Any = built_in("environment", 1.0).load()
    (without_episode,) = score([trajectory("46")])
    assert isinstance(without_episode, NoScore)  # a failure
