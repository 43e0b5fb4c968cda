"""The ceilings of tests/ceilings.toml: what the tree may hold, and how many files something passes on its way."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.folders import ROOT, python
from tests.test_floors import APP, module_of, room_of

CEILINGS = tomllib.loads(Path(__file__).with_name("ceilings.toml").read_text())
LINES = {path: len(path.read_text().splitlines()) for path in APP.rglob("*.py")}
WAYS = {"row": "A row's way", "setting": "A setting's way", "rank": "A dead rank's way"}


def test_the_tree_stays_below_its_ceilings() -> None:
    rooms: Counter[str | None] = Counter()
    for path, lines in LINES.items():
        rooms[room_of(module_of(path))] += lines

    ceilings = CEILINGS["lines"]
    assert rooms.pop(None) <= ceilings["core"]
    assert {name: lines for name, lines in rooms.items() if lines > ceilings["room"]} == {}
    assert sum(LINES.values()) <= ceilings["app"]
    assert sum(lines for path, lines in LINES.items() if path.parent.name == "config") <= ceilings["config"]
    tests = (ROOT / "tests").rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in tests) <= ceilings["tests"]
    assert len(LINES) <= CEILINGS["files"]["app"]


def test_packages_and_classes_stay_small() -> None:
    files = Counter(path.parent.relative_to(APP) for path in LINES if path.name != "__init__.py")
    limit = CEILINGS["files"]["package"]
    assert {str(folder) for folder, count in files.items() if count > limit} - {"config"} == set()

    large = {}
    for path in LINES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                name, lines = f"{module_of(path)}.{node.name}", (node.end_lineno or 0) - node.lineno + 1
                if lines > CEILINGS["class"].get(name, CEILINGS["lines"]["class"]):
                    large[name] = lines
    assert large == {}


def test_help_lists_no_more_settings_than_its_ceiling() -> None:
    settings = re.findall(r"^  [a-z_0-9.]+ = ", python("-m", "app", "--help"), re.M)
    assert 0 < len(settings) <= CEILINGS["settings"]["help"]


@pytest.mark.parametrize("way", WAYS)
def test_the_files_of_a_way_exist_and_are_few(way: str) -> None:
    _, _, text = (ROOT / "docs" / "one_step.md").read_text().partition(f"**{WAYS[way]}**")
    files = re.findall(r"`(app/[\w/]+\.py)`", text.partition("\n**")[0])
    assert 0 < len(files) <= CEILINGS["way"][way]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(set(files)) == len(files)
