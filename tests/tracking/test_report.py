import asyncio
import json
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config import Mode, RunConfig
from app.config.device import DeviceKind
from app.data.counts import RowCounts
from app.device import device_of
from app.errors import RunError
from app.mode.report import write_comparison
from app.start import session
from app.tracking.recorder import RunFolderRecorder
from app.tracking.report import data as report_data
from app.tracking.report.charts import charts
from app.tracking.report.checks import Tone, learning_check, rule_checks, rules_check, time_check
from app.tracking.report.page import write_report
from app.types import SYNC_PHASES
from tests.compose import composed
from tests.tracking.records import episode_group, group, metrics

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


def run_folder(
    folder: Path,
    *,
    steps: int = 20,
    lr: float = 1e-3,
    seed: int = 0,
    accuracy: float = 0.9,
    overrides: Sequence[str] = (),
    change: Callable[[int, dict[str, float]], dict[str, float]] = lambda step, metrics: metrics,
) -> Path:
    config = RunConfig(steps=steps, seed=seed)
    config.trainer.lr = lr
    (folder / "config").mkdir(parents=True)
    OmegaConf.save(OmegaConf.structured(config), folder / "config/config.yaml")
    OmegaConf.save(OmegaConf.create(list(overrides)), folder / "config/overrides.yaml")
    with RunFolderRecorder(config, folder) as recorder:
        recorder.log_eval(0, {"eval": {"accuracy": 0.3}})
        for step in range(1, steps + 1):
            metrics = {
                "reward/mean": step / steps,
                "reward/accuracy": step / steps,
                "mismatch/kl": 1e-8,
                "time/step": 1.0,
                "time/generate": 0.6,
                "time/train": 0.3,
                "time/sync": 0.06,
                "sync/load_seconds": 0.04,
                "sync/bytes": 1000.0,
                "some/other": 1.0,
            }
            recorder.log(step, change(step, metrics))
            recorder.log_samples(step, [group(step, [0.0, 1.0])], lambda ids: "</script><b>what is & why")
        recorder.log_eval(steps, {"eval": {"accuracy": accuracy}})
    return folder


