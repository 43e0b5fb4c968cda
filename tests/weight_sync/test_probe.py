"""An engine that does not sample with the trainer's weights ends the run; rounding and lost engines do not."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from app.config.device import Dtype
from app.config.weight_sync import Probe
from app.errors import EngineLost, RunError
from app.types import Completion, FinishReason, GroupRequest, TokenSequence, VersionSpan
from app.weight_sync.probe import COMPLETIONS, FIRST, INTERVAL, EngineProbe
from tests.rollout import caching_double
from tests.runs import Run


@dataclass
class Engine:
    """Samples tokens whose log-probabilities are `off` from the trainer's."""

    name: str
    off: float = 0.0
    version: int | None = None  # that sampled them; None: the requested one
    lost: bool = False
    seconds: float = 0.0
    requests: list[GroupRequest] = field(default_factory=list)

    async def generate(self, request: GroupRequest) -> list[Completion]:
        self.requests.append(request)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.lost:
            raise EngineLost("it died")
        tokens = request.sampling.max_tokens
        version = request.version if self.version is None else self.version
        ids, spans = np.arange(tokens, dtype=np.int32), (VersionSpan(version, 0, tokens),)
        logprobs = (-0.1 * ids + self.off).astype(np.float32)
        return request.group_size * [Completion(ids, logprobs, FinishReason.length, spans)]


@dataclass
class Trainer:
    calls: list[int] = field(default_factory=list)  # sequences

    async def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        self.calls.append(len(sequences))
        return [(-0.1 * sequence.token_ids[sequence.sampled]).astype(np.float32) for sequence in sequences]


def probed(probe: EngineProbe, trainer: Trainer, *engines: Engine, version: int = 1) -> None:
    async def start_and_check() -> None:
        probe.start(version, cast(Any, engines))
        if probe.running:
            await probe.check(cast(Any, trainer))

    asyncio.run(start_and_check())


def make(probe: Probe = Probe.stop, dtype: Dtype = Dtype.bfloat16) -> tuple[EngineProbe, list[str]]:
    warnings: list[str] = []
    return EngineProbe(probe, dtype, warnings.append), warnings


def test_engines_with_the_same_weights_pass_and_are_compared_in_one_call() -> None:
    probe, warnings = make()
    trainer, engines = Trainer(), (Engine("engine 0", 0.01), Engine("engine 1", -0.01))
    probed(probe, trainer, *engines)
    assert trainer.calls == [2 * COMPLETIONS]
    assert warnings == []


@pytest.mark.parametrize(
    ("dtype", "off", "passes"),
    [
        (Dtype.float32, 1e-4, True),
        (Dtype.float32, 0.01, False),
        (Dtype.bfloat16, 0.05, True),
        (Dtype.bfloat16, -0.3, False),
        (Dtype.bfloat16, float("nan"), False),
    ],
)
def test_a_difference_that_the_dtype_does_not_explain_names_engine_version_and_both_numbers(
    dtype: Dtype, off: float, passes: bool
) -> None:
    probe, _ = make(dtype=dtype)
    engines = (Engine("engine 0"), Engine("engine 1", off))
    if passes:
        probed(probe, Trainer(), *engines, version=7)
        return
    with pytest.raises(RunError) as failure:
        probed(probe, Trainer(), *engines, version=7)
    for part in ("engine 1 ", "policy 7", f" {abs(off):.3g} ", f"{probe.tolerance.difference:g}"):
        assert part in str(failure.value)


def test_with_warn_the_run_goes_on_and_with_never_nothing_is_sampled() -> None:
    probe, warnings = make(Probe.warn)
    probed(probe, Trainer(), Engine("engine 0", 1.0))
    assert len(warnings) == 1

    probe, warnings = make(Probe.never)
    engine, trainer = Engine("engine 0", 1.0), Trainer()
    probed(probe, trainer, engine)
    assert (engine.requests, trainer.calls, warnings) == ([], [], [])


def test_a_lost_engine_and_tokens_of_another_version_are_left_out() -> None:
    probe, _ = make()
    trainer = Trainer()
    engines = (Engine("engine 0", lost=True), Engine("engine 1", 1.0, version=0), Engine("engine 2"))
    probed(probe, trainer, *engines, version=3)
    assert trainer.calls == [COMPLETIONS]


def test_the_first_syncs_are_probed_then_some_and_the_one_after_on_policy_tokens_differed() -> None:
    probe, _ = make()
    trainer, engine = Trainer(), Engine("engine 0")
    probed_versions = []
    for version in range(2 * INTERVAL + 1):
        before = len(trainer.calls)
        probed(probe, trainer, engine, version=version)
        probed_versions += [version] * (len(trainer.calls) - before)
        probe.saw({10: 0.5, 11: None, 12: 1e-4, 13: float("nan")}.get(version))
    assert probed_versions == [0, 1, 2, 11, 14, 14 + INTERVAL]
    assert len({request.token_ids.tobytes() for request in engine.requests}) == len(probed_versions)  # other prompts


def test_the_trainer_does_not_wait_for_a_busy_engine_and_the_next_version_is_probed() -> None:
    probe, _ = make()
    trainer, ready, busy = Trainer(), Engine("engine 0"), Engine("engine 1", seconds=60.0)
    for version in range(FIRST):
        probed(probe, trainer, ready, version=version)
    asked = []
    for version in range(INTERVAL + FIRST, INTERVAL + FIRST + 9):
        before = len(busy.requests)
        probed(probe, trainer, ready, busy, version=version)
        asked += [version - INTERVAL - FIRST] * (len(busy.requests) - before)
    assert asked == [0, 1, 3, 7]  # less and less often
    assert trainer.calls == [COMPLETIONS] * (FIRST + len(asked))


def test_after_on_policy_tokens_differed_the_trainer_waits_for_the_engine() -> None:
    probe, _ = make()
    engine, trainer = Engine("engine 0", 1.0, seconds=0.2), Trainer()
    probed(probe, trainer, engine)
    assert trainer.calls == []
    probe.saw(0.5)
    with pytest.raises(RunError):
        probed(probe, trainer, engine)


ON_POLICY = {
    "fully_async": ("placement=fully_async", "placement.max_staleness=0", "placement.in_flight=drain"),
    "colocate": ("placement=colocate",),
}


@pytest.mark.parametrize("placement", ["fully_async", pytest.param("colocate", marks=pytest.mark.slow)])
def test_a_run_whose_engine_keeps_copies_of_old_weights_ends_and_names_it(tmp_path: Path, placement: str) -> None:
    variables = caching_double.assignments(caching_double.environment(tmp_path))
    overrides = (*ON_POLICY[placement], "steps=30", "eval.every=0", "eval.before_train=false")
    run = Run(tmp_path, *overrides, prefix=["env", *variables], imports_sglang=True)
    assert run.wait() == 1
    assert re.search(r"engine 0 .* policy [1-9]\b", run.text), run.text
    assert 1 <= len(run.metrics()) < 30  # policy 0 is that of the checkpoint, which the copies were made of
