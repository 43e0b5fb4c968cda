import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config.data import DataConfig, EvalSetConfig, TrainSetConfig
from app.data import rows
from tests.compose import composed
from tests.refusals import refused


def additions(count: int) -> list[dict[str, str]]:
    return [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(count)]


def load(**settings: Any) -> rows.DataRows:
    return rows.load(DataConfig(**settings))


def test_a_jsonl_file_keeps_its_row_numbers_and_skips_blank_lines(jsonl: Callable[..., str]) -> None:
    path = jsonl({"q": "a", "n": 1}, "", {"q": "b", "n": 2.5}, {"q": "c", "n": "3"})
    loaded = rows.load(DataConfig(name="mine", path=path, question="q", answer="n", eval_fraction=0.3))
    everything = sorted(loaded.train + loaded.evals["eval"], key=lambda row: row.index)
    assert [(row.question, row.answer, row.source, row.index) for row in everything] == [
        ("a", "1", "mine", 0),
        ("b", "2.5", "mine", 1),
        ("c", "3", "mine", 2),
    ]


def test_distinct_drops_repeated_rows_and_keeps_the_first(jsonl: Callable[..., str]) -> None:
    path = jsonl(*additions(5), *additions(5), {"question": "0+1=", "answer": "another"})
    loaded = rows.load(DataConfig(path=path, distinct=True))
    assert sorted(row.index for row in loaded.train + loaded.evals["eval"]) == [0, 1, 2, 3, 4, 10]


def test_held_out_rows_are_a_fraction_identical_for_every_run_and_disjoint_from_training(
    jsonl: Callable[..., str],
) -> None:
    config = DataConfig(path=jsonl(*additions(100)), eval_fraction=0.07)
    first, second = rows.load(config), rows.load(config)
    assert first == second
    assert len(first.evals["eval"]) == 7
    assert not {row.question for row in first.train} & {row.question for row in first.evals["eval"]}
    for fraction in (0.001, 0.999):  # at least one of each
        loaded = load(path=jsonl(*additions(2)), eval_fraction=fraction)
        assert (len(loaded.train), len(loaded.evals["eval"])) == (1, 1)


def test_sets_have_columns_of_their_own(jsonl: Callable[..., str]) -> None:
    mine = jsonl(*[{"problem": f"m{n}", "answer": n} for n in range(9)], name="mine.jsonl")
    aime = jsonl({"question": "p", "solution": 7}, name="aime.jsonl")
    config = DataConfig(
        train_sets={"mine": TrainSetConfig(path=mine, question="problem")},
        eval_sets={"aime": EvalSetConfig(path=aime, answer="solution")},
    )
    loaded = rows.load(config)
    assert [(row.question, row.answer) for row in loaded.train] == [(f"m{n}", str(n)) for n in range(9)]
    assert [(row.question, row.answer) for row in loaded.evals["aime"]] == [("p", "7")]


def test_a_file_instead_of_a_hub_set_holds_out_rows_for_its_splits_and_warns_once(jsonl: Callable[..., str]) -> None:
    config = DataConfig(
        name="gsm8k", path=jsonl(*additions(20)), subset="main", eval_sets={"test": EvalSetConfig(split="test")}
    )
    loaded = rows.load(config)
    assert (len(loaded.train), len(loaded.evals["test"])) == (19, 1)
    (warning,) = loaded.warnings
    assert re.search(f"data.path={config.path} .* 0.05 .*data.eval_sets.test", warning)


def test_an_evaluation_path_replaces_held_out_rows_and_the_sets_of_a_preset(jsonl: Callable[..., str]) -> None:
    train = jsonl(*[{"question": f"q{n}", "answer": f"#### {n}"} for n in range(20)])
    last = "#### 7 is wrong\nso\n#### 1,234 "  # the answer follows the last marker
    mine = jsonl({"question": "p0", "answer": last}, {"question": "p1"}, name="mine.jsonl")
    config = DataConfig(
        path=train, answer_after="####", eval_path=mine, eval_sets={"test": EvalSetConfig()}, max_broken_rows=1
    )
    loaded = rows.load(config)
    assert (len(loaded.train), list(loaded.evals), loaded.held_out) == (20, ["eval"], [])
    assert [(row.answer, row.source) for row in loaded.evals["eval"]] == [("1,234", "eval")]
    config.eval_path = "missing.jsonl"
    with refused("data.eval_path", "missing.jsonl"):
        rows.load(config)


