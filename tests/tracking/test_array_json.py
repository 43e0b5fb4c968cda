"""JSON of arrays is what `json` makes of them number by number."""

import json

import numpy as np
import pytest

from app.tracking.run_folder import array_json

LOGPROBS = [-0.1234567, 0.0, -12.5, -9.9999996, 3.25, -1e-7, 4e-7, -123456.789, 1e-6]


def test_logprobs_are_the_rounded_numbers_of_a_plain_loop() -> None:
    random = np.random.default_rng(0)
    logprobs = np.concatenate([LOGPROBS, -random.exponential(3, 4000)]).astype(np.float32)
    read = json.loads(array_json.dumps(logprobs))
    assert read == np.round(logprobs.astype(np.float64), 6).tolist()
    for value, exact in zip(read, logprobs.tolist(), strict=True):
        assert abs(value - exact) <= 0.5001e-6


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tokens_are_the_numbers_of_a_plain_loop(dtype: type) -> None:
    tokens = np.array([0, 7, 151935, 10, 99, 100, -3, 2**31 - 1], dtype=dtype)
    assert json.loads(array_json.dumps(tokens)) == [int(token) for token in tokens]


@pytest.mark.parametrize("values", [[float("nan"), -0.5], [float("-inf"), 1.0], [-3e12, 0.25]])
def test_numbers_that_are_not_finite_or_huge_are_written_as_json_does(values: list[float]) -> None:
    assert array_json.dumps(np.array(values)) == json.dumps(values)


def test_a_row_reads_back_as_the_lists_that_dashboards_get() -> None:
    row = {
        "text": 'é "quoted"\n',
        "reward": None,
        "empty": np.array([], dtype=np.int32),
        "strands": [{"tokens": np.arange(3), "logprobs": np.array([-0.25, -1.5])}],
    }
    text = array_json.dumps(row)
    assert json.loads(text) == array_json.plain(row)
    assert array_json.plain(row)["strands"] == [{"tokens": [0, 1, 2], "logprobs": [-0.25, -1.5]}]
    assert "é" in text
