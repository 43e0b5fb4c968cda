"""How groups travel to the trainer ranks: numbers only, as tuples, which pickle in a third of the time.

The driver pickles every group of a run. A rank needs no text, no row of the data and no score, so they stay behind.
Arrays travel out of band, without a copy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app import types

Row = tuple[Any, ...]


class Packed:
    """Groups that are unpickled as a list of `ScoredGroup` with what `TrainStep` reads; the rest is empty."""

    def __init__(self, groups: Sequence[types.ScoredGroup]):
        self.groups = groups

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, ([_group_row(scored) for scored in self.groups],)


def unpack(rows: Sequence[Row]) -> list[types.ScoredGroup]:
    """Return the groups of `Packed`."""
    return [_group(*row) for row in rows]


def _group_row(scored: types.ScoredGroup) -> Row:
    prompt = scored.group.prompt
    # Nearly always the group's own prompt, which is sent once.
    members = [
        (None if each.prompt is prompt else _prompt_row(each.prompt), each.reward, *_sampled_rows(each))
        for each in scored.group.trajectories
    ]
    return _prompt_row(prompt), scored.advantages, members


def _prompt_row(prompt: types.Prompt) -> Row:
    return prompt.id, prompt.token_ids, prompt.source


def _sampled_rows(trajectory: types.Trajectory) -> tuple[Row, Row | None]:
    """Return the rows of the completion and of the episode; a single turn has none."""
    completion = trajectory.completion
    spans = _span_rows(completion.spans)
    row = (
        completion.token_ids,
        completion.logprobs,
        completion.finish_reason.value,
        spans,
        completion.teacher_logprobs,
    )
    if trajectory.episode is None:
        return row, None

    sequences = [
        (
            sequence.token_ids,
            sequence.sampled,
            sequence.logprobs,
            _span_rows(sequence.spans),
            sequence.teacher_logprobs,
        )
        for sequence in trajectory.episode.sequences
    ]
    return row, (sequences, trajectory.episode.ending.value)


def _span_rows(spans: Sequence[types.VersionSpan]) -> Row:
    return tuple((span.version, span.start, span.end) for span in spans)


def _group(prompt_row: Row, advantages: np.ndarray, members: Sequence[Row]) -> types.ScoredGroup:
    prompt = _prompt(prompt_row)
    trajectories = tuple(
        types.Trajectory(
            prompt if own_prompt is None else _prompt(own_prompt),
            _completion(*completion),
            "",
            reward,
            episode=None if episode is None else _episode(*episode),
        )
        for own_prompt, reward, completion, episode in members
    )
    return types.ScoredGroup(types.Group(prompt, trajectories), advantages)


def _prompt(row: Row) -> types.Prompt:
    prompt_id, token_ids, source = row
    return types.Prompt(prompt_id, token_ids, "", source)


def _completion(
    token_ids: np.ndarray, logprobs: np.ndarray, reason: str, spans: Row, teacher: np.ndarray | None
) -> types.Completion:
    finished = types.FinishReason(reason)
    return types.Completion(token_ids, logprobs, finished, _spans(spans), teacher_logprobs=teacher)


def _episode(sequences: Sequence[Row], ending: str) -> types.Episode:
    made = tuple(
        types.TokenSequence(token_ids, sampled, logprobs, _spans(spans), teacher)
        for token_ids, sampled, logprobs, spans, teacher in sequences
    )
    return types.Episode(made, (), types.Ending(ending), {}, {})


def _spans(rows: Row) -> tuple[types.VersionSpan, ...]:
    return tuple(types.VersionSpan(*row) for row in rows)
