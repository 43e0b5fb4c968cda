"""The messages of episodes between the driver and an environment worker, beside those of `app/worker/wire.py`.

    driver → worker   Begin · Answer · Close
    worker → driver   SampleRequest · End, Failed or Closed · Heartbeat

Invariants:
- A worker sends End, Failed or Closed after it called the environment's `close`.
- The worker owns the tokens of an episode: each request carries all of its sequence. The driver keeps what was sampled
  for each request, and joins it once, at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.worker.wire import Codec, Request


@dataclass(frozen=True, slots=True)
class RendererChoice:
    """What `rendering.renderer_for` takes."""

    name: str
    model_path: str
    thinking: str  # earlier reasoning at a new user message: as the template, or keep
    enable_thinking: bool = False  # the template's argument
    template: str | None = None  # text of a chat template in place of the model's own
    variables: str = "{}"  # further ones of the template, as JSON text


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode."""

    max_turns: int  # requests to the policy
    max_turn_tokens: int | None  # None: what is left
    max_observation_tokens: int
    timeout_s: float  # one step of the environment
    episode_s: float  # without the time it waited for engines


@dataclass(frozen=True, slots=True)
class Answer:
    """The sampled tokens of a `SampleRequest`. finish `full`: no room was left and nothing was sampled."""

    number: int  # of the request
    token_ids: Sequence[int]
    finish: str  # stop, length, full
    logprobs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest(Request):
    """Sample after all tokens of a sequence."""

    sequence: int  # from 0; the number of sequences so far: a new one
    context: Sequence[int]
    max_tokens: int | None
    logprobs: bool


@dataclass(frozen=True, slots=True)
class End:
    """An episode ended well."""

    job: int
    scores: Mapping[str, float]  # the first is the score; empty: the environment has none of its own
    ending: str  # stop, length, turns, time
    turns: Sequence[Mapping[str, Any]]  # for people: role, text, tokens, seconds
    text: str  # of the last reply
    metrics: Mapping[str, float]
    stuck: bool = False  # code of the episode still runs in a thread: the worker takes no further one


CODEC = Codec(SampleRequest, Answer, End)
