"""How long a weight sync takes, compared with its lower bound: `python -m tests.bench.weight_sync [--out FILE]`.

A model of Qwen3-0.6B's shapes (1.2 GB in bf16), one trainer rank, one real SGLang server on this machine's CPU. Every
round measures, one after the other: a memory copy of the model's bytes, a bare `dist.broadcast` of them to another
process, a sync over each transport, and the naive way (export, then `update_weights_from_disk`). Ratios are medians of
the ratios of each round, so that a busy machine disturbs both sides alike. Then syncs during generation: how much
longer generation pauses than a sync to an idle engine takes. Prints one JSON line.
"""

import argparse
import asyncio
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
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
from tests.bench.machine import machine, print_result, spread
from tests.bench.random_model import QWEN3_06B, save_random_qwen3

TOKENS_IN_FLIGHT = 20


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
        from torch.distributed.distributed_c10d import (
            Backend,
            GroupName,
            PrefixStore,
            _new_process_group_helper,
            _world,
        )

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120), wait_for_workers=False)
        self.group, _ = _new_process_group_helper(
            2,
            1,
            [],
            Backend("gloo"),
            PrefixStore("bare", store),
            group_name=GroupName("bare"),
            timeout=timedelta(seconds=120),
        )
        _world.pg_group_ranks[self.group] = {0: 0, 1: 1}

    def receive(self, sizes: list[int]) -> None:
        buffer = torch.ones(max(sizes), dtype=torch.uint8)
        for size in [1, *sizes]:
            dist.broadcast(buffer[:size], src=0, group=self.group)


class Peak:
    """The peak PSS of processes during a block, less their PSS before it."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self.processes, self.mib, self._stop = processes, 0.0, threading.Event()

    def __enter__(self) -> "Peak":
        self._before = self._pss()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.mib = max(self.mib, self._pss() - self._before)
            self._stop.wait(0.05)

    def _pss(self) -> float:
        return sum(pss_kib(process.pid) for process in self.processes) / 1024


def pss_kib(pid: int) -> int:
    """Read the kernel's sum: reading the full map of a large process would disturb the measurement."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


async def measure(rounds: int, pauses_of_each: int, bucket_mib: float, folder: Path) -> dict[str, Any]:
    import ray

    from tests.conftest import make_engine
    from tests.weight_sync.support import make_trainer, started

    model = save_random_qwen3(folder / "model", QWEN3_06B)
    engine = make_engine(model, folder, dtype="bfloat16", max_total_tokens=2048, log_level="warning")
    info = await engine.start(600)
    trainer = await started(make_trainer(model, folder, dtype=Dtype.bfloat16), weights=False)
    await trainer.attach("baselines", Baselines)
    receiver: Any = ray.remote(num_cpus=0)(Receiver).remote()
    meeting = receiver.meet.remote((await trainer.call("baselines", Baselines.meet))[0])
    await meeting
    rank = psutil.Process(await trainer.ranks[0].pid.remote())
    servers = [psutil.Process(info["pid"]), *psutil.Process(info["pid"]).children(recursive=True)]

    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "broadcast", "ipc", "collective", "disk")}
    phases: dict[str, dict[str, float]] = {}
    extra: dict[str, float] = {}
    for transport in ("ipc", "collective"):
        trainer_mib, engine_mib = await extra_memory(transport, trainer, engine, folder, bucket_mib, rank, servers)
        extra |= {f"{transport}_trainer_extra_mib": trainer_mib, f"{transport}_engine_extra_mib": engine_mib}
    for _ in range(rounds):
        for transport in ("ipc", "collective"):
            synchronizer = await quiet_synchronizer(transport, trainer, engine, folder, bucket_mib)
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
    pauses = {
        in_flight.name: [
            await pause_over_sync(in_flight, trainer, engine, folder, bucket_mib) for _ in range(pauses_of_each)
        ]
        for in_flight in (InFlight.retract, InFlight.in_place)
        if pauses_of_each
    }
    copies = [min(pair) for pair in zip(seconds["copy"][::2], seconds["copy"][1::2], strict=True)]
    least = [bare + copy for bare, copy in zip(seconds["broadcast"], copies, strict=True)]
    return {
        "what": "weight_sync",
        "model_bytes": sum(sizes),
        "bucket_mib": bucket_mib,
        "buckets": len(sizes),
        "seconds": {name: spread(values, 3) for name, values in seconds.items()},
        "collective_over_broadcast_and_copy": ratio(seconds["collective"], least),
        "ipc_over_copy": ratio([value - 0.05 for value in seconds["ipc"]], copies),
        "disk_over_ipc": ratio(seconds["disk"], seconds["ipc"]),
        "disk_over_collective": ratio(seconds["disk"], seconds["collective"]),
        "pause_over_push_ms": {name: round(1000 * statistics.median(values)) for name, values in pauses.items()},
        "targets": {"collective_over_broadcast_and_copy": 1.5, "ipc_over_copy": 3.0, "pause_over_push_ms": 50},
        "phases_of_last_round": phases,
        **{name: round(value) for name, value in extra.items()},
        "rounds": rounds,
        "machine": machine(),
    }


