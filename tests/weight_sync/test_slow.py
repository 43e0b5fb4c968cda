"""Weight syncs between every shape of trainer and engines, with processes killed and stopped, and many in a row."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.cluster.engine_factory import cores_of_ranks
from app.config.device import Dtype
from app.config.model import TINY_MODELS
from app.config.weight_sync import SyncMode, Verify
from app.errors import SyncError
from app.types import InFlight
from tests.conftest import make_engine
from tests.weight_sync.support import (
    TRANSPORTS,
    Weights,
    checksum,
    killed,
    make_synchronizer,
    make_trainer,
    request,
    set_weights,
    started,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DELTAS = 10
PUSHES = 200
WARM_UP = 20  # pushes after which nothing may grow
GROWTH_MIB = 30
TIMEOUT_S = 8.0


@pytest.mark.parametrize(
    ("name", "dtype", "width"),
    [
        ("tiny", Dtype.float32, 1),
        ("tiny", Dtype.bfloat16, 2),
        ("tiny_qwen35", Dtype.bfloat16, 1),
        ("tiny_qwen35", Dtype.bfloat16, 2),
    ],
)
async def test_two_ranks_push_the_same_bytes_into_every_shape_of_engines(
    name: str, dtype: Dtype, width: int, ray_session: None, tmp_path: Path
) -> None:
    """width 1: two engines; width 2: one engine of two ranks. Both transports, and one trainer rank to two engines."""
    model = TINY_MODELS / name
    flags: dict[str, Any] = {"dtype": dtype.name, "tp_size": width, "disable_radix_cache": name == "tiny_qwen35"}
    engines = [make_engine(model, tmp_path, name=f"engine {i}", **flags) for i in range(2 // width)]
    trainers = [make_trainer(model, tmp_path / f"{ranks}", ranks=ranks, dtype=dtype) for ranks in (2, 1)]
    settings: dict[str, Any] = {"verify": Verify.always, "tensor_parallel": width}
    with killed(*(engine.actor for engine in engines), *(rank for trainer in trainers for rank in trainer.ranks)):
        await asyncio.gather(*(each.actor.__ray_call__.remote(bind_ranks) for each in engines))
        await asyncio.gather(*(each.start(600) for each in engines))
        two, one = [await started(trainer) for trainer in trainers]
        for trainer, transports in ((two, TRANSPORTS), (one, ("collective",))):
            for transport in transports:
                for bucket_mib in (0.02, 512.0):
                    settings["bucket_mib"] = bucket_mib
                    synchronizer = await make_synchronizer(transport, trainer, engines, tmp_path, **settings)
                    await set_weights(trainer, 1)
                    await synchronizer.sync(1)  # compared with the export, and the engines with each other
                    noisy = [await checksum(engine) for engine in engines]
                    await set_weights(trainer, 0)
                    await synchronizer.sync(2)
                    plain = [await checksum(engine) for engine in engines]
                    assert noisy[0] != plain[0]
                    assert noisy[0] == noisy[-1]
                    assert plain[0] == plain[-1]
                    await synchronizer.close()
                    if dtype is Dtype.bfloat16:
                        await deltas(transport, trainer, engines, tmp_path, **settings)


async def deltas(transport: str, trainer: Any, engines: list[Any], folder: Path, **settings: Any) -> None:
    """Push small steps as deltas, then the same weights in full, and compare the engines' parameters."""
    synchronizer = await make_synchronizer(transport, trainer, engines, folder, mode=SyncMode.delta, **settings)
    assert (await synchronizer.sync(3)).changed_fraction is None
    for version in range(4, 4 + DELTAS):
        await trainer.call("weights", Weights.step, seed=version, size=1e-6)
        changed = (await synchronizer.sync(version)).changed_fraction
        assert changed is not None
        assert 0 < changed < 0.2
    after_deltas = [await checksum(engine) for engine in engines]
    await synchronizer.close()
    await synchronizer.abort()

    full = await make_synchronizer(transport, trainer, engines, folder, **settings)
    await full.sync(4 + DELTAS)
    assert [await checksum(engine) for engine in engines] == after_deltas
    await full.close()
    await full.abort()


def bind_ranks(host: Any) -> None:
    """Bind the ranks of an engine to cores, which SGLang requires on a CPU."""
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(os.cpu_count() or 1, 2)


