"""Ranks wait little for each other: the planner on simulated lengths, by the FLOPs of the presets' models."""

import pytest

from tests.bench.balance import CASES, Case, efficiencies

WHOLE = {8192: (0.985, 0.97), 7168: (0.99, 0.98), 32_768: (0.985, 0.985)}  # cap of the case → at 4 and 8 ranks
STREAMED = 0.94


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_are_busy_in_whole_and_in_streamed_steps(case: Case) -> None:
    for ranks, bound in zip((4, 8), WHOLE[case.cap], strict=True):
        found = efficiencies(case, ranks)
        assert found["whole"] >= bound
        assert found["streamed"] >= STREAMED
