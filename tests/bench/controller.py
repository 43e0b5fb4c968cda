"""CPU time of the driver per completion, with payloads of realistic size.

    python -m tests.bench.controller

The real controller, rollouter, scorer (`exact`), staleness manager, buffer and recorder. 1,000 simulated engines in
virtual time answer groups of 8 completions of 8,000 tokens with log-probabilities and text. As between Ray's processes,
a group is unpickled when it arrives and pickled when it goes to the trainer: arrays out of band, read in place, copied
once into shared memory. Ray's own calls are not counted. Engine hosts decode the text; the cost of decoding it on the
driver instead is printed.
"""

import json
import os
import pickle
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from app.model.tiny.tokenizer import build_tokenizer
from app.placement.fully_async import FullyAsync
from app.tracking.recorder import RunFolderRecorder
from app.types import Completion, FinishReason, GroupRequest, InFlight, ScoredGroup, VersionSpan
from tests.bench.machine import busy, conditions
from tests.simulation import SimEngine, SimTrainer, World, config, run_virtual

ENGINES, GROUP, TOKENS = 1000, 8, 8000
PROMPTS, STEPS = 250, 6  # groups a step
TARGET_US = 300


class ReplayEngine(SimEngine):
    """Answers every request with a recorded payload, under the current policy version."""

    payload = b""
    arrays: list[bytes] = []  # noqa: RUF012

    async def generate(self, request: GroupRequest) -> list[Completion]:
        completions = await super().generate(request)
        arrays = pickle.loads(self.payload, buffers=self.arrays)[: request.group_size]
        return [
            Completion(tokens, logprobs, FinishReason.stop, (VersionSpan(self.version, 0, TOKENS),), text)
            for (tokens, logprobs, text), _ in zip(arrays, completions, strict=True)
        ]


class PicklingTrainer(SimTrainer):
    """Pickles groups as Ray does."""

    shared = memoryview(bytearray(TOKENS * 4))

    async def add_groups(self, groups: Sequence[ScoredGroup]) -> None:
        arrays: list[pickle.PickleBuffer] = []
        pickle.dumps(list(groups), protocol=5, buffer_callback=arrays.append)
        for array in arrays:
            view = array.raw()
            self.shared[: view.nbytes] = view
        await super().add_groups(groups)


def payload() -> tuple[bytes, list[bytes]]:
    """Return a pickled group and its out-of-band arrays."""
    rng = np.random.default_rng(0)
    texts = ["x" * TOKENS + " 1" if member % 2 else "x" * TOKENS for member in range(GROUP)]
    arrays = [
        (rng.integers(5, 99, TOKENS, dtype=np.int32), rng.normal(-1, 1, TOKENS).astype(np.float32), text)
        for text in texts
    ]
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
    return data, [bytes(buffer.raw()) for buffer in buffers]


def decode_us() -> float:
    """Return the CPU microseconds of decoding one completion on the driver."""
    decoder, rng = build_tokenizer(TOKENS), np.random.default_rng(0)
    tokens = rng.integers(5, 99, TOKENS, dtype=np.int32)
    started = time.process_time()
    for _ in range(20):
        decoder.decode(tokens.tolist(), skip_special_tokens=True)
    return (time.process_time() - started) / 20 * 1e6


def run_once(folder: Path) -> float:
    """Return the CPU seconds of a whole run in this process."""
    settings = config(
        steps=STEPS,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        max_staleness=2,
        in_flight=InFlight.retract,
        max_inflight_groups=ENGINES,
        max_completion_tokens=TOKENS,
    )
    seconds = lambda prompt_id: 30 * random.Random(prompt_id).lognormvariate(0, 0.5)  # noqa: E731
    world = World(settings, folder, seconds, rows=5000, eval_rows=1, trainer=PicklingTrainer(seconds=0.1))
    ReplayEngine.payload, ReplayEngine.arrays = payload()

    async def scenario(recorder: RunFolderRecorder) -> float:
        world.recorder = recorder  # type: ignore[assignment]
        parts = world.context()
        parts.pool.__init__([ReplayEngine(seconds, world.right) for _ in range(ENGINES)])
        world.sync.engines = parts.pool.engines
        started = time.process_time()
        await FullyAsync(parts).run()
        return time.process_time() - started

    with RunFolderRecorder(settings, folder) as recorder:
        return run_virtual(scenario(recorder))


def main() -> None:
    before = conditions()
    with tempfile.TemporaryDirectory() as name:
        cpu = run_once(Path(name))
    completions = PROMPTS * STEPS * GROUP
    cost_us = cpu / completions * 1e6
    print(
        json.dumps(
            {
                "benchmark": "controller",
                "driver_cpu_us_per_completion": round(cost_us, 1),
                "target_us": TARGET_US,
                "of_target": round(cost_us / TARGET_US, 3),
                "limit_completions_per_second": round(1e6 / cost_us),
                "decoding_here_would_add_us": round(decode_us(), 1),
                "completions": completions,
                "engines": ENGINES,
                "tokens_per_completion": TOKENS,
                "before": before,
                "busy": busy([before]),
                "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            }
        )
    )


if __name__ == "__main__":
    main()
