"""How groups travel to the trainer ranks: what `make_samples` reads, as tuples, which pickle in a third of the time.

The driver pickles every group of a run. A rank needs no text, row, score or reward, so they stay behind.
Arrays travel out of band, without a copy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.types import (
    Completion,
    Ending,
    Episode,
    FinishReason,
    Group,
    Prompt,
    ScoredGroup,
    TokenSequence,
    Trajectory,
    VersionSpan,
)

Row = tuple[Any, ...]


class Packed:
    """Groups that are unpickled as a list of `ScoredGroup` with what `make_samples` reads; the rest is empty."""

    def __init__(self, groups: Sequence[ScoredGroup]):
        self.groups = groups

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, ([_group_row(scored) for scored in self.groups],)


def unpack(rows: Sequence[Row]) -> list[ScoredGroup]:
    """Return the groups of `Packed`."""
    return [_group(*row) for row in rows]


def _group_row(scored: ScoredGroup) -> Row:
    prompt = scored.group.prompt
    members = [_member_row(trajectory) for trajectory in scored.group.trajectories]
    return prompt.id, prompt.token_ids, scored.advantages, members


def _member_row(trajectory: Trajectory) -> Row:
    last, episode = trajectory.completion, trajectory.episode
    sequences = episode and [
        (each.token_ids, each.sampled, each.logprobs, _span_rows(each.spans), each.teacher_logprobs)
        for each in episode.sequences
    ]
    completion = last.token_ids, last.logprobs, _span_rows(last.spans), last.teacher_logprobs
    return trajectory.truncated, completion, sequences


def _span_rows(spans: Sequence[VersionSpan]) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in spans]


def _spans(rows: Sequence[tuple[int, int, int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*row) for row in rows)


def _group(prompt_id: str, token_ids: np.ndarray, advantages: np.ndarray, members: Sequence[Row]) -> ScoredGroup:
    prompt = Prompt(prompt_id, token_ids, "", "")
    return ScoredGroup(Group(prompt, tuple(_trajectory(prompt, *member) for member in members)), advantages)


def _trajectory(prompt: Prompt, truncated: bool, completion: Row, sequences: Sequence[Row] | None) -> Trajectory:
    token_ids, logprobs, spans, teacher = completion
    reason, ending = (FinishReason.length, Ending.length) if truncated else (FinishReason.stop, Ending.stop)
    last = Completion(token_ids, logprobs, reason, _spans(spans), teacher_logprobs=teacher)
    if sequences is None:
        return Trajectory(prompt, last, "")
    made = tuple(TokenSequence(ids, sampled, own, _spans(spans), rest) for ids, sampled, own, spans, rest in sequences)
    return Trajectory(prompt, last, "", episode=Episode(made, (), ending, {}, {}))
