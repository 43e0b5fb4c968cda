import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from app.config.data import DataConfig, GeneratedConfig, Template
from app.data.prompts import build

SMALL = GeneratedConfig(problems=40, eval_problems=8)
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}~{% endif %}{% endif %}"
)


def test_a_plain_prompt_is_prefix_question_and_suffix_and_carries_every_column_of_its_row(
    jsonl: Callable[..., str], tokenizer: Any
) -> None:
    record = {"question": "1+1=", "answer": 2, "tests": [{"in": "1", "ok": True}], "level": None}
    config = DataConfig(path=jsonl(record, record), prefix="Q: ", suffix=" A:")
    data = build(config, tokenizer, seed=0, max_prompt_tokens=32)
    prompt = next(data.train)
    assert tokenizer.decode(prompt.token_ids) == "Q: 1+1= A:"
    assert prompt.token_ids.dtype == np.int32
    assert (prompt.question, prompt.answer, prompt.row) == ("1+1=", "2", record)
    assert data.train.prompt(prompt.id).row is prompt.row  # one copy for all epochs


def test_columns_of_parquet_become_json_values_and_columns_of_bytes_are_left_out(
    tmp_path: Path, tokenizer: Any
) -> None:
    record = {
        "question": "q",
        "answer": "a",
        "due": datetime.date(2026, 1, 31),
        "price": Decimal("1.50"),
        "image": b"PNG",
        "images": [{"bytes": b"PNG"}],
        "scores": [0.5, None],
    }
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record] * 2), path)
    data = build(DataConfig(path=str(path)), tokenizer, seed=0, max_prompt_tokens=32)
    row = {"question": "q", "answer": "a", "due": "2026-01-31", "price": "1.50", "scores": [0.5, None]}
    assert next(data.train).row == row
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize(
    ("thinking", "system", "expected"),
    [
        (False, None, "<user>1+1=!\n<assistant>~"),
        (True, None, "<user>1+1=!\n<assistant>"),
        (True, "Be brief.", "<system>Be brief.\n<user>1+1=!\n<assistant>"),
    ],
)
def test_a_chat_prompt_follows_the_tokenizers_template(
    jsonl: Callable[..., str], tokenizer: Any, thinking: bool, system: str | None, expected: str
) -> None:
    path = jsonl(*[{"question": "1+1=", "answer": "2"}] * 2)
    config = DataConfig(path=path, suffix="!", template=Template.chat, thinking=thinking, system=system)
    tokenizer.chat_template = CHAT_TEMPLATE
    data = build(config, tokenizer, seed=0, max_prompt_tokens=64)
    assert tokenizer.decode(next(data.train).token_ids) == expected


def test_prompt_ids_contain_source_row_and_epoch(tokenizer: Any) -> None:
    data = build(DataConfig(arithmetic=SMALL, shuffle=False), tokenizer, seed=0, max_prompt_tokens=32)
    assert [prompt.id for prompt in data.train.take(41)][-2:] == ["arithmetic/39@0", "arithmetic/0@1"]
    assert data.evals["eval"][0].id == "eval/40@eval"
    assert data.evals["eval"][0].source == "arithmetic"
    assert data.dropped == 0
    first = data.train.prompt("arithmetic/0@0")
    assert first.row == {"question": first.question, "answer": first.answer}


def test_longer_prompts_are_dropped_and_counted(jsonl: Callable[..., str], tokenizer: Any) -> None:
    questions = ["12345", "123", "1234", "12", "123456", "1"]
    train = jsonl(*[{"question": text, "answer": "a"} for text in questions])
    data = build(DataConfig(path=train, eval_fraction=0.01), tokenizer, seed=0, max_prompt_tokens=4)
    assert (data.dropped, data.total) == (2, 6)
    assert all(len(prompt.token_ids) <= 4 for prompt in data.train.take(len(data.train)))


def test_the_seed_changes_the_order_of_the_training_rows_only(tokenizer: Any) -> None:
    first, second = (build(DataConfig(arithmetic=SMALL), tokenizer, seed=seed, max_prompt_tokens=32) for seed in (0, 1))
    assert [each.question for each in first.evals["eval"]] == [each.question for each in second.evals["eval"]]
    orders = [[each.question for each in data.train.take(len(data.train))] for data in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
