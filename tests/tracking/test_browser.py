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


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two CSS colors, as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dim, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


def check_looks(seen: Visit, *, dark: bool) -> None:
    assert seen.console == []
    page = seen.seen
    assert (contrast(page["page"], "rgb(0, 0, 0)") < contrast(page["page"], "rgb(255, 255, 255)")) is dark
    assert contrast(page["ink"], page["page"]) > 10
    assert contrast(page["soft"], page["card"]) > 4.5
    assert not page["overflow"]
    assert all(chart["width"] > 150 for chart in page["charts"])
    assert [chart["title"] for chart in page["charts"] if not chart["drawn"]] == []


@pytest.mark.parametrize("theme", ["light", "dark", "switched"])
def test_every_chart_of_a_run_has_a_point_for_each_step(runs: list[Path], tmp_path: Path, theme: str) -> None:
    seen = visit(runs[0] / "report.html", tmp_path, dark=theme == "dark", switch=theme == "switched")
    check_looks(seen, dark=theme != "light")
    charts = {chart["title"]: chart for chart in seen.seen["charts"]}
    assert charts["Reward"]["points"] == [STEPS]
    assert charts["Accuracy"]["points"] == [1 + STEPS // EVERY, STEPS]
    assert charts["Time of each step"]["points"] == [STEPS] * 3
    for chart in seen.seen["charts"]:
        expected = [count for name in chart["metrics"] if (count := measured(runs[0], name))]
        assert sorted(chart["points"]) == sorted(expected), chart["title"]
    assert seen.seen["where"] == f"step {STEPS}"
    assert seen.seen["cards"] > 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_comparison_has_a_curve_for_each_run(runs: list[Path], tmp_path: Path, dark: bool) -> None:
    compared = f"tracking.compare=[{','.join(map(str, runs))}]"
    code, screen = run_app("mode=report", compared, f"hydra.run.dir={tmp_path / 'both'}", cwd=tmp_path)
    assert code == 0, screen
    assert "mean ± standard deviation over the seeds" in screen

    seen = visit(tmp_path / "both" / "report.html", tmp_path, dark=dark)
    check_looks(seen, dark=dark)
    charts = {chart["title"]: chart for chart in seen.seen["charts"]}
    assert charts["Reward"]["points"] == [STEPS, STEPS]
    assert charts["Accuracy: held-out"]["points"] == [1 + STEPS // EVERY] * 2
    assert sum(title.startswith("Time of each step") for title in charts) == 2
