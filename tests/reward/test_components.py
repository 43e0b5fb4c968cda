import pytest

from app.config.reward import BUILT_IN
from app.reward.answer import extract_final_answer
from app.reward.component import IN_PROCESS, built_in
from app.reward.exact import exact
from app.reward.format import format
from app.reward.math import equal


def test_exact_ignores_surrounding_whitespace(trajectory):
    texts = ["42", " 42\n", "42.", "4 2", "", "The answer is 42"]
    assert exact([trajectory(text) for text in texts]) == [1, 1, 0, 0, 0, 0]


def test_format_rewards_any_marked_answer(trajectory):
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
def test_the_last_mark_wins_and_a_box_beats_hashes(text, answer):
    assert extract_final_answer(text) == answer


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("42", "We get \\boxed{42}."),
        ("42", "so it is 42.0\n#### 42.0"),
        ("42", "Answer: 42"),
        ("34", "Answer: $34$"),
        ("46", "46"),
        ("#### 42", "\\boxed{42}"),
        ("\\boxed{42}", "42"),
        ("1/2", "\\boxed{0.5}"),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}"),
        ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}"),
        ("1,234", "#### 1234"),
        ("1234", "\\boxed{1{,}234}"),
        ("18", "#### $18"),
        ("18", "#### 18 dollars"),
        ("18", "#### \\frac{36}{2}"),
        ("50", "\\boxed{50\\%}"),
        ("70", "\\boxed{70.}"),
        ("5", "\\boxed{5 \\text{ apples}}"),
        ("3", "\\boxed{x=3}"),
        ("(1,2)", "\\boxed{(1, 2)}"),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"),
        ("Paris", "\\boxed{\\text{Paris}}"),
        ("A", "\\boxed{\\text{A}}"),
    ],
)
def test_math_accepts_equal_answers(reference, text):
    assert equal(reference, text)


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("42", "\\boxed{43}"),
        ("42", "42 at first, but \\boxed{41}"),
        ("42", ""),
        ("42", "\\boxed{}"),
        ("42", "I do not know"),
        ("5", "\\boxed{x^2 + 5}"),
        ("5", "\\boxed{2 or 5}"),
        ("0.333", "\\boxed{1/3}"),
        ("Paris", "\\boxed{sPiar}"),
        ("Paris", "it may be Paris"),
    ],
)
def test_math_rejects_different_answers(reference, text):
    assert not equal(reference, text)


def test_an_empty_reference_is_an_error_not_a_zero():
    for reference in ("", " . ", "$$"):
        with pytest.raises(ValueError, match=r"the reference answer .* is empty"):
            equal(reference, "\\boxed{...}")


def test_every_built_in_component_loads(trajectory):
    for name in BUILT_IN:
        assert list(built_in(name, 1.0).load()([trajectory("\\boxed{42}")])) == [float(name != "exact")]
    assert set(IN_PROCESS) < set(BUILT_IN)
