"""A delta sync compared with a full sync of the same weights: `python -m tests.bench.delta [--out FILE]`.

A model of Qwen3-0.6B's shapes (596 M parameters in bf16), one trainer rank with one thread, one real SGLang server on
this machine's CPU, `collective` over loopback. Every round: a full sync, a step of AdamW (betas 0.9 and 0.999,
gradients of a signal-to-noise ratio of 0.1, moments kept in bf16 to save memory), a delta sync, and the engine's
checksum after it compared with the one after the next full sync. First some steps without a sync, since Adam's first
ones are its largest. Prints one JSON line.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.config.device import Dtype
from app.config.weight_sync import SyncMode
from app.types import SyncReport
from tests.bench.machine import Options, machine, print_result, spread
from tests.bench.random_model import QWEN3_06B, save_random_qwen3
from tests.bench.weight_sync import a_synchronizer

BETAS, EPSILON, SIGNAL = (0.9, 0.999), 1e-8, 0.1
WARM_STEPS = 5
SLICE = 2**23  # elements that a step works on at once


class Adam:
    """An extension of a trainer rank: AdamW steps on its master weights, with gradients that are mostly noise."""

    def __init__(self, trainer_rank: Any) -> None:
        self.parameters = list(trainer_rank.model.parameters())
        self.moments = [tuple(torch.zeros_like(_local(p), dtype=torch.bfloat16) for _ in "mv") for p in self.parameters]
        self.steps = 0
        with torch.no_grad():  # norms are near 1 in a trained model
            for parameter in self.parameters:
                if parameter.dim() == 1:
                    _local(parameter).add_(1.0)

    def step(self, rate: float, count: int = 1) -> None:
        with torch.no_grad():
            for _ in range(count):
                self.steps += 1
                for parameter, (mean, square) in zip(self.parameters, self.moments, strict=True):
                    whole = [each.view(-1).split(SLICE) for each in (_local(parameter), mean, square)]
                    for weights, means, squares in zip(*whole, strict=True):
                        _step(weights, means, squares, self.steps, rate)


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _step(master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int, rate: float) -> None:
    gradient = torch.randn_like(master).add_(SIGNAL)
    mean.copy_(mean.float().lerp_(gradient, 1 - BETAS[0]))
    square.copy_(square.float().lerp_(gradient.square_(), 1 - BETAS[1]))
    root = square.float().div_(1 - BETAS[1] ** step).sqrt_().add_(EPSILON)
    master.addcdiv_(mean.float(), root, value=-rate / (1 - BETAS[0] ** step))


class PrefixedTrainer:
    """The trainer with prefixed extension names, so that two synchronizers have a sender each."""

    def __init__(self, trainer: Any, prefix: str) -> None:
        self.trainer, self.prefix = trainer, prefix

    async def attach(self, name: str, make: Any) -> None:
        await self.trainer.attach(self.prefix + name, make)

    async def call(self, extension: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        return await self.trainer.call(self.prefix + extension, method, *args, **kwargs)

    async def interrupt(self, extension: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        await self.trainer.interrupt(self.prefix + extension, method, *args, **kwargs)

    async def source(self) -> tuple[str, int]:
        return await self.trainer.source()


@dataclass(frozen=True)
class Rounds:
    """Full and delta syncs of the same weights, by mode."""

    reports: Mapping[str, list[SyncReport]] = field(default_factory=lambda: {"full": [], "delta": []})
    equal: list[bool] = field(default_factory=list)  # whether a delta left what a full sync would

    def totals(self, mode: str) -> list[float]:
        return [report.seconds["total"] for report in self.reports[mode]]

    def result(self) -> dict[str, Any]:
        """Return what a result file has of them."""
        full, delta = self.reports["full"], self.reports["delta"]
        return {
            "bit_equal_to_a_full_push": all(self.equal),
            "changed_fraction": median(report.changed_fraction or 0.0 for report in delta),
            "bytes_over_full": spread((a.bytes / b.bytes for a, b in zip(delta, full, strict=True)), 4),
            "seconds_over_full": spread(
                (a / b for a, b in zip(self.totals("delta"), self.totals("full"), strict=True)), 3
            ),
            "seconds": {mode: spread(self.totals(mode), 3) for mode in self.reports},
            "phases": {mode: phases(reports) for mode, reports in self.reports.items()},
        }


async def side_by_side(
    trainer: Any, engine: Any, folder: Path, *, rounds: int, rate: float, bucket_mib: float
) -> Rounds:
    """Measure a full sync, then a step and a delta sync, and compare with the next full one."""
    from app.rollout.engine.remote import RemoteEngine
    from tests.weight_sync.support import checksum

    await trainer.attach("adam", Adam)
    await trainer.call("adam", Adam.step, rate=rate, count=WARM_STEPS)
    full, delta = [
        await a_synchronizer("collective", PrefixedTrainer(trainer, f"{mode.name}_"), engine, folder, bucket_mib, mode)
        for mode in (SyncMode.full, SyncMode.delta)
    ]
    await full.sync(0)
    found = Rounds()
    for version in range(1, rounds + 1):
        found.reports["full"].append(await full.sync(10 * version))
        # the full sync above left the engine no version to base a delta on: present it as a new engine
        delta.set_engines({0: RemoteEngine(engine.name, engine.actor)})
        await delta.sync(10 * version + 1)
        await trainer.call("adam", Adam.step, rate=rate)
        found.reports["delta"].append(await delta.sync(10 * version + 2))
        after_delta = await checksum(engine)
        await full.sync(10 * version + 3)
        found.equal.append(await checksum(engine) == after_delta)
    return found


async def measure(rounds: int, rate: float, bucket_mib: float, folder: Path) -> dict[str, Any]:
    from tests.conftest import make_engine
    from tests.weight_sync.support import make_trainer, started

    model = save_random_qwen3(folder / "model", QWEN3_06B)
    engine = make_engine(model, folder, dtype="bfloat16", max_total_tokens=2048, log_level="warning")
    await engine.start(600)
    trainer = await started(make_trainer(model, folder, dtype=Dtype.bfloat16), weights=False)
    found = await side_by_side(trainer, engine, folder, rounds=rounds, rate=rate, bucket_mib=bucket_mib)
    parameters = found.reports["full"][0].bytes // 2
    return {
        "what": "delta",
        "parameters": parameters,
        "shapes": QWEN3_06B,
        "lr": rate,
        "bucket_mib": bucket_mib,
        **found.result(),
        "targets": {"bytes_over_full": 0.02, "seconds_over_full": 0.35},
        "sender_extra_bytes": 2 * parameters,
        "rounds": rounds,
        "machine": machine(),
    }


def phases(reports: list[SyncReport]) -> dict[str, float]:
    return {phase: median(report.seconds[phase] for report in reports) for phase in reports[0].seconds}


def median(values: Any) -> float:
    return round(statistics.median(values), 4)


def options() -> Options:
    """The arguments of this benchmark and of the one over a link."""
    made = Options(__doc__)
    made.add_argument("--lr", type=float, default=1e-6)
    made.add_argument("--bucket-mib", type=float, default=512.0)
    return made


def main() -> None:
    given, _ = options().parse()
    print_result(lambda folder: measure(given.rounds, given.lr, given.bucket_mib, folder), given.out)


if __name__ == "__main__":
    main()
