"""A check of `mode=doctor`: one episode of the environment, whose replies are made up instead of sampled.

    first question ─→ begin ─→ reply: the answer ─→ step … ─→ no room for a further reply ─→ score ─→ close

No engine is needed. Before it, the renderer makes a round trip: render → reply → render what follows → parse.
"""

import asyncio
from dataclasses import astuple, dataclass
from pathlib import Path

from app.config import RunConfig
from app.data import rows
from app.data.template import conversation
from app.environment.pool import EnvironmentPool
from app.environment.protocol import Task
from app.environment.rendering import renderer_for
from app.environment.wire import Ask, End, RendererChoice
from app.errors import ConfigError
from app.mode.doctor.finding import Check, CheckStatus
from app.mode.environments import require_environment, tried_pool, without_log, worker_spec
from app.model.hf_directory import load_tokenizer
from app.reward.tryout import Tokenize, tokenizer_of
from app.tracking.number_format import plural
from app.worker.wire import Failed

SUBJECT = "episodes"  # the environment is that of the variables
MAX_REPLIES = 3
MAX_REPLY_TOKENS = 32  # of a reply
CLOSING_S = 15.0  # for the end of an episode that is aborted
QUESTION = "1+1="  # where the rows are not on this machine
ANSWER = "2"


@dataclass(slots=True)
class Played:
    """How the episode ended."""

    replies: int = 0
    end: End | Failed | None = None  # None: it was late


def play_episode(config: RunConfig, folder: Path) -> Check:
    """Return whether the environment plays an episode.

    Args:
        config: Of a run whose inputs are not refused.
        folder: The model's directory.
    """
    limit_s = config.environment.timeout_s * (MAX_REPLIES + 2)
    try:
        task = _task(config, folder)
        tokenize = tokenizer_of(load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code))
        spec = worker_spec(config, folder)
        if config.environment.python is None:
            _round_trip(spec.renderer, task, tokenize)
        played = asyncio.run(_play(config, folder, task, tokenize, limit_s))
    except ConfigError as error:
        return Check(SUBJECT, CheckStatus.fail, str(error), "correct the setting; mode=train ends with this sentence")

    name = config.environment._target_ or config.environment.kind.name
    if isinstance(played.end, End):
        scores = ", ".join(f"{key} {value:g}" for key, value in played.end.scores.items()) or "no score of its own"
        turns = plural(played.replies, "made-up turn")
        return Check(SUBJECT, CheckStatus.ok, f"{name}, an episode of {turns}: {scores}")
    why = without_log(played.end.text).rstrip(".") if played.end is not None else f"no end within {limit_s:g} s"
    message = f"{name}, an episode of made-up turns failed: {why}"
    return Check(SUBJECT, CheckStatus.fail, message, "correct the environment: a reply must not fail it")


def _task(config: RunConfig, folder: Path) -> Task:
    """Return the task of a training row, as an evaluation; a made-up one if the rows are not on this machine.

    Raises:
        ConfigError: The environment is to list its tasks, and cannot be loaded.
    """
    if config.data.from_environment:
        first = require_environment(config, folder)[0]
        return Task("doctor/0@0", str(first["question"]), str(first["answer"]), "doctor", dict(first), training=False)
    if not rows.is_local(config.data):
        return Task("doctor/0@0", QUESTION, ANSWER, "doctor", training=False)
    row = rows.load(config.data).train[0]
    messages = conversation(row, config.data)
    name = f"{row.source}/{row.index}@0"
    return Task(name, row.question, row.answer, row.source, dict(row.columns), config.seed, False, messages)


def _round_trip(choice: RendererChoice, task: Task, tokenize: Tokenize) -> None:
    """Raise `ConfigError` if what is rendered, replied and read differs."""
    question = [{"role": "user", "content": task.question or QUESTION}]
    try:
        renderer = renderer_for(*astuple(choice))
        opening = renderer.opening(task.messages or question)
        reply = [*tokenize(ANSWER)]
        following = renderer.following([*opening, *reply], question)
        text = renderer.parse(reply, opening).text
    except ValueError as error:
        raise ConfigError("", "", reason=str(error)) from error

    if not opening or following == [] or text.strip() != ANSWER:
        why = f"the renderer {choice.name} reads the reply {ANSWER!r} as {text!r}: the tokenizer does not fit it"
        raise ConfigError("model.path", choice.model_path, reason=why)


async def _play(config: RunConfig, folder: Path, task: Task, tokenize: Tokenize, limit_s: float) -> Played:
    async with tried_pool(config, folder) as pool:
        played = Played()
        try:
            async with asyncio.timeout(limit_s):
                await _episode(pool, task, tokenize, played)
        except TimeoutError:
            pass  # `end` is None
        return played


async def _episode(pool: EnvironmentPool, task: Task, tokenize: Tokenize, played: Played) -> None:
    """Reply with the task's answer, then with nothing, because nothing has room."""
    reply = [*tokenize(task.answer or ANSWER)][:MAX_REPLY_TOKENS]
    session = await pool.begin(task, [*tokenize(task.question or QUESTION)])
    try:
        while isinstance(event := await session.next(), Ask):
            room = played.replies < MAX_REPLIES
            played.replies += room
            logprobs = [-1.0] * len(reply) if event.logprobs and room else None
            session.answer(event, reply if room else [], "stop" if room else "full", logprobs)
        played.end = event
    finally:
        await asyncio.wait([asyncio.ensure_future(session.close())], timeout=CLOSING_S)
