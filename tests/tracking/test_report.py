import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config import RunConfig
from app.mode import report as report_mode
from app.mode.report import write_comparison
from app.recovery.run_lock import run_lock
from app.tracking.recorder import RunFolderRecorder
from app.tracking.report import data as report_data
from app.tracking.report.checks import learning_check, time_check
from tests.compose import composed
from tests.tracking.records import group

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Page(HTMLParser):
    """The text, the embedded data and the external addresses of a page. Tags must be closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text: list[str] = []
        self.data: Any = None
        self.addresses: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self._open.append((tag, dict(attributes)))
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if attributes.get("id") == "data":
            self.data = json.loads(data)
        elif tag not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def save_config(config: RunConfig, folder: Path, *overrides: str) -> None:
    (folder / "config").mkdir(parents=True)
    OmegaConf.save(OmegaConf.structured(config), folder / "config/config.yaml")
    OmegaConf.save(OmegaConf.create(list(overrides)), folder / "config/overrides.yaml")


def run_folder(folder: Path, lr: float = 1e-3) -> Path:
    """A run of 20 steps."""
    config = RunConfig(steps=20)
    config.trainer.lr = lr
    save_config(config, folder, f"trainer.lr={lr}")
    with RunFolderRecorder(config, folder) as recorder:
        recorder.log_eval(0, {"eval": {"accuracy": 0.3}})
        for step in range(1, 21):
            values = {"reward/mean": step / 20, "reward/accuracy": step / 20, "mismatch/kl": 1e-8, "some/other": 1.0}
            times = {"time/step": 1.0, "time/generate": 0.6, "time/train": 0.3, "time/sync": 0.06}
            recorder.log(step, {**values, **times, "sync/load_seconds": 0.04, "sync/bytes": 1000.0})
            recorder.log_samples(step, [group(step, [0.0, 1.0])], lambda ids: "</script><b>what is & why")
        recorder.log_eval(20, {"eval": {"accuracy": 0.9}})
    return folder


def recorded(folder: Path, *rows: dict[str, float], config: RunConfig | None = None) -> report_data.RunData:
    """A run with these steps."""
    with RunFolderRecorder(config or RunConfig(), folder) as recorder:
        for step, row in enumerate(rows, start=1):
            recorder.log(step, row)
    return report_data.read_run(folder)


def test_the_report_answers_the_three_questions_in_one_file_without_addresses(tmp_path: Path) -> None:
    report = run_folder(tmp_path / "run") / "report.html"
    page = Page(report)
    for shown in (
        "Did it learn? Yes",
        "from 30.0% to 90.0%",
        "Where does the time go? Generation (60%)",
        "1.00 s: generate 60%, train 30%, sync 6%, other 4%",
        "Is it healthy? Yes 3 checks passed; 0 warnings",
        "custom · grpo · colocate · cpu finished",
        "trainer.lr 0.001 1e-06 command line",
        "problem found value meaning",
    ):
        assert shown in page.words
    assert all(address.startswith(("#", "data:,")) for address in page.addresses)
    assert "http" not in report.read_text()
    assert "Copyright (c) 2022 Leon Sorokin" in report.read_text()  # uPlot's license stays with it

    run = page.data["runs"][0]
    assert run["steps"] == list(range(21))
    assert run["series"]["reward/mean"][:3] == [None, 0.05, 0.1]
    assert [at["step"] for at in run["samples"]] == list(range(1, 21))
    row = run["samples"][0]["rows"][1]
    # Text of a run cannot become markup.
    assert (row["question"], row["reward"], row["components"]) == ("</script><b>what is & why", 1.0, {"exact": 1.0})
    shown_metrics = {metric for chart in page.data["charts"] for metric in chart["metrics"]}
    assert set(run["series"]) <= shown_metrics | {"time/step"}, "a metric is on no chart"


def test_several_runs_are_compared_side_by_side_with_the_settings_that_differ(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name / "2026-01-01", lr) for name, lr in (("slow", 1e-4), ("fast", 1e-2))]
    assert report_data.find_runs(tmp_path) == sorted(folders)
    write_comparison(folders, tmp_path)
    page = Page(tmp_path / "report.html")
    assert "slow/2026-01-01 0.0001 finished 20 30.0% 90.0% 90.0% " in page.words
    assert "setting lr=0.0001 lr=0.01 trainer.lr 0.0001 0.01 All other metrics" in page.words
    assert [run["name"] for run in page.data["runs"]] == ["lr=0.0001", "lr=0.01"]
    assert "standard deviation" not in page.words


@pytest.mark.parametrize(
    ("mode", "metric", "values", "answer"),
    [
        ("train", "eval/accuracy", [0.3, 0.9], "Yes"),
        ("train", "eval/accuracy", [0.3, 0.9, 0.4], "Yes, then it declined"),
        ("train", "eval/accuracy", [0.5, 0.51], "Not visibly"),
        ("train", "eval/accuracy", [0.5, 0.3], "No, it got worse"),
        ("train", "eval/accuracy", [0.2, *[0.21] * 1000, 0.9, *[0.3] * 1000], "Yes, then it declined"),  # not averages
        # With standard errors: two of the difference are 2 · √(0.15² + 0.1²) = 0.3606.
        ("train", "eval/accuracy", [(0.5, 0.15), (0.86, 0.1)], "Too few prompts to tell"),
        ("train", "eval/accuracy", [(0.86, 0.1), (0.5, 0.15)], "Too few prompts to tell"),
        ("train", "eval/accuracy", [(0.5, 0.15), (0.861, 0.1)], "Yes"),
        ("train", "eval/accuracy", [(0.861, 0.1), (0.5, 0.15)], "No, it got worse"),
        ("train", "eval/accuracy", [(0.5, 0.15), (0.51, 0.1)], "Not visibly"),
        ("train", "reward/mean", [step / 10 for step in range(1, 11)], "Yes"),
        ("train", "reward/mean", [0.5] * 10, "Not visibly"),
        ("train", "reward/mean", [0.5] * 3, "Too early"),
        ("sft", "loss/ce", [2.0, 1.5, 1.2, 1.0, 0.9], "Yes"),
        ("sft", "loss/ce", [1.0] * 5, "Not visibly"),
    ],
)
def test_learning_is_judged_by_held_out_accuracies_else_by_the_reward_or_the_cross_entropy(
    mode: str, metric: str, values: list[float | tuple[float, float]], answer: str, tmp_path: Path
) -> None:
    config = composed(f"mode={mode}", "eval.every=0")
    save_config(config, tmp_path)
    pairs = (value if isinstance(value, tuple) else (value, 0.0) for value in values)
    run = recorded(tmp_path, *({metric: value, f"{metric}_stderr": error} for value, error in pairs), config=config)
    assert learning_check(run).answer == answer
    if metric == "eval/accuracy":
        few = replace(run, summary={"eval/prompts": 4})
        assert learning_check(few).answer == (answer if answer == "Not visibly" else "Too few prompts to tell")
    assert run.label.split(" · ")[1] == ("sft" if mode == "sft" else "grpo")


def test_a_component_that_an_own_reward_replaces_is_no_setting_in_use(tmp_path: Path) -> None:
    for own in ([], ["reward._target_=my_rewards.right"]):
        save_config(composed(*own), tmp_path / str(len(own)))
        changed = report_data.read_run(tmp_path / str(len(own))).changed
        assert ("reward.components.exact" in changed) == (not own)


def test_no_phase_is_to_be_shortened_where_most_of_the_time_is_outside_the_steps(tmp_path: Path) -> None:
    run = recorded(tmp_path, *[{"time/step": 1.0, "time/generate": 0.8}] * 5)
    for total, answer in ((25.0, "Outside the steps (80%)"), (8.0, "Generation (80%)")):
        of_total = replace(run, summary={"total/seconds": total, "total/step_seconds": 5.0})
        assert time_check(of_total).answer == answer


def test_a_killed_run_is_not_shown_as_running_and_a_resumed_one_has_its_attempts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        with run_lock(folder), RunFolderRecorder(RunConfig(), folder) as recorder:
            recorder.log(1, {"time/step": 1.0})
            running = (folder / "summary.json").read_bytes()
    (folder / "summary.json").write_bytes(running)  # as the second was killed after the step

    report_mode.run(RunConfig(), folder)
    words = Page(folder / "report.html").words
    assert " killed 1 step · " in words
    assert " in 2 attempts" in words
    with run_lock(folder):
        report_mode.run(RunConfig(), folder)
    assert " running 1 step" in Page(tmp_path / "run.report.html").words


@pytest.mark.parametrize(
    ("phases", "shown"),
    [
        # Their medians are 1 s of a median step of 5 s, though a step does nothing else.
        ([(5, 1, 4), (5, 1, 4), (10, 9, 1), (10, 9, 1), (5, 1, 4)], "7.00 s: generate 60%, train 40%, other 0%."),
        ([(1, 0.9, 0.8)] * 3, "1.00 s: generate 90%, train 80%, other 0% (phases overlap)."),
    ],
)
def test_shares_of_time_are_shares_of_the_sums(
    phases: list[tuple[float, float, float]], shown: str, tmp_path: Path
) -> None:
    rows = ({"time/step": whole, "time/generate": one, "time/train": two} for whole, one, two in phases)
    assert shown in time_check(recorded(tmp_path, *rows)).explanation
