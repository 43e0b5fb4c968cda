"""`weight_sync.probe`: do the engines sample with the weights that the trainer holds?

The checksums of `weight_sync.verify` miss copies that an engine derives from its weights and does not renew
(transposed, fused, cast), and kernels that compute something else. Log-probabilities show them.

    start(v)   after the sync of policy v: every engine samples a few tokens, beside the rollouts
    check      before the update that ends v: the trainer's log-probabilities of the same tokens are compared

Invariants:
    - Engine and trainer compute with the same policy version, so that only rounding explains a difference.
    - Every prompt is new to the engines: nothing comes from a KV cache that an earlier policy filled. Tokens are
      sampled, not only scored, since prefill and decoding have kernels of their own.
    - The first syncs are probed, and every 20th: 8 tokens decode beside all other requests, and the trainer computes
      one more pass of a hundred tokens.
    - In all probes together the trainer waits for engines in at most half a percent of the run; a probe that is late is
      repeated with a later version. Only after a step whose on-policy tokens differed (`mismatch/kl_same_version`) does
      it wait for the engines' answer.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.config.device import Dtype
from app.config.weight_sync import Probe
from app.errors import EngineError, RunError
from app.protocols import RolloutEngine, Trainer
from app.types import Completion, GroupRequest, Prompt, Sampling, TokenSequence

PROMPT_TOKENS = 16
TOKEN_IDS = (4, 60)  # letters, digits and punctuation in byte-level vocabularies: no special token
COMPLETIONS = 4
MAX_TOKENS = 8
FIRST = 3  # probes that follow each other
INTERVAL = 20  # policy versions between later ones
WAIT_SHARE = 0.005  # of a run


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on rounding errors: three to ten times those of `mode=parity`, for deeper models and other contexts."""

    difference: float  # mean |Δ log-probability| of an engine's probe
    kl: float  # of a step's on-policy tokens; above it the next sync is probed


TOLERANCES = {Dtype.float32: Tolerance(1e-3, 1e-6), Dtype.bfloat16: Tolerance(0.15, 0.02)}


@dataclass(eq=False)
class EngineProbe:
    """Probes the engines of a run.

    Example::

        probe.start(version=7, engines=pool.alive)
        …                                            # the step generates and adds its groups
        await probe.check(trainer)                   # the trainer still holds policy 7
    """

    probe: Probe
    dtype: Dtype
    warn: Callable[[str], None]
    _next_version: int = 0  # that is probed
    _first_left: int = FIRST
    _retry: int = 1  # versions until the next probe if engines are late
    _suspected: bool = False  # by the tokens of a step
    _started_s: float = field(default_factory=time.monotonic)
    _waited_s: float = 0.0
    _version: int = 0  # of the probe that runs
    _prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    _running: dict[str, asyncio.Task[list[Completion]]] = field(default_factory=dict)  # by the engine's name

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype]

    @property
    def running(self) -> bool:
        return bool(self._running)

    def start(self, version: int, engines: Sequence[RolloutEngine]) -> None:
        """Start a probe on these engines, which hold policy `version`, if one is due. Does not wait."""
        self.cancel()
        if self.probe is Probe.never or (version < self._next_version and not self._suspected):
            return

        self._version = version
        self._prompt = np.random.default_rng(version).integers(*TOKEN_IDS, PROMPT_TOKENS).astype(np.int32)
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS)
        request = GroupRequest(f"probe/{version}@0", self._prompt, COMPLETIONS, sampling, version)
        for engine in engines:
            task = asyncio.ensure_future(engine.generate(request))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._running[engine.name] = task

    async def check(self, trainer: Trainer) -> None:
        """Compare what the engines sampled with the trainer, whose parameters are still those of the probe's version.

        Raises:
            RunError: An engine differs by more than rounding explains, with `weight_sync.probe=stop`.
        """
        began = time.monotonic()
        patience = None if self._suspected else max(WAIT_SHARE * (began - self._started_s) - self._waited_s, 0.0)
        _, late = await asyncio.wait(self._running.values(), timeout=patience)
        running, self._running = self._running, {}
        self._waited_s += time.monotonic() - began
        self._schedule(late=bool(late))

        sampled: dict[str, list[TokenSequence]] = {}
        for name, task in running.items():
            if task in late:
                task.cancel()
                continue
            try:
                sampled[name] = self._sequences(task.result())
            except EngineError:
                continue  # the supervisor replaces the engine, and syncs the new one

        sequences = [sequence for of_engine in sampled.values() for sequence in of_engine]
        if not sequences:
            return
        expected = iter(await trainer.logprobs(sequences))
        for name, of_engine in sampled.items():
            differences = [np.abs(next(expected) - sequence.logprobs) for sequence in of_engine]
            if differences:
                self._judge(name, float(np.concatenate(differences).mean(dtype=np.float64)))

    async def sampled(self) -> None:
        """Wait until every engine has sampled the probe that runs, or failed."""
        if self._running:
            await asyncio.wait(self._running.values())

    def saw(self, kl: float | None) -> None:
        """Probe the next sync if a step's on-policy tokens differ; `kl` is their mean k3, None without any."""
        self._suspected = kl is not None and not kl <= self.tolerance.kl

    def cancel(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._running = {}

    def _schedule(self, *, late: bool) -> None:
        """Determine the next version that is probed, after engines were late or all have sampled."""
        if late:
            self._next_version = self._version + self._retry
            self._retry = min(2 * self._retry, INTERVAL)
            return
        self._retry = 1
        self._first_left -= 1
        self._next_version = self._version + (1 if self._first_left > 0 else INTERVAL)

    def _sequences(self, completions: Sequence[Completion]) -> list[TokenSequence]:
        """Return the completions that policy `_version` alone sampled, as sequences."""
        prompt = Prompt(f"probe/{self._version}@0", self._prompt, answer="", source="probe")
        return [
            TokenSequence.of(prompt, completion)
            for completion in completions
            if {span.version for span in completion.spans} == {self._version}
        ]

    def _judge(self, name: str, difference: float) -> None:
        if difference <= self.tolerance.difference:
            return
        problem = (
            f"{name} does not sample with the weights of policy {self._version}: the log-probabilities of the same "
            f"tokens differ from the trainer's by {difference:.3g} on average, and {self.dtype.name} explains "
            f"{self.tolerance.difference:g}. Run mode=parity with the same settings to see whether it is the sync; "
            "weight_sync.probe=warn trains on regardless"
        )
        if self.probe is Probe.stop:
            raise RunError(problem)
        self.warn(problem)
