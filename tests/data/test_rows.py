import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from app.config import RunConfig
from app.config.data import ArithmeticConfig, DataConfig, EvalSetConfig
from app.data import rows
from app.errors import ConfigError


def additions(count: int) -> list[dict[str, str]]:
    return [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(count)]


def config_error(config: DataConfig) -> str:
    """Load the data and return the one-sentence `ConfigError`."""
    with pytest.raises(ConfigError) as caught:
        rows.load(config)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


# Accepted data


def test_without_a_path_problems_are_generated():
    loaded = rows.load(DataConfig(arithmetic=ArithmeticConfig(problems=30, eval_problems=5)))
    assert len(loaded.train) == 30
    assert [len(members) for members in loaded.evals.values()] == [5]
    assert list(loaded.evals) == ["eval"]


def test_a_jsonl_file_keeps_its_row_numbers_and_skips_blank_lines(jsonl):
    path = jsonl({"q": "a", "n": 1}, "", {"q": "b", "n": 2.5}, {"q": "c", "n": "3"})
    loaded = rows.load(DataConfig(name="mine", path=path, question="q", answer="n", eval_fraction=0.3))
    everything = sorted(loaded.train + loaded.evals["eval"], key=lambda row: row.index)
    assert [(row.question, row.answer, row.source, row.index) for row in everything] == [
        ("a", "1", "mine", 0),
        ("b", "2.5", "mine", 1),
        ("c", "3", "mine", 2),
    ]


def test_a_parquet_file_with_nested_fields_gives_the_same_rows_as_jsonl(tmp_path, jsonl):
    records = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "reward_model": {"ground_truth": str(n)}, "other": n}
        for n in range(20)
    ]
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), parquet)
    loaded = [
        rows.load(
            DataConfig(path=path, question="prompt.0.content", answer="reward_model.ground_truth", eval_fraction=0.1)
        )
        for path in (str(parquet), jsonl(*records))
    ]
    assert loaded[0] == loaded[1]
    assert len(loaded[0].train) == 18


def test_the_answer_follows_the_last_marker(jsonl):
    path = jsonl(*[{"question": "q", "answer": "#### 7 is wrong\nso\n#### 1,234 "}] * 2)
    loaded = rows.load(DataConfig(path=path, answer_after="####"))
    assert loaded.train[0].answer == "1,234"


def test_distinct_drops_repeated_rows_and_keeps_the_first(jsonl):
    path = jsonl(*additions(5), *additions(5), {"question": "0+1=", "answer": "another"})
    loaded = rows.load(DataConfig(path=path, distinct=True))
    assert sorted(row.index for row in loaded.train + loaded.evals["eval"]) == [0, 1, 2, 3, 4, 10]


def test_held_out_rows_are_a_fraction_identical_for_every_run_and_disjoint_from_training(jsonl):
    config = DataConfig(path=jsonl(*additions(100)), eval_fraction=0.07)
    first, second = rows.load(config), rows.load(config)
    assert first == second
    assert len(first.evals["eval"]) == 7
    assert not {row.question for row in first.train} & {row.question for row in first.evals["eval"]}


def test_at_least_one_row_is_held_out_and_at_least_one_is_trained_on(jsonl):
    path = jsonl(*additions(2))
    for fraction in (0.001, 0.999):
        loaded = rows.load(DataConfig(path=path, eval_fraction=fraction))
        assert (len(loaded.train), len(loaded.evals["eval"])) == (1, 1)


def test_an_evaluation_set_can_override_path_fields_and_length(jsonl):
    train = jsonl(*[{"question": f"q{n}", "answer": f"#### {n}"} for n in range(4)])
    other = jsonl(*[{"problem": f"p{n}", "solution": n} for n in range(9)], name="other.jsonl")
    evaluation = EvalSetConfig(path=other, question="problem", answer="solution", answer_after="", rows=3)
    loaded = rows.load(DataConfig(path=train, answer_after="####", eval_sets={"other": evaluation}))
    assert len(loaded.train) == 4
    assert [(row.question, row.answer, row.source) for row in loaded.evals["other"]] == [
        ("p0", "0", "other"),
        ("p1", "1", "other"),
        ("p2", "2", "other"),
    ]


