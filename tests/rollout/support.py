"""Engine hosts with settings of our own, requests, and the process group of a server."""

import asyncio
import json
import os
import shutil
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

from app.device.torchvision_shim import transformers
from app.rollout.engine.host import EngineHost
from app.rollout.engine.remote import RemoteEngine
from app.rollout.engine.server import ServerSpec
from app.rollout.engine.server_connection import HostSpec
from app.types import Completion, GroupRequest, Sampling
from tests import conftest
from tests.waiting import alive

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


def server_spec(model: Path, folder: Path, *, name: str, **flags: Any) -> ServerSpec:
    return replace(conftest.server_spec(model, folder, name=name, **flags), key=KEY)


def host_spec(folder: Path, *, name: str, **settings: Any) -> HostSpec:
    log = folder / f"{name.replace(' ', '_')}_host.log"
    spec = HostSpec(name, start_timeout_s=300, stall_timeout_s=60, releases_memory=False, log=log)
    return replace(spec, **settings)


def remote(spec: HostSpec) -> RemoteEngine:
    """The host of this specification, not started."""
    return RemoteEngine(spec.name, ray.remote(EngineHost).options(max_concurrency=1024, num_cpus=0).remote(spec))


def engine_at(url: str, key: str, folder: Path, name: str) -> RemoteEngine:
    """The host of a running server, not started."""
    return remote(host_spec(folder, name=name, url=url, key=key))


def reply_of(url: str, key: str) -> Any:
    """What a server with this key replies."""
    call = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(call, timeout=60) as reply:
        return json.load(reply)


async def address_of(engine: RemoteEngine) -> tuple[str, str]:
    """The URL and the key of an engine's server."""
    return await engine.actor.__ray_call__.remote(_address_and_key)


def noisy_model(model: Path, seed: int) -> Any:
    """Transformers' own model with the weights that `set_weights` gives a trainer: seed 0 is the checkpoint itself."""
    policy = transformers().AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if seed:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def largest_difference(
    model: Path, requests: Sequence[GroupRequest], groups: Sequence[Sequence[Completion]], *, seed: int = 0
) -> float:
    """Between the log-probabilities of these completions and those of transformers, with the noise of `seed`."""
    policy = noisy_model(model, seed)
    largest = 0.0
    for given, completions in zip(requests, groups, strict=True):
        assert len(completions) == given.group_size
        for completion in completions:
            expected = transformers_logprobs(policy, completion, given)
            largest = max(largest, float(np.abs(completion.logprobs - expected).max()))
    return largest


def transformers_logprobs(policy: Any, completion: Completion, given: GroupRequest) -> np.ndarray:
    """The log-probabilities of a completion's tokens by transformers, at the temperature of the request."""
    tokens = torch.as_tensor(np.concatenate([given.token_ids, completion.token_ids]), dtype=torch.int64)
    with torch.no_grad():
        logits = policy(input_ids=tokens[None]).logits[0, len(given.token_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / given.sampling.temperature, dim=-1)
    return logprobs.gather(1, tokens[len(given.token_ids) :, None]).squeeze(1).numpy()


def without_end(model: Path, folder: Path) -> Path:
    """A copy of a model directory whose completions end at the token limit only."""
    copy = Path(shutil.copytree(model, folder / "without_end"))
    for name in ("config.json", "generation_config.json"):
        if (copy / name).exists():
            settings: dict[str, Any] = json.loads((copy / name).read_text())
            (copy / name).write_text(json.dumps({**settings, "eos_token_id": None}))
    return copy


def install_plugin(folder: Path, module: str, code: str | None = None) -> dict[str, str]:
    """Return the PYTHONPATH with which SGLang finds `module:load` as a plugin in `folder`, which gets its `code`."""
    metadata = folder / f"{module.replace('.', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = {module}:load\n")
    if code is not None:
        (folder / f"{module}.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def process_group(leader: int) -> list[psutil.Process]:
    """The processes of a process group that still run, by the leader's pid."""
    return [process for process in psutil.process_iter() if _group_of(process) == leader and alive(process)]


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


async def in_flight(engine: RemoteEngine, given: GroupRequest, *, running: int = 1) -> asyncio.Task[list[Completion]]:
    """A group that is being sampled, once the server runs at least `running` requests, of all groups together.

    A group that ended before that was seen is sampled again.
    """
    task = asyncio.create_task(engine.generate(given))
    url, key = await address_of(engine)
    async with asyncio.timeout(120):
        while await asyncio.to_thread(_running_requests, url, key) < running or task.done():
            if task.done():
                await task
                task = asyncio.create_task(engine.generate(given))
            await asyncio.sleep(0.01)
    return task


def _address_and_key(host: Any) -> tuple[str, str]:
    return host._connection.client().url, host.spec.key or host.spec.server.key


def _running_requests(url: str, key: str) -> int:
    """The requests that the server's scheduler has prefilled and is sampling."""
    return sum(load["num_running_reqs"] for load in reply_of(url + "/v1/loads?include=core", key)["loads"])
