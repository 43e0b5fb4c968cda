"""Expected configuration errors: which setting is refused, by the fields of the error."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.errors import ConfigError, yaml_text


@contextmanager
def refused(key: str, value: object = None, *named: str) -> Iterator[None]:
    """Expect a `ConfigError` of this setting, with this value unless None, whose sentence also names `named`."""
    with pytest.raises(ConfigError) as caught:
        yield
    require(caught.value, key, value, *named)


def require(error: ConfigError, key: str, value: object = None, *named: str) -> None:
    """Assert the fields of an error as `refused` does, and that it is one sentence on one line."""
    assert (error.key, error.value) == (key, error.value if value is None else yaml_text(value))
    sentence = str(error)
    assert error.accepted or error.reason
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    assert [text for text in named if text not in sentence] == [], sentence