def test_a_file_instead_of_a_hub_set_holds_out_rows_for_its_splits_and_warns_once(jsonl):
    config = DataConfig(
        name="gsm8k", path=jsonl(*additions(20)), subset="main", eval_sets={"test": EvalSetConfig(split="test")}
    )
    loaded = rows.load(config)
    assert (len(loaded.train), len(loaded.evals["test"])) == (19, 1)
    assert loaded.warnings == [
        f"data.path={config.path} has no other splits: holding out 0.05 of its rows for data.eval_sets.test"
    ]


def test_an_evaluation_path_replaces_held_out_rows_and_the_sets_of_a_preset(jsonl):
    train = jsonl(*[{"question": f"q{n}", "answer": f"#### {n}"} for n in range(20)])
    mine = jsonl({"question": "p0", "answer": "#### 7"}, {"question": "p1"}, name="mine.jsonl")
    config = DataConfig(
        path=train, answer_after="####", eval_path=mine, eval_sets={"test": EvalSetConfig()}, max_broken_rows=1
    )
    loaded = rows.load(config)
    assert (len(loaded.train), list(loaded.evals), loaded.held_out) == (20, ["eval"], [])
    assert [(row.answer, row.source) for row in loaded.evals["eval"]] == [("7", "eval")]
    config.eval_path = "missing.jsonl"
    assert config_error(config).startswith("data.eval_path=missing.jsonl is not accepted")


def test_an_evaluation_set_inside_the_training_set_causes_a_warning(jsonl):
    path = jsonl(*additions(6))
    loaded = rows.load(DataConfig(path=path, eval_sets={"same": EvalSetConfig(path=path)}))
    assert loaded.warnings == [
        "6 of the 6 questions of evaluation set same are in the training set: its accuracy measures memorization"
    ]


def test_a_folder_is_loaded_as_a_hub_data_set_with_splits(tmp_path):
    pytest.importorskip("datasets")
    for split, count in (("train", 5), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions(count)))
    loaded = rows.load(DataConfig(path=str(tmp_path), eval_sets={"test": EvalSetConfig(split="test")}))
    assert (len(loaded.train), len(loaded.evals["test"])) == (5, 2)
    assert loaded.train[4].answer == "5"


# Rejected data: one sentence each


def test_a_missing_file_is_rejected():
    for path in ("missing.jsonl", "./rows", "/no/such/folder/rows.parquet", "Rows.JSONL"):
        message = config_error(DataConfig(path=path))
        assert message.startswith(f"data.path={path} is not accepted: give an existing file (.jsonl, ")
        assert message.endswith("or the id of a hub data set; there is no such file.")


def test_a_file_of_an_unsupported_kind_is_rejected(tmp_path):
    for name in ("rows.tsv", "rows.parquet.gz", "rows.gz", "jsonl"):
        path = tmp_path / name
        path.write_text("question,answer\n")
        assert "give a file that ends in .jsonl, .ndjson, .json, .csv, " in config_error(DataConfig(path=str(path)))


def test_an_empty_file_is_rejected(jsonl, tmp_path):
    path = jsonl()
    assert config_error(DataConfig(path=path)) == (
        f"data.path={path} is not accepted: give a data set with rows; this one is empty."
    )
    parquet = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": [], "answer": []}), parquet)
    assert "this one is empty" in config_error(DataConfig(path=str(parquet)))


