"""A start that fails, or waits for a placement group that is ready, counts as one."""

from typing import Any

from tests.bench.starts import measured


def test_failures_and_waits_for_a_ready_group_are_counted() -> None:
    starts: list[dict[str, Any]] = [
        {"exit_code": 0, "seconds": 10.0, "ready_s": 0.01, "reserved_s": 0.02},
        {"exit_code": 0, "seconds": 22.0, "ready_s": 0.01, "reserved_s": 10.26},
        {"exit_code": 0, "seconds": 12.0, "ready_s": 8.0, "reserved_s": 8.1},  # of a slow machine
        {"exit_code": 1, "output": ["the run needs 1 CPU"]},
    ]
    found = measured(starts)
    assert (found["starts"], found["failed"], found["waited_for_ready_group"]) == (4, 1, 1)
    assert found["seconds"] == {"median": 12.0, "min": 10.0, "max": 22.0}
    assert found["wait_for_ready_group_s"] == {"median": 0.1, "min": 0.01, "max": 10.25}
    assert measured(starts[3:])["seconds"] is None