LOSSES = [
    (signal.SIGKILL, "before"),
    (signal.SIGKILL, "in"),
    (signal.SIGKILL, "after"),
    (signal.SIGSTOP, "before"),
    (signal.SIGSTOP, "in"),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lost_engine_fails_its_push_in_time_and_its_replacement_gets_the_next(
    transport: str, ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    """Of two engines the second is killed or stopped repeatedly; the first survives."""

    engines = [make_engine(tiny_model, tmp_path, name=f"engine {i}") for i in range(2 + len(LOSSES))]
    trainer = make_trainer(tiny_model, tmp_path, ranks=2)
    with killed(*(engine.actor for engine in engines), *trainer.ranks):
        survivor, *others = engines
        infos = await asyncio.gather(*(engine.start(600) for engine in engines[:2]))
        pid = infos[1]["pid"]
        await started(trainer)
        synchronizer = await make_synchronizer(
            transport, trainer, engines[:2], tmp_path, bucket_mib=0.01, verify=Verify.always, timeout_s=TIMEOUT_S
        )
        await synchronizer.sync(0)
        for turn, (number, moment) in enumerate(LOSSES):
            await set_weights(trainer, turn)
            await lose(others[turn], pid, number, moment, synchronizer, 10 * turn)
            pid = (await others[turn + 1].start(600))["pid"]
            synchronizer.set_engines({0: survivor, 1: others[turn + 1]})
            await synchronizer.sync(10 * turn + 5)
            hashes = [await checksum(engine) for engine in synchronizer.engines.values()]
            assert hashes[0] == hashes[1]
            for engine in synchronizer.engines.values():
                (completion, _) = await engine.generate(request())
                assert [span.version for span in completion.spans] == [10 * turn + 5]


async def lose(engine: Any, pid: int, number: signal.Signals, moment: str, synchronizer: Any, version: int) -> None:
    """Kill or stop a server around a sync, whose error comes in time and names the engine."""
    if moment == "before":
        os.killpg(pid, number)
    syncing = asyncio.create_task(synchronizer.sync(version + 1))
    if moment == "in":
        await asyncio.sleep(0.05)
        os.killpg(pid, number)
    if moment == "after":
        await syncing
        os.killpg(pid, number)
        syncing = asyncio.create_task(synchronizer.sync(version + 2))
    began = time.monotonic()
    with pytest.raises(SyncError, match=engine.name):
        await syncing
    assert time.monotonic() - began < TIMEOUT_S + 5
    await engine.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_trainer_rank_fails_the_push_and_leaves_the_engine_answering(
    transport: str, ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    """Rank 1 of two dies during a sync; another trainer then syncs to the same engines."""

    engines = [make_engine(tiny_model, tmp_path, name=f"engine {i}") for i in range(2)]
    lost, other = (make_trainer(tiny_model, tmp_path / name, ranks=2) for name in ("lost", "other"))
    with killed(*(engine.actor for engine in engines), *lost.ranks, *other.ranks):
        await asyncio.gather(*(engine.start(600) for engine in engines))
        await started(lost)
        synchronizer = await make_synchronizer(
            transport, lost, engines, tmp_path, bucket_mib=0.01, verify=Verify.never, timeout_s=TIMEOUT_S
        )
        await synchronizer.sync(1)
        pid = await lost.ranks[1].pid.remote()
        syncing = asyncio.create_task(synchronizer.sync(2))
        await asyncio.sleep(0.03)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with contextlib.suppress(SyncError):
            await syncing  # it may have finished already
        with pytest.raises(SyncError, match="trainer rank"):
            await synchronizer.sync(3)
        assert time.monotonic() - began < TIMEOUT_S + 5
        await started(other)
        await set_weights(other, 1)
        again = await make_synchronizer(transport, other, engines, tmp_path, verify=Verify.always)
        await again.sync(4)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_many_pushes_do_not_grow(
    transport: str, ray_session: None, tiny_model: Path, tmp_path: Path, engine: Any
) -> None:
    """Memory, file handles and shared memory do not grow between 20 and 200 syncs, apart from allocator caches."""

    trainer = make_trainer(tiny_model, tmp_path)
    with killed(*trainer.ranks):
        await started(trainer)
        synchronizer = await make_synchronizer(
            transport, trainer, [engine], tmp_path, bucket_mib=0.05, verify=Verify.never, in_flight=InFlight.retract
        )
        server = await engine.actor.__ray_call__.remote(lambda host: host._connection.pid)
        processes = [psutil.Process(await trainer.ranks[0].pid.remote()), psutil.Process(server)]
        processes += processes[1].children(recursive=True)  # trainer rank, server and its children
        usages = []
        for version in range(1, PUSHES + 1):
            await synchronizer.sync(version)
            if version in (WARM_UP, PUSHES):
                usages.append(usage(processes))
        await set_weights(trainer, 0)
        await synchronizer.sync(0)
    early, late = usages
    assert late["handles"] <= early["handles"] + 5
    assert late["shared_files"] <= early["shared_files"]
    assert late["mib"] <= early["mib"] + GROWTH_MIB


def usage(processes: list[psutil.Process]) -> dict[str, float]:
    return {
        "mib": sum(anonymous_kib(process.pid) for process in processes) / 1024,
        "handles": sum(process.num_fds() for process in processes),
        "shared_files": len(list(Path("/dev/shm").glob("posttrain-*"))),
    }


def anonymous_kib(pid: int) -> int:
    """Return a process's private memory: its share of libraries depends on the other processes of the machine."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
