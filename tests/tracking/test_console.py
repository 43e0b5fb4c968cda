import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config import Mode, RunConfig
from app.config.checkpoint import CheckpointConfig
from app.tracking.console import RunConsole, step_line
from app.tracking.run_folder.summary import Summary
from tests.tracking.records import metrics


def lines(draw: Callable[[RunConsole], None], steps: int = 60) -> list[str]:
    stream = io.StringIO()
    draw(RunConsole(RunConfig(steps=steps), Path("out/run"), stream))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "keeps checkpoints/ (the last step; the best evaluation) and export/ (the trained model)"),
        (
            {"every": 50, "keep_best": False, "export": False},
            "keeps checkpoints/ (every 50 steps and the last, the newest 2 of them)",
        ),
        ({"keep": 0}, "keeps export/ (the trained model)"),
        ({"keep": 0, "export": False}, "keeps no model: checkpoint.keep=0, checkpoint.export=false"),
    ],
)
def test_the_header_says_what_the_run_will_keep(settings: dict[str, Any], line: str) -> None:
    config = RunConfig(checkpoint=CheckpointConfig(**settings))
    stream = io.StringIO()
    RunConsole(config, Path("out/run"), stream)
    assert stream.getvalue().splitlines() == [
        "",
        "custom · grpo · colocate · cpu",
        "60 steps of 32 prompts × 8 completions, 1 update each · 1 trainer rank, 1 engine",
        "out/run",
        line,
        "",
    ]


def test_a_step_is_one_plain_line_without_a_terminal() -> None:
    line = lines(lambda console: console.step(3, metrics(3)))[-1]
    assert line == (
        " step  3/60   reward  0.300   accuracy  30.0%     1.23k tok/s    1.00 s"
        "    generate 0.60 s  train 0.30 s  sync 0.05 s"
    )


def test_every_tenth_plain_line_has_the_time_left_by_the_median_of_the_last_steps() -> None:
    seconds = {step: 9.0 if step % 20 == 5 else 0.5 for step in range(1, 61)}

    def draw(console: RunConsole) -> None:
        for step, value in seconds.items():
            console.step(step, {"time/step": value})

    found = [re.search(r"step +(\d+)/60.* about (.+) left$", line) for line in lines(draw)]
    estimates = {int(each[1]): each[2] for each in found if each}
    assert estimates == {10: "25 s", 20: "20 s", 30: "15 s", 40: "10 s", 50: "5 s"}


def test_slow_steps_have_an_estimate_every_two_minutes() -> None:
    def draw(console: RunConsole) -> None:
        for step in range(1, 8):
            console.step(step, {"time/step": 50.0})

    shown = [line.rpartition("   ")[2] for line in lines(draw) if "left" in line]
    assert shown == ["about 47 min 30 s left", "about 45 min 00 s left"]


def test_the_bar_shows_the_phases_in_proportion() -> None:
    text = step_line(3, 60, metrics(3), bar=True)
    cells = {}
    for span in text.spans:
        if set(text.plain[span.start : span.end]) == {"━"}:
            cells[str(span.style)] = span.end - span.start
    assert cells == {"cyan": 7, "magenta": 4, "bright_black": 1}  # of 12: 0.6, 0.3, 0.05 rounds to 0


def test_an_evaluation_shows_the_change_since_the_first() -> None:
    def draw(console: RunConsole) -> None:
        console.log_eval(0, {"eval": {"accuracy": 0.3}})
        console.log_eval(10, {"eval": {"accuracy": 0.85}})
        console.log_eval(10, {"easy": {"accuracy": 0.9}, "hard": {"accuracy": 0.1}})

    assert lines(draw)[-3:] == [
        " eval  0/60   accuracy  30.0%",
        " eval 10/60   accuracy  85.0%   +55.0 points since the first",
        " eval 10/60   easy  90.0%   hard  10.0%",
    ]


