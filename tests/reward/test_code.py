"""`reward=code`: the forms of tests, and what a completion scores."""

import base64
import contextlib
import json
import os
import pickle
import re
import zlib
from typing import Any

import pytest

from app.reward.code.check import describe_tests, require_sandbox
from app.reward.code.judge import Judge, returns, same_lines
from app.reward.code.row_tests import RETURNS, Asserts, NoTests, Stdin, read_tests
from app.reward.code.sandbox import LocalSandbox, reads_files, unavailable
from tests.refusals import refused
from tests.reward.scorers import running_scorer, score, trajectory

MEMORY = 256 << 20
TIMEOUT_S = 60.0
MBPP: dict[str, Any] = {"test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"], "test_setup_code": ""}
RIGHT = "def add(a, b):\n    return a + b\n"
HALF = "def add(a, b):\n    return 3\n"


@pytest.fixture
def sandbox() -> LocalSandbox:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    return LocalSandbox(MEMORY)


def passed(sandbox: LocalSandbox, program: str, row: dict[str, Any], answer: str = "") -> int:
    return Judge(sandbox, stop_early=False, timeout_s=TIMEOUT_S).passed(program, read_tests(row, answer))


def test_asserts_are_counted_one_by_one(sandbox: LocalSandbox) -> None:
    programs = (RIGHT, HALF, "", "def add(a):", "add = None")
    assert [passed(sandbox, program, MBPP) for program in programs] == [2, 1, 0, 0, 0]


def test_the_reference_solution_says_that_a_builtin_is_the_programs(sandbox: LocalSandbox) -> None:
    row = {"test_list": ["assert sum(10, 15) == 6"]}
    program = "def sum(a, b):\n    return 6\n"
    assert [passed(sandbox, program, row, answer) for answer in ("def sum(a, b):\n    ...", "")] == [1, 0]


