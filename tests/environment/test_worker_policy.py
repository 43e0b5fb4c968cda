"""Conversations become sequences: which tokens are appended to which, without a worker process."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from app.environment.protocol import OutOfTime, OutOfTokens, OutOfTurns
from app.environment.rendering import renderer_for
from app.environment.wire import Answer, Limits
from app.environment.worker.calls import Clock
from app.environment.worker.limits import shorten
from app.environment.worker.policy import EpisodePolicy
from tests.environment.characters import Characters, text_of, tokens
from tests.environment.qwen import chat_choice, decoded, user
from tests.environment.talker import Talker


class Engine:
    """Answers with the next of some replies; `…` at an end: cut by the token limit. Records what it was asked."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[int, str, int | None, bool]] = []
        self.sequences: dict[int, str] = {}  # so far
        self.held: list[asyncio.Future[None]] | None = None  # while set, answers wait

    def ask(
        self, sequence: int, context: Sequence[int], max_tokens: int | None, logprobs: bool
    ) -> Coroutine[Any, Any, Answer]:
        text, before = text_of(context), self.sequences.get(sequence, "")
        assert sequence <= len(self.sequences)
        assert text.startswith(before)
        self.asked.append((sequence, text.removeprefix(before), max_tokens, logprobs))
        self.sequences[sequence] = text
        return self._answer(sequence, self.replies.pop(0) if self.replies else None, self._turn())

    def _turn(self) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None) if self.held is None else self.held.append(future)
        return future

    async def _answer(self, sequence: int, reply: str | None, turn: asyncio.Future[None]) -> Answer:
        await turn
        if reply is None:
            return Answer(0, [], "full")
        said = reply.removesuffix("…")
        self.sequences[sequence] += said
        return Answer(0, tokens(said), "length" if reply.endswith("…") else "stop", [-1.0] * len(said))

    @property
    def requests(self) -> list[tuple[int, str]]:
        return [(sequence, text) for sequence, text, _, _ in self.asked]


def talking(*replies: str, clock: Clock | None = None, **limits: int | None) -> tuple[EpisodePolicy, Engine]:
    """The policy of an episode whose prompt is `6*7=`, and its engine, which gives these replies."""
    chosen: dict[str, Any] = {"max_turns": 20, "max_turn_tokens": None, "max_observation_tokens": 100, **limits}
    engine = Engine(*replies)
    renderer: Any = Characters()
    policy = EpisodePolicy(
        engine.ask,
        renderer,
        Limits(**chosen, timeout_s=60.0, episode_s=60.0),
        [user("6*7=")],
        tokens("6*7="),
        clock or Clock(60.0),
        lambda policy: "http://x/v1",
    )
    return policy, engine


def same_sequences(policy: EpisodePolicy, engine: Engine) -> bool:
    """Whether the worker's copies of the sequences are the driver's."""
    return [text_of(sequence.token_ids) for sequence in policy._sequences.all] == list(engine.sequences.values())


async def test_a_conversation_that_goes_on_appends_only_its_new_messages() -> None:
    policy, engine = talking("ab", "cd", "ef")
    talk = [user("q")]
    for number in range(3):
        reply = await policy(talk)
        talk += [reply.message, user(f"next{number}")]
    assert engine.requests == [(0, "q>"), (0, "|next0>"), (0, "|next1>")]
    assert engine.sequences == {0: "q>ab|next0>cd|next1>ef"}
    assert same_sequences(policy, engine)
    assert policy.metrics["observation_tokens"] == 14.0
    assert policy.text == "ef"


RESULT = {"role": "tool", "content": "3"}  # the template keeps the reasoning before it


@pytest.mark.parametrize(("sample", "with_reasoning", "meant"), [(0, True, 0), (1, True, 1), (0, False, 1)])
async def test_of_two_samples_with_one_text_the_one_with_the_given_reasoning_goes_on(
    sample: int, with_reasoning: bool, meant: int
) -> None:
    replies = [f"<think>\n{thought}\n</think>\n\nyes<|im_end|>" for thought in ("first", "second", "third")]
    talker = Talker(renderer_for(**chat_choice(), enable_thinking=True), *replies)

    samples = [await talker.policy([user("q")]) for _ in range(2)]
    message = dict(samples[sample].message)
    if not with_reasoning:
        del message["reasoning_content"]
    await talker.policy([user("q"), message, RESULT])
    assert [sequence for sequence, said in talker.sequences.items() if "third" in decoded(said)] == [meant]
    assert len(talker.sequences) == 2


