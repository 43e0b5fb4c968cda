"""Arguments in another program's style, and shell completion."""

import os
import shlex
import subprocess
import sys
from enum import Enum
from importlib.metadata import version
from pathlib import Path

import hydra
import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from app.config.arguments import check_arguments
from app.config.command_line import command_name, override
from app.config.foreign_names import answer, table
from app.config.run import RunConfig
from app.config.setting import settings
from tests.refusals import refused
from tests.warm import run_warm

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
        "~reward.components.exact +reward.args.x=1",
        "algorithm=grpo,dapo experiment=tiny_tools ~experiment data=qwen3.5_rows",
        "-sc query=bash",
        "--info defaults",
        "--help",
        "--help trainer",
        "trainer --help model=tiny",
    ],
)
def test_options_of_hydra_and_overrides_are_accepted(line: str) -> None:
    arranged = check_arguments(line.split())
    parsed = get_args_parser().parse_args(arranged)
    assert parsed.overrides == [word for word in arranged if not word.startswith("-") and ("=" in word or "~" in word)]


@pytest.mark.parametrize(
    ("line", "arranged"),
    [
        ("steps=3 --config-dir X experiment=mine", "steps=3 experiment=mine --config-dir X"),
        ("steps=3 mode=plan -m seed=0,1", "steps=3 mode=plan seed=0,1 --multirun"),
        ("algorithm=grpo --cfg job algorithm.kl=k3", "algorithm=grpo algorithm.kl=k3 --cfg job"),
        ("-c=job steps=3 -cp=conf", "steps=3 --cfg job --config-path conf"),
        ("--info steps=3", "steps=3 --info"),
    ],
)
def test_options_stand_behind_the_settings(line: str, arranged: str) -> None:
    assert check_arguments(line.split()) == arranged.split()


@pytest.mark.parametrize(
    ("line", "key", "answer"),
    [
        ("--steps=5", "--steps=5", "steps=5"),
        ("steps 5", "steps", "steps=5"),
        ("seed=1 --model x", "--model", "model=x"),
        ("--wandb steps=5", "--wandb", "tracking=wandb"),
        ("--learning_rate 1e-5", "--learning_rate", "trainer.lr=1e-5"),
        ("train", "train", "mode=train"),
        ("-help", "-help", "--help"),
        ("steps:3", "steps:3", "steps=3"),
        ("--cfg jobs", "--cfg", "job, hydra, all"),
        ("--cfg", "--cfg", "job, hydra, all"),
        ("--config-dir -m", "--config-dir", "a value"),
        ("algorithm=[grpo,dapo]", "algorithm", "-m"),
        ("~steps", "~steps", "steps=<value>"),
        ("tracking.use=[wandb", "tracking.use", ""),
        ("steps==3", "steps", ""),
        ("steps=int(x)", "steps", ""),
        ("resume=one\ntwo", "resume", ""),
    ],
)
def test_another_style_is_refused_with_what_to_write(line: str, key: str, answer: str) -> None:
    with refused(key, None, answer):
        check_arguments(line.split(" "))


@pytest.mark.parametrize("text", ["####", "one\ntwo", "The answer is: [", "a=b#c", "\\boxed{"])
def test_the_text_of_a_setting_needs_no_quotes_of_hydra(text: str) -> None:
    (word,) = check_arguments([f"data.answer_after={text}"])
    assert OverridesParser.create().parse_override(word).value() == text


@pytest.mark.parametrize("key", ["model.path", "data.path", "resume", "hydra.run.dir"])
@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("/模型/Qwen3-4B", "/模型/Qwen3-4B"),
        ("données/rows_*.jsonl", "données/rows_*.jsonl"),
        ("[données/a.jsonl,b.jsonl]", ["données/a.jsonl", "b.jsonl"]),
        ("{mine: /数据/a.jsonl}", {"mine": "/数据/a.jsonl"}),
        ('"/my 数据/a.jsonl"', "/my 数据/a.jsonl"),
    ],
)
def test_a_value_may_have_letters_beyond_ascii(key: str, typed: str, value: object) -> None:
    (accepted,) = check_arguments([f"{key}={typed}"])
    parsed = OverridesParser.create().parse_override(accepted)
    assert (parsed.get_key_element(), parsed.value()) == (key, value)


