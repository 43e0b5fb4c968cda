"""Flags of SGLang's server: those that it has, and those with which training would be wrong."""

import argparse

import pytest

from app.config.device import DeviceKind
from app.config.engine_flags import check_engine_flags, known_flags
from tests.refusals import refused

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


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("speculative-algorithm", "NGRAM"),
        ("enable-deterministic-inference", True),
        ("rl-on-policy-target", "fsdp"),
        ("quantization", "fp8"),
        ("preferred-sampling-params", "{}"),
        ("dtype", "float16"),
        ("random-seed", 3),
        ("quantizatio", "fp8"),  # an abbreviation, which argparse takes
        ("not-a-flag", 1),
        ("context-length", "bogus"),
        ("context-len", "bogus"),
    ],
)
def test_a_flag_with_which_training_would_be_wrong_or_fail_is_refused(flag: str, value: object) -> None:
    with refused(f"{KEY}.{flag}", value):
        check_engine_flags(KEY, {flag: value}, DeviceKind.cpu)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("flag", ["model-path", "tp-size", "tensor-parallel-size", "host", "port", "api-key"])
def test_a_flag_that_a_setting_decides_is_refused(flag: str, scores: bool) -> None:
    """A server on another port would be waited for until its deadline."""
    with refused(f"{KEY}.{flag}", 5, "null: "):
        check_engine_flags(KEY, {flag: 5}, DeviceKind.cuda, scores=scores)