async def test_an_unknown_history_and_one_that_the_template_rewrites_begin_new_sequences() -> None:
    policy, engine = talking("ab", "cd", "ef")
    first = await policy([user("q")])
    await policy([user("other"), first.message, user("x")])
    await policy([user("q"), first.message, user("forget")])
    assert engine.requests == [(0, "q>"), (1, "other|ab|x>"), (2, "q|ab|forget>")]
    assert same_sequences(policy, engine)
    said = ["q", "ab", "other", "ab", "x", "cd", "forget", "ef"]  # a history that was rewritten is not said again
    assert [turn["text"] for turn in policy.turns] == said


async def test_a_fork_keeps_the_tokens_that_were_sampled_as_context() -> None:
    policy, engine = talking("ab", "cd", "ef", "gh")
    first = await policy([user("q")])
    await policy([user("q"), first.message, user("x")])
    third = await policy([user("q"), first.message, user("y")])  # the sequence has gone on with x
    await policy([user("q"), first.message, user("y"), third.message, user("z")])
    assert engine.requests == [(0, "q>"), (0, "|x>"), (1, "q>ab|y>"), (1, "|z>")]
    assert same_sequences(policy, engine)
    assert policy.metrics["observation_tokens"] == 9.0


async def test_equal_conversations_at_once_get_sequences_of_their_own() -> None:
    policy, engine = talking("ab", "c1", "c2", "c3")
    first = await policy([user("q")])
    talk = [user("q"), first.message, user("x")]
    engine.held = []
    asks = [asyncio.ensure_future(policy(talk)) for _ in range(3)]
    await asyncio.sleep(0)
    for turn in reversed(engine.held):  # the last is answered first
        turn.set_result(None)
    texts = [reply.text for reply in await asyncio.gather(*asks)]
    assert engine.requests == [(0, "q>"), (0, "|x>"), (1, "q>ab|x>"), (2, "q>ab|x>")]
    assert texts == ["c1", "c2", "c3"]
    assert same_sequences(policy, engine)


@pytest.mark.parametrize(("one", "other"), [("x", "y"), ("", "")])
async def test_a_sequence_with_a_request_in_flight_is_not_extended(one: str, other: str) -> None:
    policy, engine = talking("ab", "cd", "ef")
    await policy.generate(tokens("q"))
    engine.held = []
    asks = [asyncio.ensure_future(policy.generate(tokens("qab" + text))) for text in (one, other)]
    await asyncio.sleep(0)
    for turn in engine.held:
        turn.set_result(None)
    await asyncio.gather(*asks)
    assert engine.requests == [(0, "q"), (0, one), (1, "qab" + other)]
    assert same_sequences(policy, engine)


async def test_tokens_extend_the_longest_sequence_that_they_begin_with() -> None:
    policy, engine = talking("ab", "cd", "ef", "gh", "ij")
    sampled = await policy.generate(tokens("q"), logprobs=True, max_tokens=9)
    assert (sampled.token_ids, sampled.finish, sampled.logprobs) == (tuple(tokens("ab")), "stop", (-1.0, -1.0))
    await policy.generate(tokens("qabx"))
    await policy.generate(tokens("qab"))  # shorter than its sequence is now
    await policy.generate(tokens("qabxcd!"))
    await policy.generate(tokens("qabef"))  # nothing to append: the reply goes on
    assert engine.requests == [(0, "q"), (0, "x"), (1, "qab"), (0, "!"), (1, "")]
    assert engine.asked[0][2:] == (9, True)
    assert same_sequences(policy, engine)


