"""A rank trains on what the driver sent: nothing that a step reads is lost on the way, and texts stay behind."""

import pickle
from dataclasses import replace

import pytest

from app.trainer.microbatch import Sample, make_samples
from app.trainer.remote import slim
from app.types import ScoredGroup
from tests.trainer.support import scored_groups, with_each
from tests.trainer.test_sequences import episodes

GROUPS = {"single turns": scored_groups(5), "episodes": episodes(5)}


def sent(groups: list[ScoredGroup]) -> tuple[list[ScoredGroup], bytes, list[pickle.PickleBuffer]]:
    """What a rank gets, and what travels: the pickle and the arrays beside it."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(slim(groups), protocol=5, buffer_callback=arrays.append)
    return pickle.loads(data, buffers=arrays), data, arrays


def numbers(sample: Sample) -> list[object]:
    sequence = sample.sequence
    arrays = (sequence.token_ids, sequence.sampled, sequence.logprobs, sequence.versions)
    rest = (sample.advantage, sample.weight, sample.key, sample.trajectory_tokens)
    return [*((array.dtype, array.tolist()) for array in arrays), *rest]


@pytest.mark.parametrize("name", GROUPS)
def test_a_rank_makes_the_samples_that_the_driver_would_make(name: str) -> None:
    groups = GROUPS[name]
    received, _, _ = sent(groups)
    for mask_truncated in (False, True):
        wanted = make_samples(groups, mask_truncated=mask_truncated)
        made = make_samples(received, mask_truncated=mask_truncated)
        assert list(map(numbers, made)) == list(map(numbers, wanted))
        assert len(made) >= 5


def test_texts_stay_behind_and_arrays_travel_beside_the_pickle() -> None:
    given, text = scored_groups(1, size=8, shortest=12), "a completion of many words"
    worded = with_each(given, lambda each: replace(each, text=text))
    (arrived,), data, arrays = sent(worded)
    assert text.encode() not in data
    assert [each.text for each in arrived.group.trajectories] == [""] * 8
    assert len(arrays) == 1 + 1 + 2 * 8  # the prompt once, the advantages, tokens and log-probabilities
    assert sum(buffer.raw().nbytes for buffer in arrays) >= 8 * 12 * 8