@pytest.mark.parametrize(
    ("name", "pattern", "first"),
    [("arithmetic", r"[0-9]+\+[0-9]+=", "30+47="), ("products", r"[1-9]\d\*[1-9]\d=", "86*87=")],
)
def test_generated_problems_are_right_different_and_the_same_for_every_run(name: str, pattern: str, first: str) -> None:
    config = composed(f"data={name}", f"data.{name}.problems=2401", f"data.{name}.eval_problems=200")
    loaded = rows.load(config.data)
    members = loaded.train + loaded.evals["eval"]
    assert (len(loaded.train), loaded.train[0].question, config.reward.components) == (2401, first, {"exact": 1.0})
    assert len({row.question for row in members}) == len({row.index for row in members}) == len(members) == 2601
    for row in members:
        assert re.fullmatch(pattern, row.question)
        assert (row.source, row.answer) == (name, str(eval(row.question.removesuffix("="))))


GOOD = {"question": "q", "answer": "a"}
NESTED = {"prompt": [{"content": "q"}], "answer": "a"}


@pytest.mark.parametrize(
    ("row", "settings", "key", "named"),
    [
        ({"question": "q", "solution": "a"}, {}, "answer", "has only question, solution"),
        (GOOD, {"question": "q"}, "question", "has only question, answer"),
        (NESTED, {"question": "prompt.1.content"}, "question", "a list of 1"),
        (NESTED, {"question": "answer.0"}, "question", "a str"),
        ({"question": " \n", "answer": "a"}, {}, "question", "empty"),
        ({"question": "q", "answer": ""}, {}, "answer", "empty"),
        ({**GOOD, "question": "7 \ud800"}, {}, "question", "surrogate '\\ud800'"),
        ({**GOOD, "question": None}, {}, "question", "it is null"),
        ({**GOOD, "answer": float("nan")}, {}, "answer", "it is NaN"),
        ({**GOOD, "question": {"a": 1}}, {}, "question", "it is a dict"),
        ({**GOOD, "question": True}, {}, "question", "it is a bool"),
        ({**GOOD, "answer": "1"}, {"answer_after": "####"}, "answer_after", "row 1"),
    ],
    ids=str,
)
def test_a_row_without_usable_text_is_rejected_with_its_field_and_number(
    jsonl: Callable[..., str], row: dict[str, Any], settings: dict[str, Any], key: str, named: str
) -> None:
    path = jsonl(row)
    with refused(f"data.{key}", settings.get(key, key), f"row 1 of {path}", named):
        load(path=path, **settings)


def test_the_tasks_of_an_environment_are_rows_and_may_be_blank() -> None:
    tasks = [{"index": n, "id": f"task {n}", "question": "", "answer": ""} for n in range(10)]
    loaded = rows.load(DataConfig(name="environment"), tasks=tasks)
    assert [row.index for row in loaded.evals["eval"]] == [row.columns["index"] for row in loaded.evals["eval"]]
    assert sorted(row.columns["index"] for row in [*loaded.train, *loaded.evals["eval"]]) == list(range(10))
    assert {(row.source, row.question, row.answer) for row in loaded.train} == {("environment", "", "")}


def test_a_folder_is_loaded_as_a_hub_data_set_with_splits_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for split, count in (("train", 5), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions(count)))
    loaded = rows.load(DataConfig(path=str(tmp_path), eval_sets={"test": EvalSetConfig(split="test")}))
    assert (len(loaded.train), len(loaded.evals["test"])) == (5, 2)
    assert loaded.train[4].answer == "5"
    with refused("data.path", tmp_path, "split validation"):
        load(path=str(tmp_path), split="validation")


def test_one_row_is_too_few_if_some_are_held_out(jsonl: Callable[..., str]) -> None:
    path = jsonl(*additions(1))
    with refused("data.path", path, "at least 2 rows", "data.eval_path"):
        load(path=path)
    other = jsonl(*additions(3), name="other.jsonl")
    loaded = load(path=path, eval_sets={"other": EvalSetConfig(path=other)})
    assert (len(loaded.train), len(loaded.evals["other"])) == (1, 3)