async def test_another_client_of_the_same_conversation_is_recognized() -> None:
    policy, engine = talking("!add", "cd", "ef")
    await policy([user("q")])
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}  # arguments as text
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    await policy([user("q"), said, {"role": "tool", "content": "3", "tool_call_id": "1"}])
    call = {**call, "function": {"name": "sub", "arguments": "{}"}}
    await policy([user("q"), {**said, "tool_calls": [call]}, user("x")])
    assert engine.requests == [(0, "q>"), (0, "|3>"), (1, "q||x>")]
    assert policy.metrics["tool_calls"] == 1.0


async def test_an_observation_is_cut_and_the_history_with_the_whole_one_is_recognized() -> None:
    policy, engine = talking("ab", "cd", "ef", "gh", max_observation_tokens=45)
    long = "x" * 500 + "y" * 500
    cut = "xxxxx\n[... 990 characters left out ...]\nyyyyy"
    talk = [user(long)]  # the question is not an observation
    first = await policy(talk)
    talk += [first.message, user(long)]
    second = await policy(talk)
    talk += [second.message, user("end")]
    await policy(talk)
    await policy([user("other"), first.message, user(long)])
    assert engine.requests == [(0, f"{long}>"), (0, f"|{cut}>"), (0, "|end>"), (1, f"other|ab|{cut}>")]
    assert len(cut) <= 45
    assert policy.turns[2]["text"] == cut


@pytest.mark.parametrize(("size", "most"), [(100, 100), (101, 100), (10_000, 100), (1_000_000, 300), (5_000, 1)])
def test_a_shortened_text_has_at_most_its_tokens_and_keeps_both_ends(size: int, most: int) -> None:
    text = "".join(chr(97 + place * 26 // size) for place in range(size))
    longest = []

    def count(shown: str) -> int:  # two characters a token
        longest.append(len(shown))
        return (len(shown) + 1) // 2

    cut = shorten(text, most, count)
    if size <= 2 * most:
        assert cut == text
        return
    head, note, tail = cut.split("\n")
    assert note == f"[... {size - len(head) - len(tail)} characters left out ...]"
    assert text.startswith(head)
    assert text.endswith(tail)
    assert most == 1 or 0.5 * most < count(cut) <= most
    assert max(longest) <= most * 64 + 50


@pytest.mark.parametrize("over", [OutOfTurns, OutOfTokens, OutOfTime])
async def test_each_limit_has_its_exception_and_nothing_more_is_sampled(
    over: type[OutOfTime] | type[OutOfTokens] | type[OutOfTurns],
) -> None:
    clock = Clock(60.0)
    replies = ["ab"] if over is OutOfTokens else ["ab", "cd"]
    limits: dict[str, Any] = {"max_turns": 1} if over is OutOfTurns else {}
    policy, engine = talking(*replies, clock=clock, **limits)
    await policy([user("q")])
    if over is OutOfTime:
        clock._before = 61.0
    with pytest.raises(over):
        await policy([user("r")])
    with pytest.raises(over):
        await policy.generate(tokens("r"))
    assert policy.ending == {OutOfTurns: "turns", OutOfTokens: "length", OutOfTime: "time"}[over]
    assert len(engine.asked) == (3 if over is OutOfTokens else 1)
    assert engine.sequences[0] == "q>ab"


async def test_an_answer_extends_its_sequence_even_if_whoever_asked_was_cancelled() -> None:
    policy, engine = talking("ab", "cd")
    engine.held = []
    asking = asyncio.ensure_future(policy([user("q")]))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)
    engine.held.pop().set_result(None)
    engine.held = None
    await asyncio.sleep(0.01)
    await policy.generate(tokens("q>abx"))
    assert engine.requests == [(0, "q>"), (0, "x")]
    assert same_sequences(policy, engine)


def test_the_clock_stands_still_while_an_engine_is_awaited_and_turns_have_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(10.0)
    now[0] += 2.0
    with clock.waiting():
        now[0] += 50.0
        assert clock.left == 10.0
        with clock.waiting():
            now[0] += 50.0
        now[0] += 50.0
        assert clock.seconds == 2.0
    now[0] += 3.0
    assert (clock.seconds, clock.left) == (5.0, 7.0)
    clock.begin("step")
    assert (clock.seconds, clock.left, clock.step) == (5.0, 10.0, "step")
    now[0] += 11.0
    assert (clock.seconds, clock.left) == (16.0, -1.0)