def test_a_file_that_is_not_text_is_rejected(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\x00binary")
    assert "give a readable JSON file in UTF-8 ('utf-8' codec" in config_error(DataConfig(path=str(path)))


def test_a_broken_parquet_file_is_rejected(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 but no more")
    expected = f"data.path={path} is not accepted: give a readable Parquet file ("
    assert expected in config_error(DataConfig(path=str(path)))

    offsets = np.array([0, 1, 3], np.int32)
    not_utf8 = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, *map(pyarrow.py_buffer, (offsets, b"a\xff\xfe"))])
    pyarrow.parquet.write_table(pyarrow.table({"question": ["p", "q"], "answer": not_utf8}), path)
    assert f"{expected}'utf-8' codec" in config_error(DataConfig(path=str(path)))


def test_a_line_that_is_not_a_json_object_is_rejected_with_its_number(jsonl):
    good = {"question": "q", "answer": "a"}
    assert "; line 3 is not JSON (Expecting" in config_error(DataConfig(path=jsonl(good, "", "{broken")))
    assert "; line 2 is a list." in config_error(DataConfig(path=jsonl(good, "[1, 2]")))
    assert "; line 1 is not JSON (" in config_error(DataConfig(path=jsonl("[" * 100_000)))
    huge = '{"question": "q", "answer": ' + "1" * 5000 + "}"
    assert "; line 2 is not JSON (Exceeds the limit" in config_error(DataConfig(path=jsonl(good, huge)))


def test_a_row_without_the_field_is_rejected_with_its_number_and_existing_fields(jsonl):
    good = {"question": "q", "answer": "a"}
    path = jsonl(good, {"question": "q", "solution": "a"})
    assert config_error(DataConfig(path=path)) == (
        f"data.answer=answer is not accepted: give a field of the rows; row 2 of {path} has only question, solution."
    )
    assert "data.question=q is not accepted" in config_error(DataConfig(path=path, question="q"))
    nested = jsonl({"prompt": [{"content": "q"}], "answer": "a"}, name="nested.jsonl")
    assert "has a list of 1 there." in config_error(DataConfig(path=nested, question="prompt.1.content"))
    assert "has only content." in config_error(DataConfig(path=nested, question="prompt.0.text"))
    assert "has a str there." in config_error(DataConfig(path=nested, question="answer.0"))


