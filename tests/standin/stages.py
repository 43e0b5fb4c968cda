"""Everything that a trainer rank does, on the stand-in device: ranks of `TrainerRank` without Ray.

    PYTHONPATH=.:tests/standin python -m tests.standin.stages out.json

Writes {scenario: {stage: result}}. A stage that raised has the line and the error as its result.
"""

import contextlib
import gc
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any
from unittest import mock

CAPACITY = 16_384  # bytes of a bucket
SPARE = (20_000, 60_000, 110_000, 160_000)  # bytes of device memory that a step is left with


@dataclass(frozen=True)
class Scenario:
    family: str
    device: str = "npu"
    dtype: str = "float32"
    extras: bool = False  # reference, activation checkpointing, and Adam's moments on the host between updates
    cuda: bool = False  # torch's varlen attention, and no fused elementwise operators, as on CUDA


TWO_RANKS = {
    "qwen3 float32": Scenario("qwen3"),
    "qwen3 float32 cpu": Scenario("qwen3", device="cpu"),
    "qwen35 float32": Scenario("qwen35", extras=True),
    "qwen35 float32 cpu": Scenario("qwen35", device="cpu", extras=True),
    "qwen3 like cuda": Scenario("qwen3", dtype="bfloat16", cuda=True),
    "qwen35 bfloat16": Scenario("qwen35", dtype="bfloat16"),
}
ONE_RANK = {
    "qwen3 alone": Scenario("qwen3", dtype="bfloat16"),
    "qwen3 like cuda alone": Scenario("qwen3", dtype="bfloat16", cuda=True),
}


