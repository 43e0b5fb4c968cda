"""`weight_sync.probe`: do the engines sample with the weights that the trainer holds?

A copy that an engine derives from its weights and does not renew (transposed, fused, cast), a kernel that computes
something else, a bucket that went nowhere: the checksums of `weight_sync.verify` see none of it. Log-probabilities do.

    start(v)   after the sync of policy v: every engine samples a few tokens, beside the rollouts
    check      before the update that ends v: the trainer's log-probabilities of the same tokens are compared

Invariants:
    - Engine and trainer compute with the same policy version, so that only rounding explains a difference.
    - Every prompt is new to the engines: nothing comes from a KV cache that an earlier policy filled. Tokens are
      sampled, not only scored, since prefill and decoding have kernels of their own.
    - The first syncs are probed, later ones now and then: 16 tokens decode in the time of any other request, and the
      trainer computes one more pass of a few hundred tokens. A step whose on-policy tokens differ
      (`mismatch/kl_same_version`) has the next sync probed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.config.device import Dtype
from app.config.weight_sync import Probe
from app.errors import EngineError, RunError
from app.protocols import RolloutEngine, Trainer
from app.types import Completion, GroupRequest, Prompt, Sampling, TokenSequence

PROMPT_TOKENS = 16
TOKEN_IDS = (4, 60)  # letters, digits and punctuation in byte-level vocabularies: no special token
COMPLETIONS = 4
MAX_TOKENS = 16
FIRST = 3  # syncs that are probed in any case
INTERVAL = 20  # policy versions between later probes


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding explains. Three times what `mode=parity` allows, for deeper models and other contexts."""

    difference: float  # mean |Δ log-probability| of an engine's probe
    kl: float  # of a step's on-policy tokens; above it the next sync is probed


TOLERANCES = {Dtype.float32: Tolerance(1e-3, 1e-6), Dtype.bfloat16: Tolerance(0.15, 0.02)}


class EngineProbe:
    """Probes the engines of a run.

    Example::

        probe.start(version=7, engines=pool.alive)
        …                                            # the step generates and adds its groups
        await probe.check(trainer)                   # the trainer still holds policy 7
    """

    def __init__(self, probe: Probe, dtype: Dtype, warn: Callable[[str], None]):
        self.probe = probe
        self.dtype = dtype
        self.tolerance = TOLERANCES[dtype]
        self.warn = warn
        self._first_left = FIRST
        self._suspected = False  # by the tokens of a step
        self._version = 0  # of the probe that runs
        self._prompt = np.zeros(0, dtype=np.int32)
        self._running: dict[str, asyncio.Task[list[Completion]]] = {}  # by the engine's name

    def start(self, version: int, engines: Sequence[RolloutEngine]) -> None:
        """Have these engines, which hold policy `version`, sample if a probe is due. Does not wait."""
        self.cancel()
        due = self._first_left > 0 or self._suspected or version % INTERVAL == 0
        if self.probe is Probe.never or not due:
            return

        self._first_left -= 1
        self._suspected = False
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
        running, self._running = self._running, {}
        sampled: dict[str, list[TokenSequence]] = {}
        for name, task in running.items():
            try:
                sampled[name] = self._sequences(await task)
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

    def saw(self, kl: float | None) -> None:
        """Have the next sync probed if a step's on-policy tokens differ; `kl` is their mean k3, None without any."""
        self._suspected = kl is not None and not kl <= self.tolerance.kl

    def cancel(self) -> None:
        """Forget a probe that runs."""
        for task in self._running.values():
            task.cancel()
        self._running = {}

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
