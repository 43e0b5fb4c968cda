"""What the pages name exists: links, files, settings, metrics, device layouts."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from app.config import RunConfig
from app.config.foreign_names import answer
from app.config.setting import settings
from tests.docs import settings_page
from tests.docs.markdown import PAGES, ROOT, anchors, inline_code, links, name, table_names

GLOSSARY = ROOT / "docs" / "operations.md"

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


def test_the_settings_page_is_current() -> None:
    assert settings_page.PAGE.read_text() == settings_page.render(), "run: python -m tests.docs.settings_page"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    paths = {word for code in inline_code(page) for word in code.split() if PATH.fullmatch(word)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_tests_exist(page: Path) -> None:
    named = [TEST.fullmatch(code) for code in inline_code(page)]
    for path, test in (match.groups() for match in named if match):
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.M), f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_settings_exist(page: Path) -> None:
    declared = settings(RunConfig)
    keys = {each.key for each in declared}
    free_form = tuple(each.key for each in declared if isinstance(each.default, dict))
    sections = {key.split(".")[0] for key in keys}
    groups = {key.rpartition(".")[0] for key in keys}

    named = set()
    for code in inline_code(page):
        for word in code.split():
            match = DOTTED.fullmatch(word)
            if match and match[1].split(".")[0] in sections and not FILE.fullmatch(match[1]):
                named.add(match[1])

    if page.name == "coming_from.md":  # names of other programs; test_coming_from.py compares them with the answers
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