class Stages:
    """The results of a scenario's stages, on one rank."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def run(self, name: str, work: Callable[[], Any]) -> None:
        try:
            result = work()
            self.results[name] = "ok" if result is None else result
        except BaseException as error:
            self.results[name] = describe(error)


def describe(error: BaseException) -> str:
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/app/" in frame.filename]
    where = f"{own[-1].filename.split('/app/')[-1]}:{own[-1].lineno}" if own else "?"
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"failed at app/{where}: {type(error).__name__}: {first_line[:220]}"


class RankUnderTest:
    """A `TrainerRank` of a scenario and what the stages do with it."""

    def __init__(self, scenario: Scenario, rank: int, ranks: int, folder: Path) -> None:
        from app.config.algorithm import AlgorithmConfig, Kl
        from app.config.device import DeviceKind, Dtype
        from app.config.trainer import Checkpointing, TrainerConfig
        from app.trainer.rank import TrainerRank
        from tests.trainer.support import rank_spec, scored_groups

        self.scenario = scenario
        self.folder = folder
        self.others = self.allocated()  # bytes of earlier scenarios
        self.groups = scored_groups(6, shortest=3)
        spec = rank_spec(
            folder.parent / scenario.family,
            folder,
            device=DeviceKind[scenario.device],
            dtype=Dtype[scenario.dtype],
            trainer=TrainerConfig(
                lr=1e-3,
                tokens_per_microbatch=40,
                activation_checkpointing=Checkpointing.all if scenario.extras else Checkpointing.none,
            ),
            algorithm=AlgorithmConfig(kl=Kl.k3, kl_coefficient=0.1) if scenario.extras else AlgorithmConfig(),
            reference=scenario.extras,
            moments_on_host=scenario.extras,
            ranks=ranks,
        )
        with mock.patch("app.trainer.rank.log_to"):
            self.host = TrainerRank(spec, rank)

    @property
    def on_device(self) -> bool:
        return self.scenario.device != "cpu"

    def allocated(self) -> int:
        import torch

        gc.collect()
        return torch.get_device_module("npu").memory_allocated() if self.on_device else 0

    def step(self, version: int) -> dict[str, float]:
        self.host.begin_step(version)
        self.host.add_groups(self.groups)
        metrics = self.host.finish_step().metrics
        return {key: metrics[key] for key in ("grad_norm", "loss/policy", "entropy")}

    def moments(self) -> list[int]:
        """Bytes of Adam's moments on the device, and of the parameters there."""
        from app.model.sharding import local_shard

        optimizer = self.host.optimizer
        moments = [value for _, slot, value in optimizer.state() if slot != "step"]
        assert len(moments) == 2 * len(optimizer.parameters)
        return [
            sum(local_shard(each).untyped_storage().nbytes() for each in tensors)
            for tensors in (moments, optimizer.parameters)
        ]

    def old_logprobs(self) -> None:
        self.host.begin_step(3)
        self.host.old_logprobs(self.groups)
        for logprobs in self.host.step._old_logprobs.values():
            assert logprobs.device.type == "cpu"
        self.host.add_groups(self.groups)
        self.host.abort_step()

    def capture(self) -> None:
        before = self.allocated()
        self.host.capture()
        assert self.allocated() == before, "a capture keeps nothing on the device"

    def staged(self) -> None:
        """Copy a tensor of several pieces of the pinned buffers, the last one shorter."""
        import torch

        from app.trainer.host_state import HostCopier

        copier = HostCopier(self.host.torch_device, staging_bytes=90_000)
        values = torch.arange(100_000, dtype=torch.float32).view(100, 1000)
        tensor = values.to(self.host.torch_device)
        copy = copier(tensor)
        tensor.zero_()
        assert torch.equal(copy, values)
        assert torch.equal(copier(tensor[1:, ::2]), torch.zeros(99, 500)), "not contiguous"

    def starved(self) -> list[str]:
        """Run out of device memory at several places of a step, and abort each time. Returns the places."""
        import torch

        places = []
        for spare in SPARE:
            with self.memory_of(spare):
                try:
                    self.step(3)
                except torch.OutOfMemoryError as error:
                    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/app/" in frame.filename]
                    places.append(Path(own[-1].filename).name)
                    # Holds the frames of the pass, and with them its activations, until garbage is collected.
                    cycle: list[Any] = [error]
                    cycle.append(cycle)
                    del cycle
                self.host.abort_step()
        return places

    def starved_while_held(self) -> str:
        """Abort while somebody holds the error: there is no memory for the reset, but the step is closed."""
        import torch

        with self.memory_of(SPARE[0]):
            try:
                self.step(3)
            except torch.OutOfMemoryError:
                try:
                    self.host.abort_step()
                except torch.OutOfMemoryError:
                    return f"out of memory, the step is {'open' if self.host.step.open else 'closed'}"
        return "aborted"

    @contextmanager
    def memory_of(self, spare: int) -> Iterator[None]:
        """Leave the device only this many bytes."""
        import torch_npu

        torch_npu.refuse(memory=self.allocated() + spare)
        try:
            yield
        finally:
            torch_npu.refuse(memory=2**40)

    def offload(self) -> dict[str, int]:
        from app.types import TrainerMemory

        before = self.allocated()
        for region in TrainerMemory:
            self.host.offload(region)
        return {"before": before - self.others, "after": self.allocated() - self.others}

    def onload(self) -> None:
        from app.types import TrainerMemory

        for region in TrainerMemory:
            self.host.onload(region)

    def waits(self) -> dict[str, int]:
        """Where a step makes the host wait for the device."""
        from tests.standin.host_waits import HostWaits

        with HostWaits("npu") as found:
            self.step(9)
        return dict(found.lines)

    def exported(self) -> dict[str, float]:
        """Export the checkpoint of step 2, and return the sum of |w| of each tensor."""
        from app.trainer.checkpoint_state import read_weights

        return {name: tensor.double().abs().sum().item() for name, tensor in read_weights(self.folder / "step_2")}

    def push(self, kind: type, snapshot: Any) -> dict[str, int]:
        """Gather every bucket of a weight sync, and of a delta sync if there is a snapshot; compare the bytes."""
        import torch

        from app.weight_sync.buckets import plan_buckets

        sender = kind(self.host)
        counts = {"buckets": 0, "different": 0, "changed": 0}
        without = {"ipc_handle": mock.Mock(return_value=None), "send": mock.Mock()}
        with mock.patch.multiple(kind, **without):
            sender.prepare(plan_buckets(sender.describe(), capacity=CAPACITY), snapshot, 1)
            for base in (None, 2) if snapshot else (None,):
                if base is not None:
                    with torch.no_grad():
                        next(iter(self.host.model.parameters())).add_(0.5)
                ready, index = sender.begin(3, base, [0]), 0
                while ready is not None:
                    counts["buckets"] += 1
                    counts["changed"] += ready.changed or 0
                    if base is None:
                        counts["different"] += self._different(sender, ready, index)
                    ready, index = sender.send_and_gather_next(index), index + 1
        return counts

    def _different(self, sender: Any, ready: Any, index: int) -> int:
        """Tensors of a gathered bucket that differ from the parameters. A collective."""
        import torch

        from app.model.sharding import full_tensor
        from app.weight_sync.sender import BUFFERS

        different = 0
        for meta, offset in zip(ready.bucket.tensors, ready.bucket.offsets, strict=True):
            if meta.name not in sender.tensors:
                continue  # the header of a delta sync
            dtype = getattr(torch, meta.dtype)
            expected = full_tensor(sender.tensors[meta.name].detach()).to(dtype).reshape(-1)
            if sender.buffers:
                actual = sender.buffers[index % BUFFERS][offset : offset + meta.bytes].view(dtype)
                different += not torch.equal(actual, expected)
        return different


