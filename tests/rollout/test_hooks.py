"""A server in which SGLang has not installed all of our hooks does not start, and says which are missing."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from app.rollout.engine.server import Server, ServerSpec
from app.rollout.engine.sglang_plugin.entry_points import INTERNAL_STATE, SCHEDULER
from tests.rollout.support import install_plugin, server_spec

MISSPELLED = INTERNAL_STATE.replace("internal", "infernal")
PLUGIN = f"""
def load():
    from app.rollout.engine.sglang_plugin import entry_points

    entry_points.INTERNAL_STATE = {MISSPELLED!r}
"""


async def end_of(spec: ServerSpec) -> str:
    """The error of a server that does not start."""
    server = Server(spec)
    await server.start()
    try:
        return str(await asyncio.wait_for(server.died(), 200))
    finally:
        await server.stop()


@pytest.mark.slow  # its process imports SGLang
@pytest.mark.timeout(240)
async def test_a_server_whose_sglang_lacks_a_target_names_it(tiny_model: Path, tmp_path: Path) -> None:
    spec = server_spec(tiny_model, tmp_path, name="engine 0")
    plugin = install_plugin(tmp_path, "misspelling_plugin", PLUGIN)
    error = await end_of(replace(spec, environment={**spec.environment, **plugin}, fork=None))
    assert MISSPELLED in error.splitlines()[-1]
    assert "exited with code 1" in error


async def test_a_server_that_does_not_run_our_plugin_does_not_start(tiny_model: Path, tmp_path: Path) -> None:
    spec = server_spec(tiny_model, tmp_path, name="engine 0")
    error = await end_of(replace(spec, environment={**spec.environment, "SGLANG_PLUGINS": "another"}))
    assert SCHEDULER in error.splitlines()[-1]
    assert "exited with code 1" in error
