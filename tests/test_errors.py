"""The sentence of a refused value."""

import json
import pickle
from pathlib import Path

import pytest

from app.config.placement import Stream
from app.errors import ConfigError, expect, yaml_text
from tests.refusals import refused


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        ("True", "True"),
        (Stream.off, "off"),
        (Path("/runs/mine"), "/runs/mine"),
        ([True, None, "a"], "[true, null, a]"),
        ({"strict": False, "sizes": [1, {"deep": True}]}, "{strict: false, sizes: [1, {deep: true}]}"),
    ],
)
def test_a_refused_value_is_shown_as_it_is_written_in_yaml(value: object, shown: str) -> None:
    assert yaml_text(value) == shown
    with refused("some.key", value, f"some.key={shown} "):
        expect(False, "some.key", value, "another one")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConfigError("steps", 0, "at least 1"), "steps=0 is not accepted: give at least 1."),
        (
            ConfigError("rollout.port", 1, "a free one", "1 is in use"),
            "rollout.port=1 is not accepted: give a free one; 1 is in use.",
        ),
        (ConfigError("--steps", "", reason="write steps=<value>"), "--steps is not accepted: write steps=<value>."),
        (
            ConfigError("data", "", "rows", "it ended with a period."),
            "data is not accepted: give rows; it ended with a period.",
        ),
        (ConfigError("", "", reason="an environment's own sentence."), "an environment's own sentence."),
    ],
)
def test_the_fields_of_an_error_make_its_sentence_also_in_another_process(error: ConfigError, sentence: str) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert str(error) == str(copy) == sentence
    assert vars(copy) == vars(error)
    assert str(ConfigError(*json.loads(json.dumps(error.args)))) == sentence
