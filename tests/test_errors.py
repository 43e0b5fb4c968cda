"""The sentence of a refused value."""

from pathlib import Path

import pytest

from app.config.placement import Stream
from app.errors import ConfigError, expect, yaml_text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (0.5, "0.5"),
        ("True", "True"),
        (Stream.off, "off"),
        (Path("/runs/mine"), "/runs/mine"),
        ([True, None, "a"], "[true, null, a]"),
        ({"strict": False, "sizes": [1, {"deep": True}]}, "{strict: false, sizes: [1, {deep: true}]}"),
        ([], "[]"),
        ({}, "{}"),
    ],
)
def test_a_refused_value_is_shown_as_it_is_written_in_yaml(value: object, shown: str) -> None:
    assert yaml_text(value) == shown
    with pytest.raises(ConfigError) as caught:
        expect(False, "some.key", value, "another one")
    assert str(caught.value) == f"some.key={shown} is not accepted: give another one."
