"""The presets of `data=`, composed by Hydra as on the command line."""

from collections.abc import Callable
from typing import Any

import pytest

from app.config.data import Template
from app.config.own_data import with_preset
from app.config.reward import CodeArgs
from app.data import rows
from tests.compose import composed
from tests.refusals import refused


def test_a_local_file_in_gsm8k_format_replaces_the_hub_set(jsonl: Callable[..., str]) -> None:
    path = jsonl(*[{"question": f"What is {n}+1?", "answer": f"{n}+1=<<{n}+1>>\n#### {n + 1}"} for n in range(40)])
    config = composed("data=gsm8k", f"data.path={path}")
    loaded = rows.load(config.data)
    assert (len(loaded.train), len(loaded.evals["test"])) == (38, 2)
    assert loaded.train[0].answer == str(loaded.train[0].index + 1)
    assert config.data.template is Template.chat
    assert config.reward.components == {"math": 1.0}


def test_rows_in_dapo_format_are_read_and_duplicates_dropped(jsonl: Callable[..., str]) -> None:
    records = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "reward_model": {"ground_truth": str(n), "style": "rule"}}
        for n in range(3)
    ]
    train, aime = jsonl(*records * 4), jsonl(*records * 2, name="aime.jsonl")
    config = composed("data=dapo_math", f"data.path={train}", f"data.eval_sets.aime24.path={aime}")
    loaded = rows.load(config.data)
    assert [(row.question, row.answer) for row in loaded.train] == [("q0", "0"), ("q1", "1"), ("q2", "2")]
    assert len(loaded.evals["aime24"]) == 3


def test_a_local_file_in_mbpp_format_shows_the_tests_and_is_scored_by_them(jsonl: Callable[..., str]) -> None:
    tests = ["assert inc(1) == 2", "assert inc(2) == 3"]
    row = {"text": "Add one.", "code": "def inc(n): return n + 1", "test_list": tests, "test_setup_code": ""}
    config = composed("data=mbpp", f"data.path={jsonl(*[row] * 40)}", "+reward.args.partial=true")
    loaded = rows.load(config.data)
    assert (len(loaded.train), len(loaded.evals["test"])) == (38, 2)
    assert loaded.train[0].question == "Add one.\n\nassert inc(1) == 2\nassert inc(2) == 3"
    assert config.reward.components == {"code": 1.0}
    assert config.reward.code == CodeArgs(partial=True)
    assert "code" in composed(*with_preset(["model=qwen3_4b", "device=cuda", "data=mbpp"])).reward.components
    assert composed(*with_preset(["data.path=rows.jsonl"])).data.name == "rows"
    assert with_preset(["resume=run", "data.path=rows.jsonl"]) == ["resume=run", "data.path=rows.jsonl"]
    assert "math" in composed(*with_preset(["model=qwen3_4b", "data=mbpp", "reward=math"])).reward.components
    with refused("data.context", "test_list"):
        rows.load(composed("data=mbpp", f"data.path={jsonl({'text': 'Add.', 'code': '1'})}").data)


HUB = ("model=hf", "model.path=me/model")


@pytest.mark.parametrize(
    ("own", "left"),
    [
        ([], {"test": None}),
        (["data._target_=my_data.halves"], {}),
        (["data.train_sets.mine.path=a.jsonl"], {}),
        (["data.train_sets.mine.path=a.jsonl", "data.eval_sets.mine.path=b.jsonl"], {"mine": "b.jsonl"}),
        (["data.path=me/fork"], {"test": None}),  # its own split of that name
        (["data.eval_sets={}"], {}),
        (["data.eval_sets={}", "data.eval_sets.mine.path=b.jsonl"], {"mine": "b.jsonl"}),
        (["data=dapo_math", "data.path=a.jsonl"], {}),
        (["data=dapo_math", "data.path=a.jsonl", "data.eval_sets.aime24.path=b.jsonl"], {"aime24": "b.jsonl"}),
    ],
)
def test_an_evaluation_set_goes_with_the_training_data_that_it_belongs_to(own: list[str], left: dict[str, Any]) -> None:
    sets = composed(*HUB, *own).data.eval_sets
    assert {name: each.path for name, each in sets.items()} == left


def test_training_data_without_an_evaluation_set_is_evaluated_on_held_out_rows(jsonl: Callable[..., str]) -> None:
    path = jsonl(*[{"question": f"{n}+1=", "answer": f"{n + 1}"} for n in range(40)])
    own = [f"data.train_sets.mine.path={path}", "data.answer_after=null"]
    loaded = rows.load(composed(*HUB, *own).data)
    assert {name: len(each) for name, each in loaded.evals.items()} == {"eval": 2}
    loaded = rows.load(composed(*HUB, *own, "data.eval_sets.test.rows=1").data)
    assert {name: len(each) for name, each in loaded.evals.items()} == {"test": 1}
    assert {row.source for row in loaded.train} == {"mine"}
