"""Collectives of values that each rank computed for some samples."""

import pytest

from app.trainer import reductions


def test_ranks_without_any_sample_gather_nothing_and_need_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "_single_rank", lambda: False)
    assert reductions.all_gather_logprobs({}, []) == {}