def test_a_parquet_file_without_the_column_is_rejected_with_the_existing_columns(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q"], "solution": ["s"]}), path)
    assert "row 1 of" in (message := config_error(DataConfig(path=str(path))))
    assert message.endswith("has only question, solution.")


def test_an_empty_question_or_answer_is_rejected_with_its_row(jsonl):
    good = {"question": "q", "answer": "a"}
    path = jsonl(good, good, {"question": " \n", "answer": "a"})
    assert f"it is empty in row 3 of {path}." in config_error(DataConfig(path=path))
    assert "data.answer=answer" in config_error(DataConfig(path=jsonl({"question": "q", "answer": ""})))


def test_an_unpaired_surrogate_is_rejected_with_its_row(jsonl):
    good = {"question": "q", "answer": "a \U0001d54f"}  # JSON writes this letter as a pair
    for field in ("question", "answer"):
        path = jsonl(good, {**good, field: "7 \ud800"})
        assert config_error(DataConfig(path=path)) == (
            f"data.{field}={field} is not accepted: give a field of valid Unicode; "
            f"row 2 of {path} has the unpaired surrogate '\\ud800'."
        )
    assert rows.load(DataConfig(path=jsonl(good, good))).train[0].answer == "a \U0001d54f"


def test_a_field_that_is_not_text_is_rejected_with_its_kind(jsonl):
    for value, kind in ((None, "null"), ([1], "a list"), ({"a": 1}, "a dict"), (True, "a bool")):
        message = config_error(DataConfig(path=jsonl({"question": value, "answer": "a"})))
        assert f"give a text field; it is {kind} in row 1 of" in message


def test_an_answer_without_the_marker_is_rejected_with_its_row(jsonl):
    marked = {"question": "q", "answer": "#### 1"}
    for answer in ("1", "1 ####  "):
        message = config_error(DataConfig(path=jsonl(marked, {"question": "q", "answer": answer}), answer_after="####"))
        assert message.startswith("data.answer_after=#### is not accepted: give a marker that precedes every answer")
        assert "row 2" in message


def test_one_row_is_too_few_if_some_are_held_out(jsonl):
    path = jsonl(*additions(1))
    assert config_error(DataConfig(path=path)).startswith(f"data.path={path} is not accepted: give at least 2 rows")
    other = jsonl(*additions(3), name="other.jsonl")
    loaded = rows.load(DataConfig(path=path, eval_sets={"other": EvalSetConfig(path=other)}))
    assert (len(loaded.train), len(loaded.evals["other"])) == (1, 3)


def test_an_error_in_an_evaluation_set_names_its_own_key(jsonl):
    config = DataConfig(path=jsonl(*additions(3)), eval_sets={"aime": EvalSetConfig(path="missing.parquet")})
    assert config_error(config).startswith("data.eval_sets.aime.path=missing.parquet is not accepted")
    other = jsonl({"problem": "p"}, name="other.jsonl")
    config = DataConfig(path=jsonl(*additions(3)), eval_sets={"aime": EvalSetConfig(path=other)})
    assert config_error(config).startswith("data.eval_sets.aime.question=question is not accepted")


def test_a_hub_data_set_that_cannot_be_loaded_is_rejected(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    message = config_error(DataConfig(path=str(tmp_path), split="validation"))
    assert message.startswith(f"data.path={tmp_path} is not accepted: give a data set that can be loaded; ")
    assert "split validation failed to load (" in message


def test_invalid_settings_are_rejected_before_anything_is_read():
    for config, key in (
        (DataConfig(arithmetic=ArithmeticConfig(problems=0)), "data.arithmetic.problems=0"),
        (DataConfig(arithmetic=ArithmeticConfig(problems=99, eval_problems=2, max_operand=9)), "at most 100 problems"),
        (DataConfig(eval_fraction=1.0), "data.eval_fraction=1.0"),
        (DataConfig(question=""), "data.question=''"),
        (DataConfig(answer_after=""), "data.answer_after=''"),
        (DataConfig(system="Be brief."), "data.system=Be brief."),
        (DataConfig(eval_sets={"a": EvalSetConfig(rows=0)}), "data.eval_sets.a.rows=0"),
    ):
        with pytest.raises(ConfigError, match="is not accepted: give ") as caught:
            RunConfig(data=config).validate()
        assert key in str(caught.value)


def test_the_tasks_of_an_environment_are_rows_and_may_be_blank():
    tasks = [{"index": n, "id": f"task {n}", "question": "", "answer": ""} for n in range(10)]
    loaded = rows.load(DataConfig(name="mine", from_environment=True), tasks=tasks)
    assert [row.index for row in loaded.evals["eval"]] == [row.columns["index"] for row in loaded.evals["eval"]]
    assert sorted(row.columns["index"] for row in [*loaded.train, *loaded.evals["eval"]]) == list(range(10))
    assert {(row.source, row.question, row.answer) for row in loaded.train} == {("mine", "", "")}


def test_tasks_that_are_no_rows_are_refused_without_a_file():
    config = DataConfig(name="mine", from_environment=True)
    with pytest.raises(ConfigError, match=r"^data\.from_environment=true is not accepted: .*this one is empty"):
        rows.load(config)
    with pytest.raises(ConfigError, match=r"^data\.answer=answer .* row 2 of the tasks of the environment has"):
        rows.load(config, tasks=[{"question": "a", "answer": "b"}, {"question": "a"}])


def test_an_environment_with_one_task_is_refused_without_the_advice_to_give_a_file():
    config = DataConfig(name="mine", from_environment=True)
    with pytest.raises(ConfigError) as caught:
        rows.load(config, tasks=[{"question": "a", "answer": "b"}])
    assert str(caught.value) == (
        "data.from_environment=true is not accepted: give an environment with at least 2 tasks, since some are held "
        "out for evaluation (it has 1)."
    )
