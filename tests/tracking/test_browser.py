"""The reports of real runs, opened in a real browser."""

import json
import re
from pathlib import Path

import pytest

from tests.folders import run_app
from tests.runs import Run
from tests.tracking.browser import CHROMIUM, Visit, visit

STEPS, EVERY = 6, 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("runs")
    folders = []
    for seed in (0, 1):
        (folder / str(seed)).mkdir()
        run = Run(folder / str(seed), f"steps={STEPS}", f"eval.every={EVERY}", f"seed={seed}")
        try:
            assert run.wait() == 0
        finally:
            run.end()
        folders.append(run.folder)
    return folders


def measured(run: Path, metric: str) -> int:
    """The steps that have a value of a metric."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum(row.get(metric) is not None for row in rows)


def check_looks(seen: Visit, *, dark: bool) -> None:
    assert seen.console == []
    page = seen.seen
    assert (sum(map(int, re.findall(r"\d+", page["page"])[:3])) < 3 * 128) is dark
    assert not page["overflow"]
    assert all(chart["width"] > 150 for chart in page["charts"])
    assert [chart["title"] for chart in page["charts"] if not chart["drawn"]] == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_chart_has_a_point_for_each_step_and_in_a_comparison_for_each_run(
    runs: list[Path], tmp_path: Path, dark: bool
) -> None:
    one = visit(runs[0] / "report.html", tmp_path, dark=dark)
    check_looks(one, dark=dark)
    for chart in one.seen["charts"]:
        expected = [count for name in chart["metrics"] if (count := measured(runs[0], name))]
        assert sorted(chart["points"]) == sorted(expected), chart["title"]
    charts = {chart["title"]: chart["points"] for chart in one.seen["charts"]}
    assert charts["Accuracy"] == [1 + STEPS // EVERY, STEPS]
    assert charts["Time of each step"] == [STEPS] * 3
    assert one.seen["where"] == f"step {STEPS}"
    assert one.seen["cards"] > 0

    compared = f"tracking.compare=[{','.join(map(str, runs))}]"
    code, screen = run_app("mode=report", compared, f"hydra.run.dir={tmp_path / 'both'}", cwd=tmp_path)
    assert code == 0, screen
    both = visit(tmp_path / "both" / "report.html", tmp_path, dark=dark)
    check_looks(both, dark=dark)
    charts = {chart["title"]: chart["points"] for chart in both.seen["charts"]}
    assert charts["Reward"] == [STEPS, STEPS]
    assert charts["Accuracy: held-out"] == [1 + STEPS // EVERY] * 2
    assert sum(title.startswith("Time of each step") for title in charts) == 2