def test_the_forms_of_published_rows_are_run(sandbox: LocalSandbox) -> None:
    stdin = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7.0"]})
    script = "import sys\nif __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))\n"
    method = "class Solution:\n    def add(self, a, b):\n        return (a + b,)\n"
    public = [{"input": "1\n2", "output": "[3]", "testtype": "functional"}]
    private = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(public * 2)))).decode()
    named = '{"func_name": "add"}'
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
    rows: list[tuple[dict[str, Any], str, int]] = [
        ({"input_output": stdin}, script, 2),
        ({"input_output": stdin}, "print(3)", 1),
        ({"input_output": stdin}, script + "raise SystemExit(1)", 0),
        ({"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})}, RIGHT, 1),
        ({"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})}, RIGHT, 1),
        ({"public_test_cases": json.dumps(public), "metadata": named}, method, 1),
        ({"public_test_cases": json.dumps(public), "private_test_cases": private, "metadata": named}, method, 3),
        ({"test": check, "entry_point": "add"}, RIGHT, 1),
        ({"test": check, "entry_point": "add"}, HALF, 0),
        ({"inputs": ["1 2"], "outputs": ["3"]}, script, 1),
        ({"inputs": ["1 2"], "outputs": ["3"]}, f"{script}exit()", 1),
        ({"inputs": ["1 2"], "outputs": ["3"]}, f"{script}quit(1)", 0),
    ]
    for row, program, expected in rows:
        assert passed(sandbox, program, row) == expected, (row, program)
    assert passed(sandbox, script, {}, stdin) == 2


def calls(function: str, *cases: list[Any]) -> Asserts:
    statements = [f"{RETURNS}({function}, {json.dumps(each)!r})" for each in cases]
    return Asserts(
        "", statements, frozenset([function]), frozenset(), frozenset([function, "Solution"]), "function calls"
    )


def test_the_columns_tell_the_form_and_what_cannot_be_read_is_refused() -> None:
    assert read_tests(MBPP) == Asserts("", MBPP["test_list"], names=frozenset({"add"}))
    assert read_tests({"inputs": [["1", "2"]], "outputs": ["3"]}) == Stdin([("1\n2", "3")])
    assert read_tests({"inputs": "[[1, 2]]", "outputs": "[3]", "fn_name": "a.b"}) == calls("b", [[1, 2], 3])

    form = {"fn_name": "f"}
    assert read_tests({**form, "inputs": ["[1, 2]\n4"], "outputs": ["6"]}) == calls("f", [[[1, 2], 4], 6])
    assert read_tests({**form, "inputs": ['"abc"'], "outputs": ['"cba"']}) == calls("f", [["abc"], "cba"])
    as_text = json.dumps({**form, "inputs": [["123"], ["a"]], "outputs": ["321", "a"]})
    assert read_tests({"input_output": as_text}) == calls("f", [["123"], "321"], [["a"], "a"])

    evil = base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode()
    refused_rows: list[tuple[dict[str, Any], str]] = [
        ({"question": "?", "answer": "!"}, "answer, question"),
        ({"test_list": []}, "empty"),
        ({"test_list": ["assert f("]}, "SyntaxError"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs"),
        ({"input_output": "{"}, "JSONDecodeError"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f()"}, "f()"),
        ({"inputs": [5], "outputs": [5], "fn_name": "f"}, "5 are no list"),
        ({"public_test_cases": "[]", "private_test_cases": evil}, "getcwd"),
    ]
    for row, why in refused_rows:
        with pytest.raises(NoTests, match=re.escape(why)):
            read_tests(row)
    with refused("reward", "code", "mine/7"):
        describe_tests([[("mine/7", {"question": "?"}, "")]])
    assert describe_tests([[("mine/7", MBPP, "")] * 3]) == "asserts in 3 rows"
    many = [(f"mine/{number}", MBPP, "") for number in range(700)]
    assert describe_tests([many, many[:2]]).startswith("asserts in 502 rows")
    with refused("reward", "code", "test/0"):  # of an evaluation set
        describe_tests([many, [("test/0", {"question": "?"}, "")]])


def returned(found: Any, expected: Any) -> bool:
    with contextlib.suppress(AssertionError):
        returns(lambda: found, json.dumps([[], expected]))
        return True
    return False


def test_outputs_are_compared_by_line_and_by_number() -> None:
    assert same_lines(" 1  \n2.50 3\n\n", "1\n2.5 3")
    assert not same_lines("1\n2", "1 2")
    assert not same_lines("nan", "x")
    assert same_lines("0.30000000000000004 0.3333333333", "0.3 0.333333333333")
    assert not same_lines("0.3001", "0.3")
    assert not same_lines("nan", "0.5")
    assert not same_lines("10000001", "10000000")
    assert not same_lines("1e9999999", "0.5")
    assert returned(((1, 2), "a"), [[1, 2], "a"])
    assert returned({1: (2,)}, {"1": [2]})
    assert not returned(1, [2])


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}```\n"


def test_a_completion_scores_all_or_a_share_and_a_row_without_tests_is_a_failure_but_no_program_is() -> None:
    texts = [fenced(RIGHT), fenced(HALF), RIGHT, fenced("import os\nos._exit(0)\n"), fenced("while True:\n    pass\n")]
    completions = [trajectory(text, **MBPP) for text in texts]
    with running_scorer(components={"code": 1.0}, args={"partial": True}, timeout_s=3.0, workers=2) as scorer:
        assert score(scorer, completions) == [1, 0.5, 0, 0, 0]
        assert scorer.metrics["reward/failed_fraction"] == 0
    with running_scorer(components={"code": 1.0}, timeout_s=30.0) as scorer:
        assert score(scorer, completions[:4]) == [1, 0, 0, 0]
        assert scorer.scored([completions[1]])[0].reward_components == {"code": 0.0, "code/passed": 0.5}
        assert score(scorer, [completions[0], trajectory(fenced(RIGHT))]) == [1, 0]
        assert scorer.metrics["reward/failed_exception"] == 1


def test_a_machine_that_cannot_confine_programs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert require_sandbox()[1] == reads_files()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "here", "6", "1", "riscv64")))
    unavailable.cache_clear()
    try:
        with refused("reward", "code", "riscv64"):
            require_sandbox()
    finally:
        unavailable.cache_clear()
