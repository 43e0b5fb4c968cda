"""The measured numbers of the pages are those of the result files, and come from machines that were idle."""

import json
import re
from pathlib import Path

import pytest

from tests.bench.learning import RUNS
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


def test_the_placements_quote_runs_of_the_learning_bench() -> None:
    assert set(measured.PLACEMENT_RUNS.values()) <= set(RUNS)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_result_comes_from_a_busy_machine(path: Path) -> None:
    assert json.loads(path.read_text()).get("busy", False) is False


def test_a_number_is_shown_with_the_spread_of_its_rounds() -> None:
    rounds = {"median": 1.25, "min": 1.0, "max": 3.0}
    assert measured.number(rounds, ".1f") == "1.2 (1.0–3.0)"
    assert measured.number(1.25, ".2f") == "1.25"
    assert measured.median(rounds, ".2f") == "1.25"


def test_a_result_that_does_not_exist_is_not_measured_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert measured.render("end_to_end") == "Not measured yet: there is no `end_to_end.json`.\n"
    (tmp_path / "end_to_end.json").write_text(json.dumps(END_TO_END))
    table, text = measured.render("end_to_end").split("\n\n")
    assert table.splitlines()[2:] == [
        "| `colocate` | 693 (600–700) | 14.0 (13.0–15.0) | 7.4 (7.0–8.0) | 3,292 (3,000–3,300) |",
        "| `fully_async` | 936 (900–990) | 9.0 (8.0–10.0) | 9.0 (8.0–10.0) | 4,000 (3,900–4,100) |",
        "| TRL, microbatch of 8 | 312 (300–320) | 30.6 (30.0–31.0) | 20.0 (19.0–21.0) | 6,785 (6,000–7,000) |",
        "| TRL, microbatch of 32 (one run) | 310 | 30.8 | 20.1 | 6,900 |",
    ]
    assert " ".join(text.split()) == (
        "`colocate` has 2.22 (2.00–2.30) × TRL's tokens/s with 0.49 (0.48–0.50) of its memory, `fully_async` "
        "3.00 (2.90–3.10) × with 0.59 (0.58–0.60). Rounds: 1; load average before a measurement 0.5–1.5, the "
        "benchmark's own last minute included; other work at most 0.1 cores."
    )


def spread(median: float, least: float, largest: float) -> dict[str, float]:
    return {"median": median, "min": least, "max": largest}


END_TO_END = {
    "ours_over_trl": {"tokens_per_second": spread(2.22, 2.0, 2.3), "peak_pss_mib": spread(0.49, 0.48, 0.5)},
    "ours_async_over_trl": {"tokens_per_second": spread(3.0, 2.9, 3.1), "peak_pss_mib": spread(0.59, 0.58, 0.6)},
    "ours_async": {
        "tokens_per_second": spread(936, 900, 990),
        "seconds_per_step": spread(9, 8, 10),
        "generate_seconds": spread(9, 8, 10),
        "peak_pss_mib": spread(4000, 3900, 4100),
    },
    "ours": {
        "tokens_per_second": spread(693, 600, 700),
        "seconds_per_step": spread(14, 13, 15),
        "generate_seconds": spread(7.4, 7, 8),
        "peak_pss_mib": spread(3292, 3000, 3300),
    },
    "trl": {
        "tokens_per_second": spread(312, 300, 320),
        "seconds_per_step": spread(30.6, 30, 31),
        "generate_seconds": spread(20, 19, 21),
        "peak_pss_mib": spread(6785, 6000, 7000),
    },
    "tuning": {
        "microbatch of 32": {
            "tokens_per_second": 310,
            "seconds_per_step": 30.8,
            "generate_seconds": 20.1,
            "peak_pss_mib": 6900,
        }
    },
    "rounds": [
        {
            "trl": {"before": {"load_average": 0.5, "busy_cores": 0.0}},
            "ours": {"before": {"load_average": 1.5, "busy_cores": 0.1}},
            "ours_async": {"before": {"load_average": 1.0, "busy_cores": 0.0}},
        }
    ],
}
