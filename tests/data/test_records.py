"""Formats of data files, several files, and broken rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from app.config.data import DataConfig, EvalSetConfig
from app.data import rows
from app.data.row import Row
from tests.refusals import refused

RECORDS = [{"question": f'Ünit {number},\n"quoted"', "answer": f"00{number}"} for number in range(3)]


def lines_of(records: list[dict[str, str]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def csv_of(records: list[dict[str, str]]) -> str:
    cells = [('"' + record["question"].replace('"', '""') + '"', record["answer"]) for record in records]
    return "question,answer\r\n" + "".join(f"{question},{answer}\r\n" for question, answer in cells)


TEXTS = {
    "rows.jsonl": lines_of(RECORDS),
    "rows.ndjson": lines_of(RECORDS),
    "lines.json": lines_of(RECORDS),
    "list.json": json.dumps(RECORDS, indent=2),
    "rows.csv": csv_of(RECORDS),
    "bom.csv": "\ufeff" + csv_of(RECORDS),
}


def everything(path: object) -> list[Row]:
    """All rows of a path, in file order."""
    loaded = rows.load(DataConfig(path=path))
    return sorted(loaded.train + loaded.evals["eval"], key=lambda row: row.index)


def require_refused(key: str, value: object, *named: str, **settings: Any) -> None:
    with refused(key, value, *named):
        rows.load(DataConfig(**settings))


@pytest.mark.parametrize("name", [*TEXTS, *(f"{name}.gz" for name in TEXTS)])
def test_every_text_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = TEXTS[name.removesuffix(".gz")].encode()
    path.write_bytes(gzip.compress(text, mtime=0) if name.endswith(".gz") else text)
    read = everything(str(path))
    assert [row.columns for row in read] == RECORDS
    assert [(row.question, row.answer) for row in read] == [(each["question"], each["answer"]) for each in RECORDS]


def test_several_files_are_read_in_the_given_order_and_patterns_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(lines_of([{"question": name, "answer": "1"}]))
    table = pyarrow.Table.from_pylist([{"question": "p", "answer": "1"}])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")

    def questions(path: object) -> str:
        return "".join(row.question for row in everything(path))

    b, a, p = (str(tmp_path / name) for name in ("b.jsonl", "a.jsonl", "p.parquet"))
    assert questions([b, p, a]) == "bpa"
    assert questions(str(tmp_path / "*.jsonl")) == "abc"
    assert questions([p, str(tmp_path / "*.jsonl")]) == "pabc"
    assert questions(str(tmp_path / "**" / "[ab].jsonl")) == "ab"
    assert [row.index for row in everything([b, a])] == [0, 1]  # unique over all files


GOOD = b'{"question": "q", "answer": "a"}'


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("rows.jsonl.gz", gzip.compress(lines_of(RECORDS * 50).encode(), mtime=0)[:-40], "gzip"),
        ("rows.jsonl.gz", lines_of(RECORDS).encode(), "Not a gzipped file"),
        ("rows.json", b"[" + GOOD + b",", "not JSON"),
        ("rows.json", b"[" + GOOD + b", 7]", "row 2 is a int"),
        ("rows.jsonl", b"\xff\xfe\x00binary", "'utf-8' codec"),
        ("rows.jsonl", GOOD + b"\n\n{broken", "line 3"),
        ("rows.jsonl", GOOD + b"\n[1, 2]", "row 2 is a list"),
        ("rows.jsonl", b"[" * 100_000, "line 1"),
        ("rows.jsonl", GOOD + b'\n{"question": "q", "answer": ' + b"1" * 5000 + b"}", "line 2"),
        ("rows.jsonl", b"", "empty"),
        ("rows.csv", b'question,answer\n"open,1\n', "unexpected end of data"),
        ("rows.parquet", b"PAR1 but no more", "Parquet"),
        ("rows.tsv", GOOD, ".jsonl, .ndjson, .json, .csv, "),
        ("rows.parquet.gz", GOOD, ".jsonl, .ndjson, .json, .csv, "),
    ],
    ids=range(14),
)
def test_a_damaged_or_empty_file_is_refused(name: str, content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    require_refused("data.path", tmp_path / name, named, path=str(tmp_path / name))


BROKEN = [
    '{"question": "q0", "answer": "0"}',
    "{broken",
    '{"question": "q2", "answer": null}',
    "[1]",
    '{"question": 1}',
    '{"question": "q5", "answer": "5"}',
]


@pytest.fixture
def broken(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(BROKEN))
    return str(path)


def test_broken_rows_are_skipped_up_to_the_limit_and_counted(broken: str) -> None:
    loaded = rows.load(DataConfig(path=broken, max_broken_rows=4))
    everyone = sorted(loaded.train + loaded.evals["eval"], key=lambda row: row.index)
    assert [(row.question, row.index) for row in everyone] == [("q0", 0), ("q5", 5)]
    assert loaded.broken == 4
    (warning,) = loaded.warnings
    assert [text for text in (f"4 broken row(s) of {broken}", "line 2") if text not in warning] == []


def test_one_broken_row_more_is_an_error_with_its_line(broken: str) -> None:
    require_refused("data.path", broken, "line 2", path=broken)
    skipped = "data.max_broken_rows=3"
    require_refused("data.answer", "answer", f"row 5 of {broken}", skipped, path=broken, max_broken_rows=3)


def test_the_limit_covers_all_sets(broken: str) -> None:
    config = DataConfig(path=broken, eval_sets={"mine": EvalSetConfig(path=broken)}, max_broken_rows=8)
    assert rows.load(config).broken == 8
    config.max_broken_rows = 7
    with refused("data.answer", "answer"):
        rows.load(config)


def test_a_file_of_broken_rows_only_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n" * 5)
    require_refused("data.path", path, "all 5 rows", path=str(path), max_broken_rows=100)
