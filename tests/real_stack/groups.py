"""The process group of a weight sync between the trainer's side and SGLang's, on Gloo."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

SIZE = 2**20
NAME = "weight_update_real_stack"
DEADLINE_S = 400.0  # the engine's side imports SGLang first


def join_broadcast_and_abort() -> dict[str, Any]:
    """Both sides join, one broadcast arrives, the engine leaves, and the trainer's side aborts in time."""
    import torch

    from app.device.base import abort_backend
    from app.weight_sync.transport.process_group import SyncProcessGroup

    group = SyncProcessGroup(
        backend="gloo",
        device=torch.device("cpu"),
        address="127.0.0.1",
        world_size=2,
        name=NAME,
        timeout_s=DEADLINE_S,
        abort_backend=abort_backend,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=_engine, args=(group.port, theirs), daemon=True)
    engine.start()
    deadline = time.monotonic() + DEADLINE_S
    while not group.joined():
        assert engine.exitcode is None, f"the engine ended with {engine.exitcode}"
        assert time.monotonic() < deadline, "the engine did not join"
        time.sleep(0.05)

    group.broadcast(torch.ones(SIZE, dtype=torch.uint8))
    group.wait(30)
    assert ours.poll(30), "the engine received nothing"
    received = ours.recv()
    assert received == SIZE, received

    began = time.monotonic()
    group.abort()
    aborted = time.monotonic() - began
    engine.join(30)
    assert engine.exitcode == 0, engine.exitcode
    assert aborted < 5, aborted
    return {"bytes": received, "torch": torch.__version__}


def _engine(port: int, answer: Connection) -> None:
    """The engine's side, as SGLang's weight updater builds it."""
    import torch
    import torch.distributed as dist
    from sglang.srt.utils.common import init_custom_process_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    method = f"tcp://127.0.0.1:{port}"
    group = init_custom_process_group(backend="gloo", init_method=method, world_size=2, rank=1, group_name=NAME)
    received = torch.empty(SIZE, dtype=torch.uint8)
    dist.broadcast(received, src=0, group=group)
    answer.send(int(received.sum()))
    dist.destroy_process_group(group)
