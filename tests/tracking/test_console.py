import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.config import Mode, RunConfig
from app.config.checkpoint import CheckpointConfig
from app.tracking.console import RunConsole
from tests.tracking.records import metrics


def lines(draw: Callable[[RunConsole], None], steps: int = 60) -> list[str]:
    stream = io.StringIO()
    draw(RunConsole(RunConfig(steps=steps), Path("out/run"), stream))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(("keep", "export"), [(2, True), (2, False), (0, True), (0, False)])
def test_the_header_has_the_run_its_folder_and_what_it_will_keep(keep: int, export: bool) -> None:
    stream = io.StringIO()
    RunConsole(RunConfig(checkpoint=CheckpointConfig(keep=keep, export=export)), Path("out/run"), stream)
    _, title, work, folder, kept, _ = stream.getvalue().splitlines()
    assert (title, folder) == ("custom · grpo · colocate · cpu", "out/run")
    assert re.findall(r"\d+", work) == ["60", "32", "8", "1", "1", "1"]
    assert ("checkpoints/" in kept, "export/" in kept) == (keep > 0, export)


def test_a_step_is_one_plain_line_without_a_terminal() -> None:
    line = lines(lambda console: console.step(3, metrics(3)))[-1]
    expected = "step 3/60 reward 0.300 accuracy 30.0% 1.23k tok/s 1.00 s generate 0.60 s train 0.30 s sync 0.05 s"
    assert " ".join(line.split()) == expected


def test_every_tenth_plain_line_has_the_time_left_by_the_median_of_the_last_steps() -> None:
    def draw(console: RunConsole) -> None:
        for step in range(1, 61):
            console.step(step, {"time/step": 9.0 if step % 20 == 5 else 0.5})

    found = [re.search(r"step +(\d+)/60.* about (.+) left$", line) for line in lines(draw)]
    estimates = {int(each[1]): each[2] for each in found if each}
    assert estimates == {10: "25 s", 20: "20 s", 30: "15 s", 40: "10 s", 50: "5 s"}


def test_an_evaluation_shows_the_change_since_the_first() -> None:
    def draw(console: RunConsole) -> None:
        console.log_eval(0, {"eval": {"accuracy": 0.3}})
        console.log_eval(10, {"eval": {"accuracy": 0.85}})
        console.log_eval(10, {"easy": {"accuracy": 0.9}, "hard": {"accuracy": 0.1}})

    first, second, several = lines(draw)[-3:]
    assert first.endswith("30.0%")
    assert re.findall(r"[+\d.]+", second) == ["10", "60", "85.0", "+55.0"]
    assert several.split()[-4:] == ["easy", "90.0%", "hard", "10.0%"]


def test_the_end_shows_status_totals_and_files() -> None:
    totals = {"steps": 60, "total/seconds": 102.0, "eval/evaluations": 3, "total/completion_tokens": 98_300}
    totals |= {"eval/accuracy_first": 0.31, "eval/accuracy_last": 0.935, "eval/accuracy_best": 0.94}
    totals |= {"eval/accuracy_best_step": 40, "eval/prompts": 2}
    end = lines(lambda console: console.end("finished", totals, {"report": Path("out/run/report.html")}))
    assert re.findall(r"[\d.]+", end[-2]) == ["60", "1", "42", "31.0", "93.5", "94.0", "2", "98.3"]
    assert end[-1].split() == ["report", "out/run/report.html"]
    once = lines(lambda console: console.end("finished", totals | {"eval/evaluations": 1}, {}))
    assert ("31.0%" in once[-1], "93.5%" in once[-1]) == (False, True)
    assert lines(lambda console: console.end("failed", {"steps": 1}, {}))[-1] == "failed: 1 step in 0 s"


def test_an_evaluation_has_a_table_of_its_sets_and_nothing_of_training() -> None:
    sets = {
        "easy": {"accuracy": 0.9, "accuracy_stderr": 0.03, "prompts": 100, "pass@2": 0.95, "length_mean": 4.0},
        "hard": {"accuracy": 0.1, "prompts": 1, "pass@2": 0.2, "length_mean": 9.5, "truncated_fraction": 0.25},
    }
    stream = io.StringIO()
    console = RunConsole(RunConfig(mode=Mode.eval), Path("out/run"), stream)
    console.log_eval(20, sets)
    console.end("finished", {"total/seconds": 42.0, "eval/accuracy_last": 0.5, "eval/prompts": 101}, {})
    text = stream.getvalue()
    assert "steps" not in text
    assert [" ".join(line.split()) for line in text.splitlines()[-5:-2]] == [
        "set prompts accuracy pass@2 tokens truncated",
        "easy 100 90.0% ± 3.0% 95.0% 4.0 —",
        "hard 1 10.0% 20.0% 9.5 25.0%",
    ]
    assert text.splitlines()[-1] == "finished: evaluation in 42 s, accuracy 50.0% of 101 prompts"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_progress_bar_and_forced_colors_make_no_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notebooks set FORCE_COLOR, and would show every state of the bar as a line of its own."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Terminal() if terminal else io.StringIO()
    console = RunConsole(RunConfig(steps=2), Path("out/run"), stream)
    console.status("starting the engine")
    console.end("finished", {"steps": 2}, {})
    text = stream.getvalue()
    assert "starting the engine" in text
    assert ("0/2" in text) == terminal
    assert "\x1b[" in text


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
