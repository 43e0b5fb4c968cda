"""The measured numbers of the pages are those of the result files, and come from machines that were idle."""

import json
import re
from pathlib import Path

import pytest

from tests.bench.learning import RUNS
from tests.compose import composed
from tests.docs import measured
from tests.docs.markdown import name

RESULTS = sorted(measured.RESULTS.glob("*.json"))
UNIT = re.compile(r"\d(?: ×| %| µs| MiB| GB| tokens/s)")


def blocks(page: Path) -> list[str]:
    return [match[2] for match in measured.BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", measured.PAGES, ids=name)
def test_the_measured_numbers_of_a_page_are_those_of_the_result_files(page: Path) -> None:
    assert blocks(page)
    assert page.read_text() == measured.rewritten(page), "run: python -m tests.docs.measured"


def test_every_block_is_on_a_page() -> None:
    assert sorted(block for page in measured.PAGES for block in blocks(page)) == sorted(measured.BLOCKS)


def test_the_performance_page_has_no_measured_number_outside_of_its_blocks() -> None:
    page = measured.ROOT / "docs" / "performance.md"
    assert UNIT.findall(measured.BLOCK.sub("", page.read_text())) == []


@pytest.fixture
def quoted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The result files that the blocks read."""
    stems = set()
    load = measured.load

    def recorded(stem: str) -> measured.Result:
        stems.add(stem)
        return load(stem)

    monkeypatch.setattr(measured, "load", recorded)
    for block in measured.BLOCKS:
        measured.render(block)
    return {stem for stem in stems if (measured.RESULTS / f"{stem}.json").exists()}


def test_every_quoted_result_says_that_the_machine_was_idle_or_is_in_virtual_time(quoted: set[str]) -> None:
    assert {"trainer", "learning", "memory", "controller"} <= quoted
    silent = {stem for stem in quoted if "busy" not in measured.load(stem)}
    assert silent == {*measured.VIRTUAL_TIME}
    assert [measured.load(stem)["busy"] for stem in quoted - silent] == [False] * len(quoted - silent)


def test_a_placement_without_a_run_is_not_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run for run in measured.load("learning")["runs"] if run["name"] != "grpo colocate"]
    monkeypatch.setattr(measured, "load", lambda _: {"runs": runs})
    fully_async, colocate = measured.placements().splitlines()
    (run,) = (run for run in runs if run["name"] == "grpo fully_async")
    assert fully_async.startswith(f"- `fully_async`: {run['completion_tokens_per_second']:,} completion tokens/s")
    assert colocate == "- `colocate`: Not measured yet."


def test_the_learning_runs_compose_the_updates_a_step_that_they_were_measured_with() -> None:
    recorded = {run["name"]: run["updates_per_step"] for run in measured.load("learning")["runs"]}
    algorithms = {name: [each for each in RUNS[name].split() if each.startswith("algorithm")] for name in recorded}
    today = {name: composed(*overrides).algorithm.updates_per_step for name, overrides in algorithms.items()}
    assert today == recorded
    assert set(measured.PLACEMENT_RUNS.values()) <= set(recorded)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_result_comes_from_a_busy_machine(path: Path) -> None:
    assert json.loads(path.read_text()).get("busy", False) is False


def test_a_result_that_does_not_exist_is_not_measured_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert measured.render("end_to_end") == "Not measured yet: there is no `end_to_end.json`.\n"