def test_a_command_in_a_message_can_be_copied_with_letters_beyond_ascii() -> None:
    (word,) = shlex.split(override("resume", "/data/输出/run"))
    assert OverridesParser.create().parse_override(word).value() == "/data/输出/run"


@pytest.mark.parametrize(
    ("key", "value", "start"),
    [
        ("actor_rollout_ref.rollout.name", "vllm", "there is no vLLM backend"),
        ("actor_rollout_ref.actor.clip_ratio", "0.3", "write algorithm.clip_low=0.3 algorithm.clip_high=0.3"),
        ("generation_batch_size", "64", "write algorithm.prompts_per_step=<64/algorithm.group_size>"),
        ("scale_rewards", "group", "write algorithm.normalize_by_std=true"),
        (
            "actor_rollout_ref.actor.loss_agg_mode",
            "seq-mean-token-mean",
            "write algorithm.aggregation=seq_mean_token_mean",
        ),
        ("eval_strategy", "no", "write eval.every=0"),
        ("max_steps", "<value>", "write steps=<value/algorithm.updates_per_step>"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "true", "an environment plays the turns"),
    ],
)
def test_an_answer_repeats_the_value_only_where_it_means_the_same(key: str, value: str, start: str) -> None:
    assert (answer(key, value) or "").startswith(start)


def test_every_foreign_choice_is_of_a_group_or_a_setting_and_is_no_choice_of_ours() -> None:
    named = {each.key: type(each.default) for each in settings(RunConfig) if isinstance(each.default, Enum)}
    for choice in table()["choices"]:
        key, _, name = choice.partition("=")
        assert (ROOT / "conf" / key).is_dir() or name not in named[key].__members__
        assert not (ROOT / "conf" / key / f"{name}.yaml").exists()


def test_an_unknown_key_of_ones_own_preset_is_answered_as_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text("defaults: [grpo, _self_]\nclip_hi: 0.3\n")
    ended = run_warm("--config-dir", str(tmp_path), "algorithm=mine", "--cfg", "job")
    assert ended.returncode == 2
    assert "algorithm/mine" in ended.stderr
    assert "algorithm.clip_high" in ended.stderr


COMPLETE = """
eval "$(posttrain -sc install=bash)"
for COMP_LINE in "posttrain model=ti" "posttrain placement.max_st"; do
  COMP_POINT=${#COMP_LINE} COMP_CWORD=1
  hydra_bash_completion
  echo "${COMPREPLY[@]}"
done
complete -p posttrain | grep -o -e "-F .*"
"""


def test_bash_completes_the_installed_command(tmp_path: Path) -> None:
    # pip's form of a script whose interpreter has a space in its path: a shell runs it first
    start = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"
    (tmp_path / "posttrain").write_text(f"{start}from app.main import cli\ncli()\n")
    (tmp_path / "posttrain").chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", COMPLETE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        "model=tiny model=tiny_lora model=tiny_qwen35 model=tiny_tools",
        "placement.max_staleness=",
        "-F hydra_bash_completion posttrain",
    ], done.stderr


def test_the_command_answers_the_shell_and_its_version() -> None:
    answered = run_warm("-sc", "query=bash", environment={**os.environ, "COMP_LINE": "app environment=s"})
    assert (answered.stdout, answered.stderr) == ("environment=single_turn\n", "")
    shown = run_warm("--version").stdout
    assert shown == f"hydra-posttrain {version('hydra-posttrain')}, Hydra {hydra.__version__}\n"


def test_messages_call_the_command_what_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for called, name in (("/opt/venv/bin/posttrain", "posttrain"), ("app/__main__.py", "python -m app")):
        monkeypatch.setattr(sys, "argv", [called, "--help"])
        assert command_name() == name
