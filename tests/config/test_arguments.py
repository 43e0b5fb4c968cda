"""Arguments in another program's style, and shell completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.config.arguments import check_arguments, named_values
from app.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "steps=3 mode=plan",
        "-m seed=0,1",
        "--multirun seed=0,1",
        "--config-dir myconf model=mine",
        "--config-dir=myconf -cp=conf model=mine",
        "model=tiny --cfg job",
        "-c job --resolve",
        "-cjob",
        "~reward.components.exact +reward.args.x=1",
        "-sc query=bash",
        "--info defaults",
        "--help",
    ],
)
def test_options_of_hydra_and_overrides_are_accepted(line: str) -> None:
    check_arguments(line.split())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--steps=5", "--steps=5 is not accepted: write steps=5."),
        ("seed=1 --model x", "--model x is not accepted: write model=x."),
        ("steps 5", "steps 5 is not accepted: write steps=5."),
        ("--cfg job --trainer.lr 1e-5", "--trainer.lr 1e-5 is not accepted: write trainer.lr=1e-5."),
        ("--wandb steps=5", "--wandb is not accepted: write wandb=<value>."),
    ],
)
def test_another_style_is_answered_with_what_to_write(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_arguments(line.split())
    assert str(refused.value) == sentence


def test_named_values_complete() -> None:
    assert named_values("posttrain mode=") == [
        "mode=train",
        "mode=eval",
        "mode=plan",
        "mode=doctor",
        "mode=parity",
        "mode=export",
        "mode=report",
    ]
    assert named_values("posttrain steps=3 placement.in_flight=re") == ["placement.in_flight=retract"]
    assert (
        named_values("posttrain mode=eval ") == named_values("posttrain steps=") == named_values("posttrain mo") == []
    )


COMPLETE = """
eval "$(posttrain -sc install=bash)"
for COMP_LINE in "posttrain mode=p" "posttrain model=ti" "posttrain placement.max_st"; do
  COMP_POINT=${#COMP_LINE} COMP_CWORD=1
  hydra_bash_completion
  echo "${COMPREPLY[@]}"
done
complete -p posttrain | grep -o -e "-F .*"
"""


def test_bash_completes_the_installed_command(tmp_path: Path) -> None:
    (tmp_path / "posttrain").write_text(f"#!{sys.executable}\nfrom app.main import cli\ncli()\n")
    (tmp_path / "posttrain").chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", COMPLETE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        "mode=plan mode=parity",
        "model=tiny model=tiny_qwen35",
        "placement.max_staleness=",
        "-F hydra_bash_completion posttrain",
    ], done.stderr


@pytest.mark.parametrize(
    ("argv0", "name"), [("/opt/venv/bin/posttrain", "posttrain"), ("app/__main__.py", "python -m app")]
)
def test_the_help_calls_the_command_what_it_was_called(argv0: str, name: str) -> None:
    code = f"import sys; sys.argv = [{argv0!r}, '--help']; from app.main import cli; cli()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"{name}: RL post-training")
    assert f"\n    {name} device=npu placement=fully_async model=qwen35_9b\n" in done.stdout
    other = {"posttrain": "python -m app", "python -m app": "posttrain"}[name]
    assert f"    {other}" not in done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [("app mode=p", "mode=plan\nmode=parity\n"), ("app model=ti", "model=tiny model=tiny_qwen35\n")],
)
def test_the_command_answers_the_shell(line: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app", "-sc", "query=bash"],
        env={**os.environ, "COMP_LINE": line},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == (expected, "")
