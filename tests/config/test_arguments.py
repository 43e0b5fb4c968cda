"""Arguments in another program's style, and shell completion."""

import os
import shlex
from importlib.metadata import version

import hydra
import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from app.config.arguments import check_arguments
from app.config.command_line import override
from tests.warm import run_warm


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


def test_the_command_answers_the_shell_and_its_version() -> None:
    answered = run_warm("-sc", "query=bash", environment={**os.environ, "COMP_LINE": "app environment=s"})
    assert (answered.stdout, answered.stderr) == ("environment=single_turn\n", "")
    shown = run_warm("--version").stdout
    assert shown == f"hydra-posttrain {version('hydra-posttrain')}, Hydra {hydra.__version__}\n"


def test_a_command_in_a_message_can_be_copied_with_letters_beyond_ascii() -> None:
    (word,) = shlex.split(override("resume", "/data/输出/run"))
    assert OverridesParser.create().parse_override(word).value() == "/data/输出/run"
