"""A check of `mode=doctor`: one episode of the environment, whose replies are made up instead of sampled.

    first question ─→ begin ─→ reply: the answer ─→ step … ─→ no room for a further reply ─→ score ─→ close

No engine is needed.
"""

import asyncio

from app.data.build import conversation
from app.environment.pool import EnvironmentPool
from app.environment.protocol import Task
from app.environment.wire import Answer, End, SampleRequest
from app.errors import ConfigError
from app.reward.tryout import Tokenize, tokenizer_of
from app.start.environments import tried_pool, without_log
from app.start.input_checks import REFUSED
from app.start.inputs import CheckStatus, Finding, RunInputs
from app.tracking.number_format import plural
from app.worker.wire import Failed

SUBJECT = "episodes"
MAX_REPLIES = 3
MAX_REPLY_TOKENS = 32  # of a reply
CLOSING_S = 15.0  # for the end of an episode that is aborted
QUESTION = "1+1="  # where the rows are not on this machine
ANSWER = "2"


def play_episode(run: RunInputs) -> Finding:
    """Return whether the environment plays an episode."""
    settings = run.config.environment
    if "model" in run.missing:
        hint = "examine it again when the model is on this machine"
        return Finding(SUBJECT, "no environment was loaded", CheckStatus.warn, hint)

    name = settings._target_ or settings.kind.name
    limit_s = settings.timeout_s * (MAX_REPLIES + 2)
    try:
        replies, end = asyncio.run(_play(run, _task(run), tokenizer_of(run.tokenizer), limit_s))
        if isinstance(end, End):
            scores = ", ".join(f"{key} {value:g}" for key, value in end.scores.items()) or "no score of its own"
            return Finding(SUBJECT, f"{name}, an episode of {plural(replies, 'made-up turn')}: {scores}")
        why = without_log(end.text).rstrip(".")
    except TimeoutError:
        why = f"no end within {limit_s:g} s"
    except ConfigError as error:
        return Finding(SUBJECT, str(error), CheckStatus.fail, REFUSED)

    message = f"{name}, an episode of made-up turns failed: {why}"
    return Finding(SUBJECT, message, CheckStatus.fail, "correct the environment: a reply must not fail it")


def _task(run: RunInputs) -> Task:
    """Return the task of a training row, as an evaluation; a made-up one if the rows are not on this machine."""
    if "data" in run.missing and not run.config.data.from_environment:
        return Task("doctor/0@0", QUESTION, ANSWER, "doctor", training=False)
    row = run.rows.train[0]
    messages = conversation(row, run.config.data)
    name = f"{row.source}/{row.index}@0"
    return Task(name, row.question, row.answer, row.source, dict(row.columns), run.config.seed, False, messages)


async def _play(run: RunInputs, task: Task, tokenize: Tokenize, limit_s: float) -> tuple[int, End | Failed]:
    async with tried_pool(run.config, run.model_path) as pool, asyncio.timeout(limit_s):
        return await _episode(pool, task, tokenize)


async def _episode(pool: EnvironmentPool, task: Task, tokenize: Tokenize) -> tuple[int, End | Failed]:
    """Reply with the task's answer, then with nothing, because nothing has room. Returns the replies and the end."""
    reply = [*tokenize(task.answer or ANSWER)][:MAX_REPLY_TOKENS]
    session = await pool.begin(task, [*tokenize(task.question or QUESTION)])
    replies = 0
    try:
        while isinstance(event := await session.next(), SampleRequest):
            room = replies < MAX_REPLIES
            replies += room
            logprobs = [-1.0] * len(reply) if event.logprobs and room else None
            answer = Answer(event.number, reply if room else [], "stop" if room else "full", logprobs)
            session.reply(event, answer)
        return replies, event
    finally:
        await asyncio.wait([asyncio.ensure_future(session.close())], timeout=CLOSING_S)
