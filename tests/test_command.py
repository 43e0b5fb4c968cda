"""`app.run` from a script, from a running event loop, and with what is refused."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import app
from tests.folders import ROOT, a_run
from tests.refusals import refused
from tests.waiting import until

LAZY = """
import sys
import app
app.run, app.ConfigError, app.RunError, app.Interrupted, app.RunResult, app.Trajectory, app.Prompt, app.Completion
print(sorted({"torch", "sglang", "ray", "transformers"} & set(sys.modules)))
"""
# A command that has not ended when its caller is killed, and writes more than a pipe holds when it ends.
CHILD = """
import signal, sys, threading, time
from pathlib import Path
from app.command import _end_with_caller

def save(*_):
    Path({ended!r}).touch()
    print("x" * 200_000)
    sys.exit(130)

signal.signal(signal.SIGTERM, save)
threading.Thread(target=_end_with_caller, daemon=True).start()
Path({ready!r}).touch()
time.sleep(60)
"""
KILLED = """
import signal
import app.command
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background inherits that it is ignored
app.command.module_command = lambda name: [sys.executable, "-P", "-c", CODE]
app.run([])
"""


def test_the_public_names_import_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    assert all(hasattr(app, name) for name in app.__all__)
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        app.no_such  # noqa: B018


def test_a_mode_without_a_folder_returns_and_its_output_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = app.run(["mode=plan", "steps=3"])
    assert result == app.RunResult(folder=None, summary={}, metric=0.0, exit_code=0)
    assert "every trajectory is on-policy" in capsys.readouterr().out


def test_it_runs_inside_a_running_event_loop_and_finds_the_folder(tmp_path: Path) -> None:
    async def cell() -> app.RunResult:
        return app.run(["mode=report", f"hydra.run.dir={folder}"])

    folder = a_run(tmp_path / "run", status="finished", reached=2)
    result = asyncio.run(cell())
    assert (result.folder, result.exit_code) == (folder, 0)
    assert result.summary == {"status": "finished", "steps": 2, "eval/accuracy_last": 0.5}
    assert (folder / "report.html").is_file()


def test_a_finished_run_returns_its_summary(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", "steps=2", status="finished", reached=2)
    result = app.run(["resume=auto", "steps=2", f"hydra.run.dir={folder}"])
    assert (result.folder, result.summary["steps"]) == (folder, 2)


@pytest.mark.parametrize(
    ("arguments", "key", "value", "named"),
    [
        (["steps=0"], "steps", "0", "at least 1"),
        (["--steps=5"], "--steps=5", "", "steps=5"),
        (["sweep=learning_rate"], "--multirun", "", "app.run"),
    ],
)
def test_a_refused_command_is_the_same_config_error(
    arguments: list[str], key: str, value: str, named: str, tmp_path: Path
) -> None:
    with refused(key, value, named):
        app.run([*arguments, f"hydra.run.dir={tmp_path / 'run'}", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_dies_is_a_run_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.command.module_command", lambda name: [sys.executable, "-c", "raise SystemExit(9)"])
    with pytest.raises(app.RunError, match="exit code 9"):
        app.run([])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_command_gets_sigterm_when_its_caller_is_killed_and_is_awaited_on_ctrl_c(
    number: signal.Signals, tmp_path: Path
) -> None:
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    code = f"import sys\nCODE = {CHILD.format(ready=str(ready), ended=str(ended))!r}\n{KILLED}"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        until(ready.exists, 60)
        caller.send_signal(number)
        output, errors = caller.communicate(timeout=60)
    until(ended.exists, 60)
    if number is signal.SIGINT:
        assert errors.endswith("KeyboardInterrupt\n")
        assert output == "x" * 200_000 + "\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_leaves_the_same_folder_as_the_command(tmp_path: Path) -> None:
    settings = ["steps=1", "algorithm.prompts_per_step=2", "algorithm.group_size=2", "eval.every=0"]
    result = app.run([*settings, f"hydra.run.dir={tmp_path / 'function'}"])
    assert result.folder == tmp_path / "function"
    assert (result.summary["status"], result.summary["steps"], result.exit_code) == ("finished", 1, 0)
    assert result.metric == result.summary["eval/accuracy_last"]
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary

    command = [sys.executable, "-m", "app", *settings, f"hydra.run.dir={tmp_path / 'command'}"]
    subprocess.run(command, cwd=ROOT, env=dict(os.environ), check=True, capture_output=True)
    assert _names(tmp_path / "function") == _names(tmp_path / "command")


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