def play(scenario: Scenario, rank: int, ranks: int, folder: Path, port: int) -> dict[str, Any]:
    """Run all stages of a scenario on this rank."""
    import torch.distributed as dist

    from app.config.weight_sync import SnapshotPlace
    from app.device import npu
    from app.offload.trainer import Offload
    from app.trainer.rank import OFFLOAD, TrainerRank
    from app.weight_sync.transport.collective import BroadcastSender
    from app.weight_sync.transport.ipc import IpcSender

    device = npu.DEVICE
    if scenario.cuda:
        npu.DEVICE = replace(device, attention_kernel=None, elementwise=None)
    folder.mkdir(exist_ok=True)
    stages = Stages()
    under_test = RankUnderTest(scenario, rank, ranks, folder)
    host = under_test.host
    with mock.patch.object(TrainerRank, "_device_index", lambda self: self.rank):
        stages.run("setup", lambda: host.setup("127.0.0.1", port))
    npu.DEVICE = device

    stages.run("step 1", lambda: under_test.step(1))
    stages.run("step 2", lambda: under_test.step(2))
    stages.run("moments", under_test.moments)
    stages.run("old log-probabilities", under_test.old_logprobs)
    stages.run("memory", lambda: host.memory() and None)
    stages.run("capture", under_test.capture)
    stages.run("staged copy", under_test.staged)
    stages.run("write", lambda: host.write(folder / "step_2") and None)
    stages.run("step 3", lambda: under_test.step(3))
    stages.run("restore", lambda: host.restore(folder / "step_2", 2))
    if ranks == 1:
        stages.run("out of memory", under_test.starved)
    stages.run("step 3 again", lambda: under_test.step(3))

    host.attach(OFFLOAD, lambda each: Offload(each, moves=under_test.on_device))
    stages.run("offload", under_test.offload)
    stages.run("capture offloaded", under_test.capture)
    stages.run("write offloaded", lambda: host.write(folder / "step_3") and None)
    stages.run("onload", under_test.onload)
    stages.run("step 4", lambda: under_test.step(4))

    stages.run("sync over collective", lambda: under_test.push(BroadcastSender, None))
    stages.run("sync over ipc", lambda: under_test.push(IpcSender, None))
    if scenario.dtype == "bfloat16":  # a delta sync compares 16-bit values
        stages.run("delta, snapshot on the device", lambda: under_test.push(BroadcastSender, SnapshotPlace.device))
        stages.run("delta, snapshot on the host", lambda: under_test.push(IpcSender, SnapshotPlace.host))
    stages.run("export", under_test.exported)
    if ranks == 1:
        stages.run("host waits", under_test.waits)
        stages.run("out of memory, error held", under_test.starved_while_held)

    dist.destroy_process_group()
    gc.unfreeze()
    return stages.results


def below_the_ephemeral(count: int) -> list[int]:
    """Free ports that no other process is given while the earlier scenarios run."""
    from app.utils.net import reserve_port

    found = []
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), reserve_port("127.0.0.1", port):
            found.append(port)
    return found[:count]


def run_rank(rank: int, ranks: int, scenarios: dict[str, Scenario], folder: Path, ports: list[int], out: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANK"] = str(rank)
    import torch_npu

    from tests.standin import varlen_double

    torch_npu.native.set_devices(ranks)
    torch_npu.refuse(float64=True)
    varlen_double.register("npu")

    results = {}
    for (name, scenario), port in zip(scenarios.items(), ports, strict=True):
        results[name] = play(scenario, rank, ranks, folder / name.replace(" ", "_"), port)
        if rank == 0:
            out.write_text(json.dumps(results))


def main() -> None:
    import torch.multiprocessing as mp

    set_forkserver_preload(["tests.standin.imported"])
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        from tests.model.support import save_qwen3, save_qwen35

        save_qwen3(folder / "qwen3")
        save_qwen35(folder / "qwen35", spread=0.05)  # wider weights would amplify rounding from step to step
        for ranks, scenarios in ((2, TWO_RANKS), (1, ONE_RANK)):
            ports = below_the_ephemeral(len(scenarios))
            out = folder / f"{ranks}.json"
            mp.start_processes(
                run_rank, (ranks, scenarios, folder, ports, out), nprocs=ranks, start_method="forkserver"
            )
            results |= json.loads(out.read_text())
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    from app.device.torchvision_shim import define_operators

    define_operators()
    main()
