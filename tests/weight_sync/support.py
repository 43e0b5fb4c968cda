"""Real components for weight sync tests: trainer ranks, engines behind a proxy, and the expected weights."""

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from aiohttp import ClientSession, ClientTimeout, web

from app.config.device import DeviceKind, Dtype
from app.config.model import LoraConfig
from app.config.trainer import TrainerConfig
from app.config.weight_sync import Verify, WeightSyncConfig
from app.device import device_of
from app.types import GroupRequest, InFlight, Sampling
from app.utils.units import MIB
from app.weight_sync.synchronizer import BucketedWeightSynchronizer
from app.weight_sync.transport.collective import CollectiveTransport
from app.weight_sync.transport.ipc import IpcTransport
from app.weight_sync.verify import Verifier

PROMPT = np.array([5, 6, 7, 8, 9, 10], dtype=np.int32)
TRANSPORTS = ("ipc", "collective")


class Weights:
    """An extension of a trainer rank that sets the parameters: the checkpoint's plus seeded noise, or a small step."""

    def __init__(self, trainer_rank: Any) -> None:
        self.parameters = list(trainer_rank.model.parameters())
        self.original = [parameter.detach().clone() for parameter in self.parameters]

    def step(self, seed: int, size: float) -> None:
        """Change every parameter by about `size`, as an optimizer does: most 16-bit values stay as they are."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(size * torch.randn_like(parameter))

    def set(self, seed: int) -> None:
        """Seed 0 is the checkpoint itself."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter, original in zip(self.parameters, self.original, strict=True):
                parameter.copy_(original)
                if seed:
                    parameter.add_(0.05 * torch.randn_like(parameter))


def make_trainer(
    model: Path, folder: Path, *, ranks: int = 1, dtype: Dtype = Dtype.float32, lora: LoraConfig | None = None
) -> Any:
    """Create Ray actors of real trainer ranks, not set up yet."""
    import ray

    from app.trainer.rank import CONCURRENCY_GROUPS, TrainerRank
    from app.trainer.remote import RemoteTrainer
    from tests.trainer.support import rank_spec

    settings = {"trainer": TrainerConfig(tokens_per_microbatch=1024), "temperature": 1.0, "lora": lora or LoraConfig()}
    spec = rank_spec(model, folder, dtype=dtype, ranks=ranks, **settings)
    remote: Any = ray.remote  # whose stubs lack concurrency_groups
    make = remote(concurrency_groups=CONCURRENCY_GROUPS, num_cpus=0)(TrainerRank)
    return RemoteTrainer([make.remote(spec, rank) for rank in range(ranks)], timeout_s=120, logs=folder)


def rank_of(model: Any, rank: int = 0, kind: DeviceKind = DeviceKind.cpu, **spec: Any) -> Any:
    """What a sender reads of a trainer rank of this kind of device, whose tensors are on a CPU."""
    return SimpleNamespace(
        model=model,
        rank=rank,
        device=device_of(kind),
        torch_device=torch.device("cpu"),
        spec=SimpleNamespace(dtype=Dtype.bfloat16, **spec),
        require_onloaded=lambda *_: None,
    )


async def started(trainer: Any, *, weights: bool = True) -> Any:
    """Set up a trainer, by default with the `Weights` extension."""
    await trainer.setup()
    if weights:
        await trainer.attach("weights", Weights)
    return trainer


@contextmanager
def killed(*actors: Any) -> Iterator[None]:
    """Kill actors of Ray after the block."""
    import ray

    try:
        yield
    finally:
        for actor in actors:
            ray.kill(actor)


@contextmanager
def running(engine: Any, trainer: Any) -> Iterator[tuple[Any, Any]]:
    """Start an engine and a trainer, and end both after the block. Yields trainer, engine."""

    async def start() -> None:
        await asyncio.gather(engine.start(300), started(trainer))

    with killed(engine.actor, *trainer.ranks):
        asyncio.run(start())
        try:
            yield trainer, engine
        finally:
            asyncio.run(engine.stop())