async def pause_over_sync(in_flight: InFlight, trainer: Any, engine: Any, folder: Path, bucket_mib: float) -> float:
    """Return the seconds that a busy engine is paused for, less those of a sync to an idle one."""
    from tests.weight_sync.support import request

    synchronizer = await quiet_synchronizer("collective", trainer, engine, folder, bucket_mib, in_flight)
    await synchronizer.sync(1)
    idle = (await synchronizer.sync(2)).seconds["total"]
    generating = asyncio.create_task(engine.generate(request(tokens=TOKENS_IN_FLIGHT, temperature=50.0, group_size=2)))
    await asyncio.sleep(idle + 1)
    report = await synchronizer.sync(3)
    completions = await generating
    assert any(len(completion.spans) > 1 for completion in completions), "nothing was in flight at the sync"
    await synchronizer.abort()
    return report.seconds["total"] - report.seconds["gather"] - idle


async def quiet_synchronizer(
    transport: str,
    trainer: Any,
    engine: Any,
    folder: Path,
    bucket_mib: float,
    in_flight: InFlight = InFlight.retract,
) -> BucketedWeightSynchronizer:
    from tests.weight_sync.support import make_synchronizer

    return await make_synchronizer(
        transport,
        trainer,
        [engine],
        folder,
        bucket_mib=bucket_mib,
        verify=Verify.never,
        in_flight=in_flight,
        timeout_s=300,
    )


async def extra_memory(
    transport: str,
    trainer: Any,
    engine: Any,
    folder: Path,
    bucket_mib: float,
    rank: psutil.Process,
    servers: list[psutil.Process],
) -> tuple[float, float]:
    """Return the peak PSS in MiB of the trainer rank and of the server during a sync, buffers included."""
    with Peak([rank]) as trainer_peak, Peak(servers) as engine_peak:
        synchronizer = await quiet_synchronizer(transport, trainer, engine, folder, bucket_mib)
        await synchronizer.sync(1)
    await synchronizer.abort()
    await trainer.call(SENDER_EXTENSION, Sender.release)
    return trainer_peak.mib, engine_peak.mib


async def from_disk(trainer: Any, engine: Any, folder: Path) -> float:
    import shutil

    began = time.perf_counter()
    await trainer.call(SENDER_EXTENSION, Sender.export, folder=folder)
    await engine.update("update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
    took = time.perf_counter() - began
    shutil.rmtree(folder)
    return took


def ratio(upper: list[float], lower: list[float]) -> dict[str, float]:
    return spread((a / b for a, b in zip(upper, lower, strict=True)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pauses", type=int, default=2, help="syncs during generation, which take minutes")
    parser.add_argument("--bucket-mib", type=float, default=512.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print_result(lambda folder: measure(chosen.rounds, chosen.pauses, chosen.bucket_mib, folder), chosen.out)


if __name__ == "__main__":
    main()
