"""Flags of SGLang's server: those that it has, and those with which training would be wrong."""

import argparse
from pathlib import Path

import pytest

from app.config.engine_flags import REFUSED, check_engine_flags, known_flags
from app.rollout.engine.server import Server
from tests.refusals import refused
from tests.rollout.support import server_spec

KEY = "rollout.engine_args"


def test_the_flags_read_from_its_source_are_those_of_sglangs_own_parser() -> None:
    from app.device.torchvision_shim import define_operators

    define_operators()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    flags = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    assert len(flags) > 300
    assert known_flags() == {flag.removeprefix("--") for flag in flags}


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("flag", ["model-path", "tp-size", "tensor-parallel-size", "host", "port", "api-key"])
def test_a_flag_that_a_setting_decides_is_refused(flag: str, scores: bool) -> None:
    """A server on another port would be waited for until its deadline."""
    with refused(f"{KEY}.{flag}", 5, "null: "):
        check_engine_flags(KEY, {flag: 5}, scores=scores)


def test_flags_that_are_off_or_right_are_accepted() -> None:
    flags = dict.fromkeys(REFUSED) | {"chunked-prefill-size": "8192", "sleep-on-idle": False}
    check_engine_flags(KEY, flags | {"speculative-num-steps": 2})


@pytest.mark.parametrize("program", ["launcher.py", "sglang serve"])
def test_of_a_usage_only_the_line_with_the_error_is_shown(program: str, tmp_path: Path) -> None:
    spec = server_spec(tmp_path, tmp_path, name="engine 0")
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    usage = f"usage: {program} [-h]\n" + "    [--some-flag SOME_FLAG]\n" * 20
    spec.log.write_text(f"{usage}{program}: error: unrecognized arguments: --not-a-flag 1\n")
    assert Server(spec).tail().split("\n") == [f"  | {program}: error: unrecognized arguments: --not-a-flag 1"]
    spec.log.write_text("a\nValueError: no error: b\nc\n")
    assert len(Server(spec).tail().split("\n")) == 3
