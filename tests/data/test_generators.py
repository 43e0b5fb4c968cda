from app.config.data import ArithmeticConfig
from app.data.generators import arithmetic


def test_the_answer_is_the_sum() -> None:
    train, held_out = arithmetic(ArithmeticConfig(problems=50, eval_problems=10))
    for row in train + held_out:
        left, right = row.question.removesuffix("=").split("+")
        assert row.answer == str(int(left) + int(right))
        assert 0 <= int(left) <= 99
        assert 0 <= int(right) <= 99


def test_training_and_held_out_rows_are_disjoint_and_have_the_configured_sizes() -> None:
    train, held_out = arithmetic(ArithmeticConfig(problems=80, eval_problems=20, max_operand=9))
    assert (len(train), len(held_out)) == (80, 20)
    assert len({row.question for row in train + held_out}) == 100
    assert len({row.index for row in train + held_out}) == 100


def test_every_run_has_the_same_problems() -> None:
    config = ArithmeticConfig(problems=100, eval_problems=10)
    assert arithmetic(config) == arithmetic(config)
    assert arithmetic(config)[0][0].question == "30+47="
