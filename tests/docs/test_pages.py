"""The pages: what they name exists, and what is generated in them is current."""

import ast
import json
import re
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from app.config import RunConfig
from app.config.foreign_names import VALUE, answer, table
from app.config.setting import settings
from tests.docs import coming_from_page, measured, settings_page
from tests.docs.markdown import PAGES, ROOT, anchors, inline_code, links, name, table_names

GLOSSARY = ROOT / "docs" / "operations.md"
RESULTS = sorted(measured.RESULTS.glob("*.json"))
DECLARED = {each.key: each for each in settings(RunConfig)}

PATH = re.compile(r"(app|conf|docs|tests|launch)/[\w./-]*")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
DOTTED = re.compile(r"[+~]{0,2}(_?[a-z]\w*(\.\w+)+)(\.\*)?(=.*)?")
FILE = re.compile(r".*\.(py|md|json|jsonl|yaml|html|sh|txt)")
EXAMPLES = {"algorithm.advantage_limit"}  # of CONTRIBUTING: settings that are yet to be written

PREFIXES = (
    "advantage checkpoint clip completion environment eval idle kl loss memory mismatch ratio recovery reward rollout "
    "staleness sync throughput time tokens total trainer updates"
)
METRIC = re.compile(rf"({'|'.join(PREFIXES.split())})/[\w@]*\w")
SUMS = {"mismatch/tokens", "mismatch/same_version_tokens", "mismatch/weight", "mismatch/weight_square"}
NO_METRICS = {*SUMS, "tokens/s"}  # sums of metrics; a unit


@pytest.mark.parametrize("module", [settings_page, coming_from_page], ids=lambda module: module.PAGE.stem)
def test_a_generated_page_is_current(module: ModuleType) -> None:
    assert module.PAGE.read_text(encoding="utf-8") == module.render(), f"run: python -m {module.__name__}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target

    paths = {word for code in inline_code(page) for word in code.split() if PATH.fullmatch(word)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    named = [TEST.fullmatch(code) for code in inline_code(page)]
    for path, test in (match.groups() for match in named if match):
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.M), f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_settings_exist(page: Path) -> None:
    keys = set(DECLARED)
    free_form = tuple(each.key for each in DECLARED.values() if isinstance(each.default, dict))
    sections = {key.split(".")[0] for key in keys}
    groups = {key.rpartition(".")[0] for key in keys}

    named = set()
    for code in inline_code(page):
        for word in code.split():
            match = DOTTED.fullmatch(word)
            if match and match[1].split(".")[0] in sections and not FILE.fullmatch(match[1]):
                named.add(match[1])

    if page.name == "coming_from.md":  # names of other programs; `test_a_row_…` compares them with the answers
        named = {each for each in named if answer(each) is None}

    unknown = {key for key in named - keys - groups - EXAMPLES if not key.startswith(free_form)}
    assert unknown == set()


@cache
def strings_of_the_code() -> tuple[set[str], list[re.Pattern[str]]]:
    """The strings of `app`, and its f-strings as patterns."""
    strings: set[str] = set()
    patterns: list[re.Pattern[str]] = []

    for path in (ROOT / "app").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        pieces = {id(piece) for node in formatted for piece in node.values}
        strings |= {
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces
        }
        patterns += [_pattern(node) for node in formatted]

    return strings, patterns


def _pattern(formatted: ast.JoinedStr) -> re.Pattern[str]:
    parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"[\w@<>]+" for part in formatted.values]
    return re.compile("".join(parts))


def glossary_pattern() -> re.Pattern[str]:
    """Matches the names of the glossary; `<component>` there stands for any name."""
    names = table_names(GLOSSARY, "Metrics glossary")
    return re.compile("|".join(re.sub(r"<\w+>", r"\\w+", re.escape(each)) for each in names))


def test_the_glossary_has_every_metric_of_the_code() -> None:
    strings, _ = strings_of_the_code()
    written = {text for text in strings if METRIC.fullmatch(text)}
    assert {text for text in written - NO_METRICS if not glossary_pattern().fullmatch(text)} == set()


def test_every_metric_of_the_glossary_is_in_the_code() -> None:
    strings, patterns = strings_of_the_code()
    named = [pattern for pattern in patterns if "/" in pattern.pattern]
    for metric in table_names(GLOSSARY, "Metrics glossary"):
        assert metric in strings or any(pattern.fullmatch(metric) for pattern in named), metric


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_metrics_are_in_the_glossary(page: Path) -> None:
    named = {code for code in inline_code(page) if METRIC.fullmatch(code)}
    assert {metric for metric in named if not glossary_pattern().fullmatch(metric)} == set()


# --- numbers from result files


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_measured_numbers_of_a_page_are_those_of_the_result_files(page: Path) -> None:
    assert page.read_text() == measured.rewritten(page.read_text()), "run: python -m tests.docs.measured"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_result_comes_from_a_busy_machine(path: Path) -> None:
    assert json.loads(path.read_text()).get("busy", False) is False


def test_every_block_is_on_one_page() -> None:
    found = [match[2] for page in PAGES for match in measured.BLOCK.finditer(page.read_text())]
    assert sorted(found) == sorted(measured.BLOCKS)


def test_every_quoted_result_of_this_machine_says_that_it_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    quoted: dict[str, measured.Result] = {}
    load = measured.load
    monkeypatch.setattr(measured, "load", lambda stem: quoted.setdefault(stem, load(stem)))
    for render in measured.BLOCKS.values():
        render()

    assert {"trainer", "learning", "real_models"} <= quoted.keys()
    # In virtual time; arithmetic; on a card of its own.
    cards = {card.removesuffix(".json") for card in measured.CARDS}
    assert {stem for stem, result in quoted.items() if "busy" not in result} == {"overlap", "roofline", *cards}


# --- names of other programs


GROUPS = {each.name for each in (ROOT / "conf").iterdir()}
ROWS = [row for rows in table()["programs"].values() for row in rows]
NAMES = [name for row in ROWS for name in row["names"].split()]


def test_a_foreign_name_stands_once_and_is_no_setting_of_ours() -> None:
    known = [name.replace("-", "_") for name in NAMES]
    assert sorted(known) == sorted(set(known))
    assert not set(known) & DECLARED.keys()


def accepted(key: str, choice: str) -> bool:
    """Whether `key=choice` names a setting, or a preset, and one of its values where these have names."""
    if key == "hydra.run.dir" or choice.startswith("<"):
        return key in DECLARED or key in GROUPS or key == "hydra.run.dir"
    if key in GROUPS and (ROOT / f"conf/{key}/{choice}.yaml").exists():
        return True
    default = DECLARED[key].default
    return not isinstance(default, Enum) or choice in type(default).__members__


@pytest.mark.parametrize("row", ROWS, ids=[row["names"].split()[0] for row in ROWS])
def test_a_row_has_an_answer_with_settings_and_values_that_exist(row: dict[str, Any]) -> None:
    assert ("write" in row) != ("because" in row)
    choices = [str(each) for each in row.get("values", {}).values()] or [VALUE]
    for word in row.get("write", "").split():
        key, equals, written = word.partition("=")
        assert equals
        assert all(accepted(key, written.replace(VALUE, choice)) for choice in choices)
        named = [name for name in re.findall(r"[a-z_]+\.[a-z_]+", written) if "<" in written]
        assert set(named) <= DECLARED.keys()
    assert [each for each in row["names"].split() if answer(each.replace("*", "anything"), "7") is None] == []
