"""How long a weight sync takes, compared with its lower bound: `python -m tests.bench.weight_sync [--out FILE]`.

A model of Qwen3-0.6B's shapes (1.2 GB in bf16), one trainer rank, one real SGLang server on this machine's CPU. Every
round measures, one after the other: a memory copy of the model's bytes, a bare `dist.broadcast` of them to another
process, a sync over each transport, and the naive way (export, then `update_weights_from_disk`). Prints one JSON line.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.config.device import Dtype
from app.config.weight_sync import Verify
from app.device.base import abort_backend
from app.types import InFlight
from app.weight_sync.sender import Sender
from app.weight_sync.synchronizer import BucketedWeightSynchronizer
from app.weight_sync.transport.base import SENDER_EXTENSION
from app.weight_sync.transport.process_group import SyncProcessGroup
from tests.bench.machine import Options, machine, print_result, spread
from tests.bench.random_model import QWEN3_06B, save_random_qwen3


class Baselines:
    """An extension of trainer rank 0: what the bytes cost without a sync."""

    def __init__(self, trainer_rank: Any) -> None:
        self._process_group: SyncProcessGroup | None = None

    def copy(self, sizes: list[int]) -> float:
        source, target = (torch.ones(max(sizes), dtype=torch.uint8) for _ in range(2))
        began = time.perf_counter()
        for size in sizes:
            target[:size].copy_(source[:size])
        return time.perf_counter() - began

    def meet(self) -> int:
        self._process_group = SyncProcessGroup(
            backend="gloo",
            device=torch.device("cpu"),
            address="127.0.0.1",
            world_size=2,
            name="bare",
            timeout_s=120,
            abort_backend=abort_backend,
        )
        return self._process_group.port

    def broadcast(self, sizes: list[int]) -> float:
        assert self._process_group is not None
        while not self._process_group.joined():
            time.sleep(0.01)
        buffer = torch.ones(max(sizes), dtype=torch.uint8)
        bare = self._process_group._process_group
        dist.broadcast(buffer[:1], src=0, group=bare)
        began = time.perf_counter()
        for size in sizes:
            dist.broadcast(buffer[:size], src=0, group=bare)
        return time.perf_counter() - began


class Receiver:
    """The receiving process of the bare broadcast."""

    def meet(self, port: int) -> None:
        from sglang.srt.utils.common import init_custom_process_group

        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        method = f"tcp://127.0.0.1:{port}"
        self.group = init_custom_process_group("gloo", method, world_size=2, rank=1, group_name="bare")

    def receive(self, sizes: list[int]) -> None:
        buffer = torch.ones(max(sizes), dtype=torch.uint8)
        for size in [1, *sizes]:
            dist.broadcast(buffer[:size], src=0, group=self.group)


async def measure(rounds: int, bucket_mib: float, folder: Path) -> dict[str, Any]:
    import ray

    from tests.conftest import make_engine
    from tests.weight_sync.support import make_trainer, started

    model = save_random_qwen3(folder / "model", QWEN3_06B)
    engine = make_engine(model, folder, dtype="bfloat16", max_total_tokens=2048, log_level="warning")
    await engine.start(600)
    trainer = await started(make_trainer(model, folder, dtype=Dtype.bfloat16), weights=False)
    await trainer.attach("baselines", Baselines)
    receiver: Any = ray.remote(num_cpus=0)(Receiver).remote()
    meeting = receiver.meet.remote((await trainer.call("baselines", Baselines.meet))[0])
    await meeting

    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "broadcast", "ipc", "collective", "disk")}
    phases: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for transport in ("ipc", "collective"):
            synchronizer = await a_synchronizer(transport, trainer, engine, folder, bucket_mib)
            sizes = [bucket.bytes for bucket in synchronizer._buckets]
            await synchronizer.sync(1)  # builds the process group, touches every page
            seconds["copy"].append((await trainer.call("baselines", Baselines.copy, sizes=sizes))[0])
            if transport == "collective":
                receiving = receiver.receive.remote(sizes)
                seconds["broadcast"].append((await trainer.call("baselines", Baselines.broadcast, sizes=sizes))[0])
                await receiving
            report = await synchronizer.sync(2)
            seconds[transport].append(report.seconds["total"])
            phases[transport] = {phase: round(value, 3) for phase, value in report.seconds.items()}
            await synchronizer.abort()
        seconds["disk"].append(await from_disk(trainer, engine, folder / "export"))
    return {
        "what": "weight_sync",
        "model_bytes": sum(sizes),
        "bucket_mib": bucket_mib,
        "buckets": len(sizes),
        "seconds": {name: spread(values, 3) for name, values in seconds.items()},
        "phases_of_last_round": phases,
        "rounds": rounds,
        "machine": machine(),
    }


async def a_synchronizer(
    transport: str, trainer: Any, engine: Any, folder: Path, bucket_mib: float
) -> BucketedWeightSynchronizer:
    """Return a synchronizer that verifies nothing."""
    from tests.weight_sync.support import make_synchronizer

    return await make_synchronizer(
        transport,
        trainer,
        [engine],
        folder,
        bucket_mib=bucket_mib,
        verify=Verify.never,
        in_flight=InFlight.retract,
        timeout_s=300,
    )


async def from_disk(trainer: Any, engine: Any, folder: Path) -> float:
    began = time.perf_counter()
    await trainer.call(SENDER_EXTENSION, Sender.export, folder=folder)
    await engine.update("update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
    took = time.perf_counter() - began
    shutil.rmtree(folder)
    return took


def main() -> None:
    options = Options(__doc__, rounds=5)
    options.add_argument("--bucket-mib", type=float, default=512.0)
    given, _ = options.parse()
    print_result(lambda folder: measure(given.rounds, given.bucket_mib, folder), given.out)


if __name__ == "__main__":
    main()
