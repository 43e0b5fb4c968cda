"""Groups of episodes on real or scripted engines, with the real workers, and what was asked of the engines."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.config.recovery import RecoveryConfig
from app.config.reward import RewardConfig
from app.environment.pool import EnvironmentSpec
from app.reward.scorer import Scorer
from app.rollout.engine.pool import EnginePool
from app.rollout.episodes import EpisodeLimits, Episodes
from app.rollout.episodes.episode_group import episode_failures
from app.rollout.rollouter import Rollouter
from app.tracking.run_folder.timeline import Timeline
from app.types import Completion, FinishReason, Group, GroupRequest, Prompt, Sampling, TokenSequence, VersionSpan
from tests.environment.pools import running_pool
from tests.tiny_models.tokenizer import build_tokenizer

PATIENCE_S = 120.0
ROOM = 400  # tokens of a trajectory after its opening


@dataclass
class Recording:
    """An engine in front of another one: keeps what was asked, and what it said."""

    engine: Any
    requests: list[GroupRequest] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        (completion,) = await self.engine.generate(request)
        self.requests.append(request)
        self.completions.append(completion)
        return [completion]

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        await self.engine.abort(prompt_ids)


@dataclass
class Scripted:
    """An engine that says `42` in every turn, after what `before` waits for."""

    before: Callable[[GroupRequest], Any] | None = None
    aborted: list[str] = field(default_factory=list)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        if self.before is not None:
            await self.before(request)
        tokens = np.array([ord("4"), ord("2")], dtype=np.int32)[: request.sampling.max_tokens]
        span = VersionSpan(request.version, 0, len(tokens))
        return [Completion(tokens, np.zeros(len(tokens), dtype=np.float32), FinishReason.stop, (span,))]

    async def abort(self, prompt_ids: Sequence[str] | None = None) -> None:
        self.aborted += prompt_ids or ()


@contextlib.asynccontextmanager
async def rollouter_of(spec: EnvironmentSpec, engines: Sequence[Any], *, retries: int = 0) -> AsyncIterator[Rollouter]:
    """A rollouter with an environment; afterwards no process and no descriptor of its workers is left."""
    async with running_pool(spec, episodes=64) as environments:
        failures = episode_failures(1.0, 10**6, lambda sentence: None)
        yield rollouter_with(Episodes(environments, EpisodeLimits(64, ROOM, retries), failures, 0), engines)


def rollouter_with(
    episodes: Episodes | None, engines: Sequence[Any], *, reward: str = "environment", **limits: int
) -> Rollouter:
    """A rollouter whose reward is one component, by default the score of the environment. `limits` of `recovery`."""
    scorer = Scorer(RewardConfig(components={reward: 1.0}))
    recovery = RecoveryConfig(**limits)
    return Rollouter(EnginePool(engines), scorer, build_tokenizer(256), Timeline(), recovery, episodes)


def prompt(number: int = 0) -> Prompt:
    """For the renderer of characters."""
    tokens = np.array([ord(character) for character in "6*7="], dtype=np.int32)
    return Prompt(f"talk/{number}@0", tokens, "42", "talk", question="6*7=", row={"n": number})


def tiny_prompt(number: int, model: Path) -> Prompt:
    """For the tokenizer of a tiny model."""
    from app.model.hf_directory import load_tokenizer

    text = f"{number + 10}+{7 * number % 90 + 5}="
    tokens = np.array(load_tokenizer(model)(text)["input_ids"], dtype=np.int32)
    return Prompt(f"talk/{number}@0", tokens, "42", "talk", question=text, row={"n": number})


async def group(
    rollouter: Rollouter,
    prompt: Prompt,
    *,
    size: int = 4,
    temperature: float = 1.0,
    version: Callable[[], int] = lambda: 0,
) -> Group:
    sampling = Sampling(temperature, 1.0, ROOM)
    playing = rollouter.group(prompt, size=size, sampling=sampling, version=version)
    return await asyncio.wait_for(playing, PATIENCE_S)


def pieces(sequence: TokenSequence) -> list[tuple[int, int]]:
    """First and last position of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.sampled.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def largest_difference_of_sequences(policy: Any, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> float:
    """Between the log-probabilities of sampled tokens and those of a model of transformers, over all turns."""
    largest = 0.0
    for sequence in sequences:
        tokens = torch.as_tensor(sequence.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logits = policy(input_ids=tokens[None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits / temperature, dim=-1).gather(1, tokens[1:, None]).squeeze(1).numpy()
        expected = logprobs[sequence.sampled[1:]]
        largest = max(largest, float(np.abs(sequence.logprobs - expected).max()))
    return largest


# Observations of random lengths, and a second conversation beside the first.
TALK = """
import random

class Env:
    async def run(self, task, policy):
        rng = random.Random(task.row["n"])
        reply = await policy(None)
        talk = []
        for turn in range(3):
            said = "".join(rng.choice("0123456789+=") for _ in range(rng.randrange(1, 30)))
            talk += [reply.message, {"role": "user", "content": said}]
            reply = await policy(talk, max_tokens=3 + 5 * turn)
            if turn == 1:
                aside = [{"role": "user", "content": "12+30="}]
                answer = await policy(aside, max_tokens=6)
                await policy([*aside, answer.message, {"role": "user", "content": "7+8="}])
        return 1.0
"""
TURNS = 6  # of both conversations


async def played(spec: Any, engine: Recording, model: Path, *, prompts: int, temperature: float) -> list[Group]:
    async with rollouter_of(spec, [engine]) as rollouter:
        groups = [group(rollouter, tiny_prompt(n, model), temperature=temperature) for n in range(prompts)]
        return await asyncio.gather(*groups)


def asked(recording: Recording) -> Counter[tuple[bytes, bytes]]:
    """What engines read and said."""
    pairs = zip(recording.requests, recording.completions, strict=True)
    return Counter((request.token_ids.tobytes(), completion.token_ids.tobytes()) for request, completion in pairs)


def trained(sequences: Sequence[TokenSequence]) -> Counter[tuple[bytes, bytes]]:
    """What stands before each sampled piece of a sequence, and the piece."""
    return Counter(
        (sequence.token_ids[:start].tobytes(), sequence.token_ids[start:end].tobytes())
        for sequence in sequences
        for start, end in pieces(sequence)
    )
