"""Engine hosts of our own making, requests, and what a process group is made of."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

from app.device.cpu import DEVICE
from app.rollout.host import EngineHost, HostSpec
from app.rollout.remote import RemoteEngine
from app.rollout.server import ServerSpec, free_port
from app.types import Completion, GroupRequest, Sampling

KEY = "a-key-that-nobody-may-see"
HOT = 50.0  # a temperature at which every token is about as likely as any other


def request(
    prompt_id: str = "test/0@0",
    *,
    group_size: int = 4,
    temperature: float = 1.0,
    max_tokens: int = 16,
    version: int = 0,
    tokens: tuple[int, ...] = (21, 15, 22, 33),
) -> GroupRequest:
    sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=max_tokens)
    return GroupRequest(prompt_id, np.array(tokens, dtype=np.int32), group_size, sampling, version)


def server_spec(model: Path, folder: Path, *, name: str, **flags: object) -> ServerSpec:
    return ServerSpec(
        name=name,
        model_path=str(model),
        host="127.0.0.1",
        port=free_port(),
        key=KEY,
        flags={
            **DEVICE.engine_args,
            "dtype": "float32",
            "skip-tokenizer-init": True,
            "max-total-tokens": 16384,
            **{flag.replace("_", "-"): value for flag, value in flags.items()},
        },
        environment={**DEVICE.engine_env, "OMP_NUM_THREADS": "1"},
        log=folder / f"{name.replace(' ', '_')}.log",
    )


def host_spec(
    folder: Path,
    *,
    name: str,
    server: ServerSpec | None = None,
    url: str | None = None,
    key: str | None = None,
    start_timeout_s: float = 300,
    stall_timeout_s: float = 60,
) -> HostSpec:
    return HostSpec(
        name=name,
        seed=0,
        start_timeout_s=start_timeout_s,
        stall_timeout_s=stall_timeout_s,
        releases_memory=False,
        log=folder / f"{name.replace(' ', '_')}_host.log",
        server=server,
        url=url,
        key=key,
    )


def remote(spec: HostSpec) -> RemoteEngine:
    """The host of this specification, not started."""
    return RemoteEngine(spec.name, ray.remote(EngineHost).options(max_concurrency=1024, num_cpus=0).remote(spec))


def largest_difference(
    model: Path, asked: Sequence[GroupRequest], groups: Sequence[Sequence[Completion]], *, seed: int = 0
) -> float:
    """Between the log-probabilities of these completions and transformers' own, with the noise of `seed`."""
    from tests.weight_sync.support import noisy_model

    policy, found = noisy_model(model, seed), 0.0
    for given, completions in zip(asked, groups, strict=True):
        assert len(completions) == given.group_size
        for completion in completions:
            tokens = torch.as_tensor(np.concatenate([given.token_ids, completion.token_ids]), dtype=torch.int64)
            with torch.no_grad():
                logits = policy(input_ids=tokens[None]).logits[0, len(given.token_ids) - 1 : -1]
            logs = torch.log_softmax(logits / given.sampling.temperature, dim=-1)
            theirs = logs.gather(1, tokens[len(given.token_ids) :, None]).squeeze(1).numpy()
            found = max(found, float(np.abs(completion.logprobs - theirs).max()))
    return found


def without_end(model: Path, folder: Path) -> Path:
    """A copy of a model directory whose completions end at the token limit only."""
    copy = Path(shutil.copytree(model, folder / "without_end"))
    for name in ("config.json", "generation_config.json"):
        if (copy / name).exists():
            settings: dict[str, Any] = json.loads((copy / name).read_text())
            (copy / name).write_text(json.dumps({**settings, "eos_token_id": None}))
    return copy


def group_of(pid: int) -> list[psutil.Process]:
    """The living processes of a process group, by its leader's pid."""
    return [process for process in psutil.process_iter() if _group(process) == pid and _alive(process)]


def _group(process: psutil.Process) -> int | None:
    import os

    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until it holds; returns the seconds it took, fails when that is too long."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - started


async def in_flight(engine: RemoteEngine, given: GroupRequest, seconds: float = 0.3) -> asyncio.Task[list[Completion]]:
    """A group that is being sampled."""
    task = asyncio.create_task(engine.generate(given))
    await asyncio.sleep(seconds)
    assert not task.done(), f"the group ended already: {task}"
    return task