async def make_synchronizer(
    transport: str,
    trainer: Any,
    engines: list[Any],
    folder: Path,
    *,
    verify: Verify = Verify.first,
    in_flight: InFlight = InFlight.drain,
    tensor_parallel: int = 1,
    backend: str = "gloo",
    **settings: Any,
) -> BucketedWeightSynchronizer:
    """Create and prepare a synchronizer. `settings` are those of `weight_sync`."""
    config = WeightSyncConfig(verify=verify, **{"bucket_mib": 512.0, "timeout_s": 60.0, **settings})
    synchronizer = BucketedWeightSynchronizer(
        trainer,
        dict(enumerate(engines)),
        config,
        IpcTransport(tensor_parallel) if transport == "ipc" else CollectiveTransport(backend, tensor_parallel),
        Verifier(verify, folder / "verify"),
        in_flight=in_flight,
        tensor_parallel=tensor_parallel,
        bucket_bytes=int((config.bucket_mib or 512) * MIB),
    )
    await synchronizer.prepare()
    return synchronizer


async def set_weights(trainer: Any, seed: int) -> None:
    await trainer.call("weights", Weights.set, seed=seed)


async def sync_in_full(trainer: Any, engine: Any, folder: Path) -> list[str]:
    """Give an engine the trainer's weights; returns the engine's checksums."""
    synchronizer = await make_synchronizer("ipc", trainer, [engine], folder, verify=Verify.never)
    await synchronizer.sync(0)
    await synchronizer.close()
    return await checksum(engine)


async def restore(trainer: Any, engine: Any, folder: Path) -> list[str]:
    """Give an engine the weights of the model's folder; returns its checksums."""
    await set_weights(trainer, 0)
    return await sync_in_full(trainer, engine, folder)


async def checksum(engine: Any) -> list[str]:
    """Return one hash of all parameters for each tensor-parallel rank of an engine."""
    answer = await engine.update("weights_checker", {"action": "checksum"})
    return [rank["per_gpu_checksum"] for rank in answer["ranks"]]


def request(*, tokens: int = 12, temperature: float = 1.0, group_size: int = 2, version: int = 0) -> GroupRequest:
    return GroupRequest(f"test/{secrets.token_hex(4)}", PROMPT, group_size, Sampling(temperature, 1.0, tokens), version)


# --- engines behind a proxy

Rule = Callable[[web.Request, Callable[[], Awaitable[web.Response]]], Awaitable[web.StreamResponse]]


class Proxy:
    """An HTTP proxy in front of a real server, in a background thread. `rules` inject faults by route."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.rules: dict[str, Rule] = {}  # by route
        self.seen: list[str] = []  # paths of all requests
        self.url = ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    async def _listen(self) -> None:
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        assert self._runner.server is not None
        listening = await self._loop.create_server(self._runner.server, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _end(self) -> None:
        await self._runner.cleanup()
        unanswered = asyncio.all_tasks() - {asyncio.current_task()}
        # replies that a rule delays
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)

    async def _handle(self, incoming: web.Request) -> web.StreamResponse:
        body = await incoming.read()
        self.seen.append(incoming.path)

        async def forward() -> web.Response:
            kept = ("Authorization", "Content-Type")
            headers = {key: value for key, value in incoming.headers.items() if key in kept}
            async with (
                ClientSession(timeout=ClientTimeout(total=None)) as session,
                session.request(incoming.method, self.target + incoming.path_qs, data=body, headers=headers) as reply,
            ):
                return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)

        rule = self.rules.get(incoming.path)
        return await (rule(incoming, forward) if rule else forward())


async def refuse(incoming: web.Request, forward: Any) -> web.Response:
    return web.json_response({"success": False, "message": "refused by the test"}, status=400)


async def drop_reply(incoming: web.Request, forward: Any) -> web.Response:
    """Forward the request and never reply."""
    await forward()
    await asyncio.sleep(3600)
    raise AssertionError


def once(rule: Rule, at: int = 0) -> Rule:
    """Apply a rule to one request only, the `at`-th."""
    calls = iter(range(10**9))

    async def only_once(incoming: web.Request, forward: Any) -> web.StreamResponse:
        return await (rule(incoming, forward) if next(calls) == at else forward())

    return only_once
