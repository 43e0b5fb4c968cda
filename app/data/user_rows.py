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
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from app.data.records import Record, Records
from app.errors import ConfigError
from app.utils.user_code import error_text, require

KEY = "data._target_"
ACCEPTED = "a function that takes data.args and returns or yields dictionaries"
MAX_ROWS = 5_000_000  # a function that never ends would fill the memory


def read(target: str, args: Mapping[str, Any]) -> Records:
    """Call the function at `target` and read its rows. Raises `ConfigError` if it fails, never ends or has no rows."""

    def refusal(reason: str) -> ConfigError:
        return ConfigError(KEY, target, ACCEPTED, reason)

    def takes_args(function: Any) -> None:
        inspect.signature(function).bind(**args)

    function = require(KEY, target, ACCEPTED, takes_args)
    try:
        rows = function(**args)
        if not isinstance(rows, Iterable) or isinstance(rows, Mapping | str):
            raise refusal(f"it returned a {type(rows).__name__}")

        padded = hasattr(rows, "features")  # a data set of `datasets`, which keeps Arrow tables
        for number, row in enumerate(islice(rows, MAX_ROWS + 1), start=1):
            if number > MAX_ROWS:
                raise refusal(f"it yielded more than {MAX_ROWS:,} rows")

            good = isinstance(row, Mapping)
            content = dict(row) if good else refusal(f"row {number} is a {type(row).__name__}")
            yield Record(target, number, content, padded=good and padded)
    except ConfigError:
        raise
    except Exception as error:  # the function can raise anything
        raise refusal(error_text(error)) from error
