"""One SGLang server process: its command line, its start, its death.

The server runs in a process group of its own with a random key and writes to a log of its own. No process of the group
outlives the one that started it, nor the group's leader.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import EngineError, EngineLost

KEY_VARIABLE = "POSTTRAIN_ENGINE_KEY"  # environment of the server, read by the launcher
PARENT_VARIABLE = "POSTTRAIN_ENGINE_PARENT"
LOG_TAIL_LINES = 12
STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What a server is started with."""

    name: str  # "engine 0"
    model_path: str
    host: str  # the address it listens on
    port: int  # 0: a free one
    key: str
    flags: Mapping[str, object]  # SGLang's, without the dashes; True is a bare flag, None and False are left out
    environment: Mapping[str, str]
    log: Path

    def command(self) -> list[str]:
        """The command line; the key is not on it."""
        flags = {"model-path": self.model_path, "host": self.host, "port": self.port, **self.flags}
        arguments: list[str] = []
        for flag, value in flags.items():
            if value is None or value is False:
                continue
            arguments += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
        return [sys.executable, "-m", "app.rollout.launcher", *arguments]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class Server:
    """A running server process."""

    def __init__(self, spec: ServerSpec):
        self.spec = spec if spec.port else replace(spec, port=free_port(spec.host))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; raises `EngineError` when its port is taken."""
        if not port_is_free(self.spec.host, self.spec.port):
            raise EngineError(
                f"{self.spec.name}: rollout.port={self.spec.port} is not accepted: the port is in use on this machine; "
                "give a free one, or null."
            )
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            PARENT_VARIABLE: str(os.getpid()),  # first: a process whose first variable is changed can take no title
            **os.environ,
            **self.spec.environment,
            KEY_VARIABLE: self.spec.key,
        }
        with self.spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command(),
                stdin=asyncio.subprocess.PIPE,  # never written to: it ends when we do
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def died(self) -> EngineLost:
        """Wait for the process to end, and end its children; the error says how it ended and what its log said last."""
        assert self._process is not None
        code = await self._process.wait()
        self._kill_group()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return EngineLost(
            f"{self.spec.name} (pid {self.pid}) {how}; log: {self.spec.log}; its last lines:\n{self.tail()}"
        )

    def tail(self) -> str:
        """The last lines of the server's log."""
        try:
            lines = self.spec.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"  (the log cannot be read: {error})"
        return "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])

    async def stop(self) -> None:
        """End the whole process group at once: a server has nothing to save, and a polite one takes seconds."""
        if self._process is None:
            return
        self._kill_group()
        await asyncio.wait_for(self._process.wait(), STOP_SECONDS)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
