"""JSON of rows that contain numpy arrays. Long arrays are formatted at once instead of number by number.

`json` takes milliseconds for the log-probabilities of one long completion, on the driver of all engines.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

DECIMALS = 6  # of floats
LARGEST = 1e9  # magnitude that is formatted at once: its millionths are exact in float64
POINT, MINUS, SPACE, COMMA, ZERO = b".- ,0"


def dumps(value: object) -> str:
    """Return the JSON text of nested mappings, lists and arrays [N]. Floats of arrays are rounded to six decimals."""
    match value:
        case np.ndarray():
            return f"[{_numbers(value)}]"
        case Mapping():
            return f"{{{', '.join(f'{json.dumps(name)}: {dumps(each)}' for name, each in value.items())}}}"
        case list():
            return f"[{', '.join(map(dumps, value))}]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> Any:
    """Return the same with lists in place of arrays, floats of arrays rounded as in `dumps`."""
    match value:
        case np.ndarray():
            return _rounded(value).tolist()
        case Mapping():
            return {name: plain(each) for name, each in value.items()}
        case list():
            return [plain(each) for each in value]
        case _:
            return value


def _rounded(array: np.ndarray) -> np.ndarray:
    return array if np.issubdtype(array.dtype, np.integer) else np.round(array.astype(np.float64), DECIMALS)


def _numbers(array: np.ndarray) -> str:
    """Return the numbers, separated by commas."""
    integers = np.issubdtype(array.dtype, np.integer)
    if integers or not len(array) or not (np.abs(array) < LARGEST).all():  # NaN is not below it either
        return json.dumps(plain(array))[1:-1]
    return _fixed_point(np.rint(array.astype(np.float64) * 10**DECIMALS).astype(np.int64))


def _fixed_point(millionths: np.ndarray) -> str:
    """Format [N] integers, as many characters for each, padded with blanks.

    >>> _fixed_point(np.array([-1500000, 250000]))
    '-1.500000,  0.250000'
    """
    magnitude = np.abs(millionths)
    whole = max(len(str(magnitude.max())) - DECIMALS, 1)  # digits before the point

    # A row for each character: sign or blank, digits before the point, point, digits after it, separator.
    rows = np.full((1 + whole + 1 + DECIMALS + 2, len(millionths)), SPACE, dtype=np.uint8)
    blanks = np.zeros(len(millionths), dtype=np.intp)  # leading zeros of each number
    above = np.zeros_like(magnitude)
    for place in range(whole + DECIMALS):
        upto = magnitude // 10 ** (whole + DECIMALS - 1 - place)
        digit = upto - 10 * above + ZERO
        if place < whole - 1:
            leading = upto == 0
            blanks += leading
            digit[leading] = SPACE
        rows[1 + place + (place >= whole)] = digit
        above = upto

    negative = np.flatnonzero(millionths < 0)
    rows[blanks[negative], negative] = MINUS
    rows[1 + whole] = POINT
    rows[-2] = COMMA
    return rows.T.tobytes().decode("ascii").rstrip(", ").lstrip()
