"""Our verdict on each answer of math_answers.toml is the human grader's and math-verify's, but for those it lists."""

import tomllib
from pathlib import Path

import math_verify
import pytest

from app.reward.math import equal

GRADED = tomllib.loads(Path(__file__).with_name("math_answers.toml").read_text(encoding="utf-8"))


def listed(name: str) -> set[tuple[str, str]]:
    return {(reference, text) for pairs in GRADED.pop(name).values() for reference, text in pairs}


MISGRADED, DIFFERENT = listed("misgraded"), listed("different")
ROWS = [
    (each["reference"], text, verdict)
    for part in GRADED.values()
    for each in part
    for verdict, texts in ((True, each.get("right", [])), (False, each.get("wrong", [])))
    for text in texts
]


def verified(reference: str, text: str) -> bool:
    """Return the verdict of math-verify alone, used as its documentation says."""
    gold = reference if reference.startswith(("####", "\\boxed")) else f"${reference}$"
    parsed = [math_verify.parse(side, parsing_timeout=None) for side in (gold, text)]
    return math_verify.verify(*parsed, timeout_seconds=None)


def test_the_verdict_is_that_of_a_careful_human_grader_and_of_math_verify_but_for_the_listed_answers() -> None:
    assert len(set(ROWS)) == len(ROWS) > 200
    found = {(reference, text): equal(reference, text) for reference, text, _ in ROWS}
    assert {row[:2] for row in ROWS if found[row[:2]] != row[2]} == MISGRADED
    assert {row for row, verdict in found.items() if verdict != verified(*row)} == DIFFERENT


@pytest.mark.parametrize("number", [7, 600, 2125, 100_000, 1_234_567])
def test_an_unmarked_number_is_right_only_with_all_of_its_digits(number: int) -> None:
    """Answers as in GSM8K: whole numbers, some with groups of thousands."""
    texts = (f"So it is {number:,}{{}}.", f"The answer is ${number:,}{{}}", f"She has {number}{{}} apples.")
    for text in texts:
        assert equal(f"{number:,}", text.format("")), text
        assert equal(f"{number:,}", text.format(".0")), text
        assert not equal(f"{number:,}", text.format("0")), text
        assert not equal(f"{number:,}", text.format(".5")), text


@pytest.mark.parametrize("reference", ["", " . ", "$$", r"\boxed{.}"])
def test_an_empty_reference_is_an_error_not_a_zero(reference: str) -> None:
    with pytest.raises(ValueError, match=r"the reference answer .* is empty"):
        equal(reference, "\\boxed{...}")