def test_the_report_answers_the_three_questions_in_one_file_without_addresses(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", overrides=["trainer.lr=0.001"])
    page = Page(folder / "report.html")
    assert "Did it learn? Yes Held-out accuracy went from 30.0% to 90.0%." in page.words
    assert "Where does the time go? Generation (60%) The mean step takes 1.00 s" in page.words
    assert "generate 60%, train 30%, sync 6%, other 4%." in page.words
    assert "Is it healthy? Yes 3 checks passed; 0 warnings." in page.words
    assert "custom · grpo · colocate · cpu finished" in page.words
    assert "trainer.lr 0.001 1e-06 command line" in page.words
    assert all(address.startswith(("#", "data:,")) for address in page.addresses)
    assert "http" not in (folder / "report.html").read_text()
    assert "Copyright (c) 2022 Leon Sorokin" in (folder / "report.html").read_text()  # uPlot's license stays with it


def test_metrics_and_samples_are_in_the_file_and_cannot_become_markup(tmp_path: Path) -> None:
    data = Page(run_folder(tmp_path / "run") / "report.html").data
    run = data["runs"][0]
    assert run["steps"] == list(range(21))
    assert run["series"]["reward/mean"][:3] == [None, 0.05, 0.1]
    assert [at["step"] for at in run["samples"]] == list(range(1, 21))
    row = run["samples"][0]["rows"][1]
    assert (row["question"], row["reward"], row["components"]) == ("</script><b>what is & why", 1.0, {"exact": 1.0})
    shown = {metric for chart in data["charts"] for metric in chart["metrics"]}
    assert set(run["series"]) <= shown | {"time/step"}, "a metric is on no chart"
    assert next(chart["section"] for chart in data["charts"] if chart["metrics"] == ["some/other"]) == "more"


def test_a_sample_of_an_episode_is_a_conversation_and_environments_have_charts(tmp_path: Path) -> None:
    config = RunConfig(steps=1)
    values = {
        "environment/turns_mean": 2.0,
        "environment/wait_fraction": 0.5,
        "environment/score_found": 0.5,
        "environment/failed_raised": 1.0,
        "environment/moves": 3.0,
    }
    with RunFolderRecorder(config, tmp_path) as recorder:
        recorder.log(1, {"reward/mean": 0.5, **values})
        recorder.log_samples(1, [episode_group()], lambda ids: "6*7=")
    data = Page(tmp_path / "report.html").data

    first, second = data["runs"][0]["samples"][0]["rows"]
    assert [(turn["role"], turn["text"]) for turn in first["turns"]] == [
        ("user", "6*7="),
        ("assistant", "<b>41</b>"),
        ("tool", "wrong"),
        ("assistant", "42"),
    ]
    assert (first["ending"], first["scores"]) == ("stop", {"found": 1.0, "polite": None})
    assert (first["tokens"], first["logprob"], first["versions"], first["sequences"]) == (3, -0.5, [3], 1)
    assert (second["tokens"], second["sequences"]) == (6, 2)
    charts = {metric: chart for chart in data["charts"] for metric in chart["metrics"]}
    assert {charts[name]["section"] for name in values} == {"episodes"}
    assert charts["environment/score_found"]["labels"] == ["found"]


def test_a_long_episode_shows_its_first_and_its_last_turns(tmp_path: Path) -> None:
    turns = [{"role": "user", "text": f"{number}" * 3000, "tokens": 1, "seconds": 0.0} for number in range(40)]
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_1.jsonl").write_text(json.dumps({"prompt": "a", "turns": turns, "logprobs": []}) + "\n")
    (row,) = report_data.read_samples(tmp_path, "step")[0]["rows"]
    assert len(row["turns"]) == report_data.MAX_TURNS + 1
    assert row["turns"][report_data.MAX_TURNS // 2]["text"] == "… 10 turns …"
    assert row["turns"][-1]["text"].startswith("39393")
    assert max(len(turn["text"]) for turn in row["turns"]) < report_data.TURN_LIMIT + 40


def test_several_runs_are_compared_side_by_side_with_the_settings_that_differ(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name / "2026-01-01", lr=lr) for name, lr in (("slow", 1e-4), ("fast", 1e-2))]
    assert report_data.find_runs(tmp_path) == sorted(folders)
    write_comparison(folders, tmp_path)
    page = Page(tmp_path / "report.html")
    assert "2 runs side by side" in page.words
    assert "slow/2026-01-01 0.0001 finished 20 30.0% 90.0% 90.0% 0 s 1.00 s — Yes Yes" in page.words
    assert "setting lr=0.0001 lr=0.01 trainer.lr 0.0001 0.01 All other metrics" in page.words
    assert [run["name"] for run in page.data["runs"]] == ["lr=0.0001", "lr=0.01"]
    assert "standard deviation over the seeds" not in page.words


def test_an_evaluation_has_a_table_of_its_sets_and_no_training_checks(tmp_path: Path) -> None:
    config = RunConfig(mode=Mode.eval)
    (tmp_path / "config").mkdir()
    OmegaConf.save(OmegaConf.structured(config), tmp_path / "config/config.yaml")
    sets = {
        "easy": {"accuracy": 0.9, "accuracy_stderr": 0.03, "prompts": 100, "pass@2": 0.95, "length_mean": 4.0},
        "hard": {"accuracy": 0.1, "accuracy_stderr": 0.05, "prompts": 40, "pass@2": 0.2, "length_mean": 9.5},
    }
    with RunFolderRecorder(config, tmp_path) as recorder:
        recorder.log_eval(20, sets, [group(0, [0.0, 1.0])], lambda ids: "1+1=")
    page = Page(tmp_path / "report.html")
    assert "finished evaluation · 0 s" in page.words
    assert "set prompts accuracy pass@2 tokens truncated" in page.words
    assert "easy 100 90.0% ± 3.0% 95.0% 4.0 — hard 40 10.0% ± 5.0% 20.0% 9.5 —" in page.words
    assert "Where does the time go? Generation" not in page.words
    assert "checks" not in page.words
    assert page.data["charts"] == []
    (samples,) = page.data["runs"][0]["samples"]
    assert (samples["step"], [row["reward"] for row in samples["rows"]]) == (20, [0.0, 1.0])


def test_shares_of_time_are_shares_of_the_sums(tmp_path: Path) -> None:
    """The medians of these phases are 1 s of a median step of 5 s, though a step does nothing else."""
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        for step, (generate, train) in enumerate([(1.0, 4.0), (1.0, 4.0), (9.0, 1.0), (9.0, 1.0), (1.0, 4.0)], 1):
            times = {"time/step": generate + train, "time/generate": generate, "time/train": train}
            recorder.log(step, {"reward/mean": 0.0, **times})
    run = report_data.read_run(tmp_path)
    assert "The mean step takes 7.00 s: generate 60%, train 40%, other 0%." in time_check(run).explanation


def test_warnings_about_the_inputs_are_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is read before the run's folder exists."""
    sentence = "9 of the 10 questions of evaluation set mine are also in the training set"
    counts = RowCounts({"mine": 47}, {"mine": 10}, [], 0, {})
    inputs: Any = SimpleNamespace(prompts=SimpleNamespace(counts=counts), warnings=(sentence,))

    def stop(*_: object, **__: object) -> None:
        raise RunError("nothing else is started in this test")

    monkeypatch.setattr("app.start.session.Scorer", stop)

    async def start(recorder: RunFolderRecorder) -> None:
        async with session.start_rollout_workers(RunConfig(), device_of(DeviceKind.cuda), tmp_path, inputs, recorder):
            pass

    with pytest.raises(RunError), RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        asyncio.run(start(recorder))
    words = Page(tmp_path / "report.html").words
    assert f"step 0 {sentence}" in words
    assert "47 training rows · 10 evaluation rows" in words

    # A resumed run warns again.
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        recorder.warn(sentence)
    assert Page(tmp_path / "report.html").words.count(sentence) == 1


def test_records_that_were_set_aside_are_no_run_of_their_own_unless_named(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    for folder in (run, run / "aside_1"):
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert report_data.find_runs(tmp_path) == [run]
    assert report_data.find_runs(run / "aside_1") == [run / "aside_1"]


def test_problems_are_named(tmp_path: Path) -> None:
    def change(step: int, metrics: dict[str, float]) -> dict[str, float]:
        problem = {"mismatch/kl": 0.5, "reward/accuracy": 0.1, "reward/zero_std_fraction": 1.0, "grad_norm": 1.0}
        return {**metrics, **problem} if step > 10 else metrics

    folder = run_folder(tmp_path / "run", change=change)
    run = report_data.read_run(folder)
    problems = [check.question for check in rule_checks(run) if check.tone is Tone.warning]
    assert problems == ["no reward variance", "mismatch"]
    assert rules_check(run).explanation == "Unusual: no reward variance, mismatch; 2 warnings."
    words = Page(folder / "report.html").words
    assert "step 11 The log-probabilities of engine and trainer differ: mismatch/kl is 0.5" in words
    assert "step 13 In 100% of the groups all completions have the same reward" in words


@pytest.mark.parametrize(
    ("flat", "accuracy", "unusual"),
    [
        ([1.0] * 12, [1.0] * 12, ["no reward variance"]),  # a constant reward of 1
        ([0.2] * 6 + [1.0] * 6, [0.3] * 6 + [1.0] * 6, []),  # it has learned
        ([1.0] * 6 + [0.2] * 6, [0.3] * 12, []),  # over by the end
    ],
)
def test_screen_alarms_and_report_agree_on_health(
    flat: list[float],
    accuracy: list[float],
    unusual: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RunFolderRecorder(RunConfig(steps=12), tmp_path) as recorder:
        for step, (fraction, right) in enumerate(zip(flat, accuracy, strict=True), start=1):
            recorder.log(step, {"reward/zero_std_fraction": fraction, "reward/accuracy": right, "reward/mean": right})
    run = report_data.read_run(tmp_path)
    checks = {check.question: check for check in rule_checks(run)}
    raised = (tmp_path / "logs/warnings.jsonl").exists()
    assert [name for name, check in checks.items() if check.tone is Tone.warning] == unusual
    assert raised == (bool(unusual) or checks["no reward variance"].over)
    assert rules_check(run).tone is (Tone.warning if unusual else Tone.good)
    assert ("\n  health " in capsys.readouterr().out) == bool(unusual)


def test_what_may_be_meant_is_shown_and_is_not_unhealthy(tmp_path: Path) -> None:
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        recorder.log(1, {"grad_norm/max": 250.0})
    run = report_data.read_run(tmp_path)
    assert [check.tone for check in rule_checks(run)] == [Tone.plain]
    assert rules_check(run).tone is Tone.good


def test_every_metric_has_a_chart_in_its_section(tmp_path: Path) -> None:
    phases = [f"sync/{phase}_seconds" for phase in SYNC_PHASES]
    names = [*phases, "lora/norm", "lora/loaded_adapters", "reward/pass@2", "memory/engine_rss_mib", "own/thing"]
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        recorder.log(1, {"reward/mean": 0.0, "time/step": 1.0, "eval/prompts": 3.0, **dict.fromkeys(names, 0.5)})
    shown = {chart.metrics: chart for chart in charts([report_data.read_run(tmp_path)])}
    assert (shown[tuple(phases)].section, shown[tuple(phases)].kind) == ("sync", "stack")
    assert {metrics[0]: (chart.section, chart.labels[0]) for metrics, chart in shown.items() if len(metrics) == 1} == {
        "reward/mean": ("learning", "mean"),
        "lora/norm": ("health", "of what they add to the weights"),
        "lora/loaded_adapters": ("sync", "on the engine with the most"),
        "reward/pass@2": ("learning", "pass@2"),
        "memory/engine_rss_mib": ("speed", "engine rss"),
        "own/thing": ("more", "own/thing"),
    }


def test_a_failed_run_and_an_empty_folder_have_a_report_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunFolderRecorder(RunConfig(), tmp_path / "failed"):
        raise RuntimeError("engine <0> died")
    words = Page(tmp_path / "failed/report.html").words
    assert "failed" in words
    assert "RuntimeError: engine <0> died" in words
    (tmp_path / "empty").mkdir()
    assert "Too early" in Page(write_report(tmp_path / "empty", tmp_path / "empty/report.html")).words


def test_a_report_that_cannot_be_written_is_a_warning_and_the_run_stays_finished(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        recorder.log(1, metrics(1))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert "report.html could not be written" in (tmp_path / "logs/warnings.jsonl").read_text()


def test_the_curves_of_long_runs_are_thinned() -> None:
    rows = [{"step": step, "lr": float(step)} for step in range(1, 5001)]
    steps, series = report_data.curves(rows)
    assert len(steps) == 556
    assert (steps[0], steps[-1]) == (9, 5000)
    assert (series["lr"][0], series["lr"][-1]) == (5.0, 4998.0)


@pytest.mark.parametrize(
    ("accuracy", "answer"),
    [
        ([0.3, 0.9], "Yes"),
        ([0.3, 0.9, 0.4], "Yes, then it declined"),
        ([0.5, 0.51], "Not visibly"),
        ([0.5, 0.3], "No, it got worse"),
    ],
)
def test_learning_is_judged_by_the_held_out_accuracy(tmp_path: Path, accuracy: list[float], answer: str) -> None:
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        for step, value in enumerate(accuracy):
            recorder.log_eval(step, {"eval": {"accuracy": value}})
    assert learning_check(report_data.read_run(tmp_path)).answer == answer


def test_without_an_evaluation_learning_is_judged_by_the_reward_and_phase_overlap_is_mentioned(tmp_path: Path) -> None:
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        for step in range(1, 11):
            times = {"time/step": 1.0, "time/generate": 0.9, "time/train": 0.8, "time/sync": 0.01}
            recorder.log(step, {"reward/mean": step / 10, **times})
    run = report_data.read_run(tmp_path)
    assert learning_check(run).answer == "Yes"
    assert "Reward went from 0.15 (first fifth) to 0.95 (last fifth)" in learning_check(run).explanation
    assert "generate 90%, train 80%, sync 1%, other 0% (phases overlap)" in time_check(run).explanation


@pytest.mark.parametrize(("losses", "answer"), [([2.0, 1.5, 1.2, 1.0, 0.9], "Yes"), ([1.0] * 5, "Not visibly")])
def test_a_supervised_run_is_judged_by_its_cross_entropy_and_named_so(
    losses: list[float], answer: str, tmp_path: Path
) -> None:
    config = composed("mode=sft", "eval.every=0")
    with RunFolderRecorder(config, tmp_path) as recorder:
        for step, loss in enumerate(losses, start=1):
            recorder.log(step, {"loss/ce": loss, "time/step": 1.0})
    (tmp_path / "config").mkdir()
    OmegaConf.save(OmegaConf.structured(config), tmp_path / "config/config.yaml")
    run = report_data.read_run(tmp_path)
    assert learning_check(run).answer == answer
    assert run.label.split(" · ")[1] == "sft"


def test_learning_is_judged_by_all_evaluations_of_a_long_run(tmp_path: Path) -> None:
    """Its curves are averages over steps."""
    with RunFolderRecorder(RunConfig(), tmp_path) as recorder:
        for step in range(1, 2001):
            recorder.log(step, {"reward/mean": 0.0})
            recorder.log_eval(step, {"eval": {"accuracy": 0.9 if step == 1000 else 0.2 + 0.0001 * step}})
    check = learning_check(report_data.read_run(tmp_path))
    assert check.explanation.startswith("Held-out accuracy went from 20.0% to 40.0% (best 90.0%)")
