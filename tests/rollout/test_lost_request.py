"""One request that the real server loses, or aborts by itself, while it samples others."""

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from app.errors import EngineError, EngineLost
from app.rollout.remote import RemoteEngine
from app.types import FinishReason, InFlight
from tests.rollout.support import HOT, KEY, host_spec, in_flight, remote, request, server_spec, without_end

STALL_S = 4.0
# An SGLang plugin: requests of the prompt lost/… never reach the queue, those of aborted/… end without being asked to.
PLUGIN = """
def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", add, HookType.AROUND)


def add(original, scheduler, req, *args, **kwargs):
    if "/aborted/" in req.rid:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.to_finish = FINISH_ABORT("out of KV cache")
    if "/lost/" not in req.rid:
        original(scheduler, req, *args, **kwargs)
"""


def plugin_folder(folder: Path) -> Path:
    """A folder for PYTHONPATH in which SGLang finds `PLUGIN`, as if it were installed."""
    metadata = folder / "faulty-1.0.dist-info"
    metadata.mkdir()
    (folder / "faulty_plugin.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaulty = faulty_plugin:load\n")
    return folder


@pytest.fixture(scope="module")
def url(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A faulty server. Completions end at their token limit only."""
    folder = tmp_path_factory.mktemp("faulty")
    path = os.pathsep.join([str(plugin_folder(folder)), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = server_spec(without_end(tiny_model, folder), folder, name="engine 3", max_running_requests=4)
    server = replace(server, environment={**server.environment, "PYTHONPATH": path}, fork=None)
    owner = remote(host_spec(folder, name="engine 3", server=server))
    yield asyncio.run(owner.start(300))["url"]
    asyncio.run(owner.stop())
    ray.kill(owner.actor)


@pytest.fixture
def engine(url: str, tmp_path: Path) -> Iterator[RemoteEngine]:
    """A host of its own for each test: once an engine is lost, it stays lost."""
    engine = remote(host_spec(tmp_path, name="engine 4", url=url, key=KEY, stall_timeout_s=STALL_S))
    asyncio.run(engine.start(60))
    yield engine
    ray.kill(engine.actor)


async def sample_forever(engine: RemoteEngine) -> None:
    """Keep the server producing, with more requests than it samples at a time."""

    async def repeat(prompt: str) -> None:
        while True:
            await engine.generate(request(prompt, group_size=4, temperature=HOT, max_tokens=500))

    await asyncio.gather(repeat("good/0@0"), repeat("good/1@0"))


async def test_a_request_that_is_lost_while_others_are_sampled_loses_the_engine(engine: RemoteEngine) -> None:
    others = asyncio.create_task(sample_forever(engine))
    with pytest.raises(EngineLost) as lost:
        await asyncio.wait_for(engine.generate(request("lost/1@0")), 60)
    with pytest.raises(EngineLost):
        await others  # they were sampled until then
    result = lost.value
    assert re.search(r"engine 4 .*rollout.stall_timeout_s=4 s \(lost/1@0\)", str(result))


async def test_requests_of_a_paused_engine_are_not_lost(engine: RemoteEngine) -> None:
    task = await in_flight(engine, request(group_size=8, temperature=HOT, max_tokens=700))
    await engine.pause(InFlight.retract)
    await asyncio.sleep(2 * STALL_S)
    assert not task.done()
    await engine.resume()
    result = [completion.finish_reason for completion in await asyncio.wait_for(task, 120)]
    assert result == [FinishReason.length] * 8


def test_the_tokens_of_running_requests_count_as_sampled(engine: RemoteEngine) -> None:
    async def count() -> int:
        return (await engine.stats()).completion_tokens

    async def sample_group() -> list[int]:
        task = asyncio.create_task(engine.generate(request(group_size=4, temperature=HOT, max_tokens=1000)))
        counts = []
        while not task.done():
            counts.append(await count())
            await asyncio.sleep(0.05)
        await task
        return [*counts, await count()]

    async def run() -> list[int]:
        """Sample groups until one was counted while it ran: a fast machine ends some between two counts."""
        counts = [0]
        for groups in range(1, 21):
            counts += await sample_group()
            assert counts[-1] == groups * 4_000
            if any(each % 4_000 for each in counts):
                return counts
        raise AssertionError("none of 20 groups was counted while it ran")

    counts = asyncio.run(run())
    assert counts == sorted(counts)


async def test_an_abort_that_nobody_asked_for_is_an_error_of_that_prompt(engine: RemoteEngine) -> None:
    with pytest.raises(EngineError) as aborted:
        await asyncio.wait_for(engine.generate(request("aborted/1@0")), 60)
    assert len(await engine.generate(request("good/2@0"))) == 4  # the engine still serves
    error = aborted.value
    assert type(error) is EngineError
    assert re.search("engine 4 .* 4 of 4 .*aborted/1@0 .*: out of KV cache", str(error))