def test_the_end_shows_status_totals_and_files() -> None:
    totals = {
        "steps": 60,
        "total/seconds": 102.0,
        "eval/evaluations": 3,
        "eval/accuracy_first": 0.31,
        "eval/accuracy_last": 0.935,
        "eval/accuracy_best": 0.94,
        "eval/accuracy_best_step": 40,
        "eval/prompts": 2,
        "total/completion_tokens": 98_300,
    }
    end = lines(lambda console: console.end("finished", totals, {"report": Path("out/run/report.html")}))
    assert end[-2:] == [
        "finished: 60 steps in 1 min 42 s, eval accuracy 31.0% → 93.5% (best 94.0%) of 2 prompts, 98.3k completion "
        "tokens",
        "  report   out/run/report.html",
    ]
    kept: dict[str, Path | str] = {
        "report": Path("out/run/report.html"),
        "evaluate": "python -m app mode=eval resume=out/run",
    }
    end = lines(lambda console: console.end("finished", totals, kept))
    assert end[-1] == "  evaluate python -m app mode=eval resume=out/run"
    failed = lines(lambda console: console.end("failed", {"steps": 1, "total/seconds": 3.0}, {}))
    assert failed[-1] == "failed: 1 step in 3 s"
    untrained = {**totals, "eval/accuracy_best": 0.99, "eval/accuracy_best_step": 0}
    assert (
        "31.0% → 93.5% (best 99.0% before training)" in lines(lambda console: console.end("failed", untrained, {}))[-1]
    )


@pytest.mark.parametrize(("step", "shown"), [(0, "31.0% before training of 7"), (20, "31.0% of 7")])
def test_one_evaluation_is_shown_as_one_number(step: int, shown: str, tmp_path: Path) -> None:
    run = Summary(tmp_path)
    run.add(step, {"eval/accuracy": 0.31, "eval/prompts": 7})
    totals = {**run.values, "total/seconds": 2.0}
    end = lines(lambda console: console.end("interrupted", totals, {}))[-1]
    assert end == f"interrupted: 0 steps in 2 s, eval accuracy {shown} prompts"


def test_an_evaluation_speaks_of_its_sets_and_not_of_training() -> None:
    sets = {
        "easy": {"accuracy": 0.9, "accuracy_stderr": 0.03, "prompts": 100, "pass@2": 0.95, "length_mean": 4.0},
        "hard": {"accuracy": 0.1, "prompts": 1, "pass@2": 0.2, "length_mean": 9.5, "truncated_fraction": 0.25},
    }
    stream = io.StringIO()
    console = RunConsole(RunConfig(mode=Mode.eval), Path("out/run"), stream)
    console.log_eval(20, sets)
    accuracy = {"eval/accuracy_first": 0.5, "eval/accuracy_last": 0.5, "eval/prompts": 101}
    totals = {"steps": 0, "total/seconds": 42.0, **accuracy}
    console.end("finished", totals, {})
    assert stream.getvalue().splitlines() == [
        "",
        "custom · evaluation · cpu",
        "1 completion per prompt, temperature 0, top_p 1 · 1 engine",
        "out/run",
        "",
        "set   prompts  accuracy      pass@2  tokens  truncated",
        "easy  100      90.0% ± 3.0%  95.0%   4.0     —",
        "hard  1        10.0%         20.0%   9.5     25.0%",
        "",
        "finished: evaluation in 42 s, accuracy 50.0% of 101 prompts",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_progress_bar_with_the_status() -> None:
    stream = Terminal()
    console = RunConsole(RunConfig(steps=2), Path("out/run"), stream)
    console.status("starting the engine")
    console.end("finished", {"steps": 2}, {})
    assert "starting the engine" in stream.getvalue()
    assert "0/2" in stream.getvalue()


def test_forced_colors_make_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks set FORCE_COLOR, and would show every state of the bar as a line of its own."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    console = RunConsole(RunConfig(steps=2), Path("out/run"), stream)
    console.status("starting the engine")
    console.end("finished", {"steps": 2}, {})
    assert "0 s  starting the engine" in stream.getvalue()
    assert "0/2" not in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_without_a_terminal_a_status_is_a_line_with_the_time_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(console: RunConsole) -> None:
        for elapsed in (0.0, 12.4, 754.0):
            monkeypatch.setattr("app.tracking.console.time.monotonic", lambda now=started + elapsed: now)
            console.status("starting Ray")

    started = 1000.0
    monkeypatch.setattr("app.tracking.console.time.monotonic", lambda: started)
    assert lines(draw)[-3:] == [
        "         0 s  starting Ray",
        "        12 s  starting Ray",
        " 12 min 34 s  starting Ray",
    ]


READER_GOES = """
from pathlib import Path
from app.config import RunConfig
from app.tracking.console import RunConsole

console = RunConsole(RunConfig(), Path("run"))
for step in range(1, 5000):
    console.step(step, {"time/step": 1.0})
Path("finished").touch()
"""


def test_a_run_goes_on_when_the_reader_of_its_output_ends(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(READER_GOES)
    command = f"{shlex.quote(sys.executable)} run.py | head -n 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "finished").exists()
