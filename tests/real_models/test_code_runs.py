"""Qwen2.5-Coder-0.5B writes programs for twenty rows in MBPP's format, before and after a few steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_models import MAKE_S, real_model
from tests.runs import Run

LIMIT_S = 1500.0
STEPS = 2
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + LIMIT_S)]

TASKS = """\
Return the square of a number. | square(3) == 9 ; square(-2) == 4
Return the larger of two numbers. | larger(1, 2) == 2 ; larger(5, -5) == 5
Reverse a text. | reverse('abc') == 'cba' ; reverse('') == ''
Say whether a number is even. | is_even(4) == True ; is_even(7) == False
Return the sum of a list. | total([1, 2, 3]) == 6 ; total([]) == 0
Count the vowels of a text. | vowels('education') == 5 ; vowels('xyz') == 0
Return the factorial of a number. | factorial(5) == 120 ; factorial(0) == 1
Say whether a text reads the same backwards. | palindrome('level') == True ; palindrome('ab') == False
Remove duplicates from a list and keep the order. | unique([1, 2, 1, 3]) == [1, 2, 3] ; unique([]) == []
Return the n-th Fibonacci number, where the first two are 0 and 1. | fibonacci(1) == 0 ; fibonacci(7) == 8
Return the greatest common divisor of two numbers. | divisor(12, 18) == 6 ; divisor(7, 5) == 1
Say whether a number is prime. | is_prime(13) == True ; is_prime(9) == False
Return the smallest number of a list. | smallest([3, 1, 2]) == 1
Join the words of a list with spaces. | join(['a', 'b']) == 'a b'
Return the sum of the digits of a number. | digits(123) == 6 ; digits(9) == 9
Return the odd numbers of a list. | odd([1, 2, 3]) == [1, 3] ; odd([2]) == []
Count the words of a text. | words('a b c') == 3 ; words('') == 0
Convert a temperature from Celsius to Fahrenheit. | fahrenheit(0) == 32 ; fahrenheit(100) == 212
Return the numbers that two lists share as a set. | set(shared([1, 2], [2, 3])) == {2}
Sort a list of pairs by the second item. | by_second([(1, 3), (2, 1)]) == [(2, 1), (1, 3)]
"""  # task | tests; the functions are named by the tests


def test_a_coder_is_evaluated_by_its_programs_before_and_after_a_few_steps(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = []
    for text, tests in (line.split(" | ") for line in TASKS.splitlines()):
        tested = [f"assert {each}" for each in tests.split(" ; ")]
        rows.append({"text": text, "code": "pass", "test_list": tested, "test_setup_code": ""})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = start(
        *(
            "model=hf",
            f"model.path={real_model('qwen25')}",
            "data=mbpp",
            "reward=code",
            f"data.path={path}",
            f"data.eval_path={path}",
        ),
        *(
            "+reward.args.partial=true",
            "device.dtype=float32",
            "model.lora.rank=8",
            "trainer.lr=1e-5",
            f"steps={STEPS}",
        ),
        *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "checkpoint.export=false", f"eval.every={STEPS}"),
        *("rollout.max_prompt_tokens=256", "rollout.max_completion_tokens=128", "trainer.tokens_per_microbatch=1024"),
        *("trainer.activation_checkpointing=none", "tracking.samples_per_step=20", "reward.timeout_s=30"),
    )
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.gone_within(15), run.processes()

    evaluated = [line for line in run.metrics() if "eval/accuracy" in line]
    steps = [line for line in run.metrics() if "time/step" in line]
    assert ([line["step"] for line in evaluated], len(steps)) == ([0, STEPS], STEPS)
    assert all(line["reward/failed_fraction"] == 0 for line in steps)
    assert min(line["eval/accuracy"] for line in evaluated) >= 0.3  # it can write programs, and did not unlearn it
    for line in evaluated:
        samples = (run.folder / "samples" / f"eval_{line['step']}.jsonl").read_text().splitlines()
        right = [json.loads(each)["reward"] == 1 for each in samples]
        assert sum(right) / len(right) == pytest.approx(line["eval/accuracy"])
