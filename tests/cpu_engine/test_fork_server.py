"""Servers that are forked from a process that has imported SGLang."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.cpu_engine.forked_server import fork, fork_server
from app.device.cpu import DEVICE
from app.rollout.engine.server import Server
from tests.rollout.support import process_group, server_spec
from tests.runs import shared_fork_server
from tests.waiting import until


async def test_a_forked_server_has_its_own_arguments_environment_log_and_process_group(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Also after hosts that went away in the middle of their requests."""
    for part in (b"", b"\n"):
        with socket.socket(socket.AF_UNIX) as rude:
            rude.connect(str(shared_fork_server().args[0]))
            rude.sendall(part)

    servers = [Server(server_spec(tiny_model, tmp_path, name=f"engine {index}")) for index in range(2)]
    for server in servers:
        await server.start()
    processes = [psutil.Process(server.pid) for server in servers]
    module = "app.rollout.engine.entry"
    await asyncio.to_thread(until, lambda: all(module in " ".join(each.cmdline()) for each in processes), 60)
    for server, process in zip(servers, processes, strict=True):
        assert os.getpgid(server.pid) == server.pid
        assert os.readlink(f"/proc/{server.pid}/fd/1") == str(server.spec.log)
        assert server.spec.key not in " ".join(process.cmdline())
    parents = [process.parent() for process in processes]
    assert parents[0] == parents[1]  # one process imported SGLang for both
    assert parents[0] is not None
    assert any("fork_server" in word for word in parents[0].cmdline())
    await servers[0].stop()
    os.killpg(servers[1].pid, signal.SIGKILL)
    assert "was killed by SIGKILL" in str(await asyncio.wait_for(servers[1].died(), 30))


async def test_a_server_imports_sglang_itself_where_there_is_no_fork_server(tiny_model: Path, tmp_path: Path) -> None:
    missing = replace(server_spec(tiny_model, tmp_path, name="engine 0"), fork=partial(fork, tmp_path / "none"))
    server = Server(missing)

    await server.start()
    assert psutil.Process(server.pid).ppid() == os.getpid()
    await server.stop()


def test_a_server_ends_with_its_host_and_with_the_fork_server(tiny_model: Path, tmp_path: Path) -> None:
    with fork_server(DEVICE.engine_env, tmp_path / "fork.log") as forked:
        specs = [replace(server_spec(tiny_model, tmp_path, name=f"engine {i}"), fork=forked) for i in range(2)]
        hosted, orphaned = (Server(spec) for spec in specs)

        async def scenario() -> None:
            await hosted.start()
            await orphaned.start()
            process: Any = hosted._process
            os.close(process._stdin)  # as when its host is killed
            await asyncio.to_thread(until, lambda: not psutil.pid_exists(hosted.pid), 60)

        asyncio.run(scenario())
        until(lambda: process_group(hosted.pid) == [], 60)  # killed together, gone one by one
    until(lambda: orphaned.pid not in {process.pid for process in process_group(orphaned.pid)}, 60)
    assert "was killed by SIGKILL" in str(asyncio.run(asyncio.wait_for(orphaned.died(), 30)))
    assert until(lambda: process_group(orphaned.pid) == [], 60) < 60


@pytest.mark.parametrize(
    "flags", [["--net"], ["--mount"], ["--pid", "--fork", "--mount-proc"]], ids=lambda flags: flags[0]
)
def test_a_host_in_another_container_that_shares_the_folder_forks_nothing(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server would listen in the fork server's network, where the host does not reach it."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = ["unshare", *as_root, *flags]
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no namespaces for this user")

    code = (
        "import pathlib, sys\n"
        "from app.cpu_engine.forked_server import fork\n"
        "try:\n"
        "    fork(pathlib.Path(sys.argv[1]), [], {}, 1)\n"
        "except OSError as error:\n"
        "    print('refused:', error)\n"
    )
    path = tmp_path / "socket"
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path.name)  # its path may be too long for a socket
        silent.listen()
        asked = subprocess.run(
            [*inside, sys.executable, "-c", code, path.name], check=True, capture_output=True, text=True, timeout=60
        )
    reasons = {"--net": "another net namespace", "--mount": "another mnt namespace", "--pid": "/proc/0/ns/mnt"}
    assert "refused:" in asked.stdout
    assert as_root or reasons[flags[0]] in asked.stdout
