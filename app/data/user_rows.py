'''Rows of a function of your own.

    python -m app data._target_=my_data.puzzles +data.args.limit=500

    # my_data.py, in the working directory or anywhere else on PYTHONPATH
    def puzzles(limit=1000):
        """Yield dictionaries with the fields of data.question and data.answer."""
        for number in range(limit):
            yield {"question": f"Half of {2 * number}?", "answer": number}

The function runs once, when the run starts. Its rows are then like those of a file: a resumed run must get the same.
'''

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from app.data.records import Record, Records
from app.errors import ConfigError, yaml_text
from app.utils.dotted_path import LoadError, error_text, resolve_own

KEY = "data._target_"
MAX_ROWS = 5_000_000  # a function that never ends would fill the memory


def read(target: str, args: Mapping[str, Any]) -> Records:
    """Call the function at the dotted path `target` and read its rows.

    Raises:
        ConfigError: It cannot be imported, raises, never ends, or does not return rows.
    """
    function = _load(target, args)
    try:
        rows = function(**args)
        if not isinstance(rows, Iterable) or isinstance(rows, Mapping | str):
            raise _error(target, f"a function that returns or yields rows; it returned a {type(rows).__name__}")
        yield from _records(target, rows)
    except ConfigError:
        raise
    except Exception as error:  # the function can raise anything
        raise _error(target, f"a function that returns rows; it failed ({error_text(error)})") from error


def _records(target: str, rows: Iterable[Any]) -> Records:
    for number, row in enumerate(islice(rows, MAX_ROWS + 1), start=1):
        if number > MAX_ROWS:
            raise _error(target, f"a function that ends; it yielded more than {MAX_ROWS:,} rows")

        if isinstance(row, Mapping):
            padded = hasattr(rows, "features")  # a data set of `datasets`, which keeps Arrow tables
            yield Record(target, number, dict(row), padded=padded)
        else:
            accepted = f"a function that returns dictionaries; row {number} is a {type(row).__name__}"
            yield Record(target, number, _error(target, accepted))


def _load(target: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the function, and check that it takes the arguments."""
    try:
        function = resolve_own(target)
    except LoadError as error:
        raise _error(target, f"a function that can be imported; {error}") from error

    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise _error(target, f"a function that takes data.args={yaml_text(args)} ({error})") from error
    return function


def _error(target: str, accepted: str) -> ConfigError:
    return ConfigError(KEY, target, accepted)
