"""One SGLang server process: command line, start and death.

Invariants:
    - The server runs in its own process group, with its own log and a random key.
    - No process of the group outlives the process that started it, nor the group's leader.
    - Its port is reserved before the process starts. SGLang binds it seconds later.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.device.base import Fork, ServerProcess
from app.errors import EngineError, EngineLost
from app.rollout.engine.server_args import model_flags, render_flags
from app.types import EngineStart
from app.utils.child_environment import for_children
from app.utils.net import reserve_port
from app.utils.process import PARENT_VARIABLE, module_command, package_path

if TYPE_CHECKING:
    from app.rollout.engine.client import Client

HOST = "127.0.0.1"  # where servers listen: their hosts are on the same machine
# Environment variables of the server, read by `entry.py`.
KEY_VARIABLE = "POSTTRAIN_ENGINE_KEY"
LOG_TAIL_LINES = 12
USAGE_ERROR = re.compile(r"\w[\w. -]*: error: ")  # of argparse, after a usage of hundreds of lines
# Lines of SGLang's log that begin a phase of its start, last one first.
START_PHASES = (
    ("max_total_num_tokens=", EngineStart.warming_up),
    ("Load weight end", EngineStart.allocating),
    ("Load weight begin", EngineStart.loading),
)
BIND_ERROR = "error while attempting to bind on address"  # in SGLang's log
STOP_TIMEOUT_S = 5.0
HEALTH_POLL_S = 0.05
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The command line and environment of a server that a host starts."""

    name: str  # "engine 0"
    model_path: str
    port: int  # 0: a free one
    key: str = field(repr=False)
    flags: Mapping[str, object]  # SGLang's, without dashes; see `render_flags`
    environment: Mapping[str, str]  # added to this process's
    log: Path
    fork: Fork | None = None  # forks the server from a process that has imported SGLang, on the driver's machine

    def arguments(self) -> list[str]:
        model = model_flags(self.model_path, self.flags)
        return render_flags({**model, "host": HOST, "port": self.port, **self.flags})

    def command(self) -> list[str]:
        return [*module_command("app.rollout.engine.entry"), *self.arguments()]


@dataclass(eq=False)
class Server:
    """A server process.

    Lifecycle:
        1. `start` once. From then on, `spec` has the port.
        2. `died` waits for the end of the process; `stop` kills it.
    """

    spec: ServerSpec
    _reserved: socket.socket | None = None
    _process: ServerProcess | None = None
    _log_start: int = 0  # bytes that earlier servers left in the log

    async def start(self) -> None:
        """Start the process.

        Raises:
            EngineError: The port is in use.
        """
        try:
            self._reserved = reserve_port(HOST, self.spec.port)
        except OSError as error:
            raise EngineError(
                f"{self.spec.name}: rollout.port={self.spec.port} is not accepted: the port is in use on this machine; "
                "give a free one, or null."
            ) from error
        self.spec = replace(self.spec, port=self._reserved.getsockname()[1])

        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            # Must be first, and never change: setproctitle fails in a process whose first variable was changed.
            PARENT_VARIABLE: str(os.getpid()),
            **for_children(os.environ),
            **self.spec.environment,
            KEY_VARIABLE: self.spec.key,
        }
        environment["PYTHONPATH"] = package_path(environment.get("PYTHONPATH"))
        with self.spec.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await self._forked(environment, log.fileno())
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self.spec.command(),
                    stdin=asyncio.subprocess.PIPE,  # never written to: it closes when this process ends
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )

    async def _forked(self, environment: Mapping[str, str], log: int) -> ServerProcess | None:
        """Return a forked server; None where there is no fork server, as on other machines than the driver's."""
        if self.spec.fork is None:
            return None
        try:
            return await asyncio.to_thread(self.spec.fork, self.spec.arguments(), environment, log)
        except OSError as error:
            logger.info("%s imports SGLang itself: %s", self.spec.name, error)
            return None

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        assert self._process is not None
        return self._process.pid

    async def died(self) -> EngineLost:
        """Wait until the process ends, kill the rest of its group, and return an error with the end of its log."""
        assert self._process is not None
        code = await self._process.wait()
        self._kill_process_group()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return EngineLost(
            f"{self.spec.name} (pid {self.pid}) {how}; log: {self.spec.log}; its last lines:\n{self.tail()}"
        )

    def start_phase(self) -> EngineStart:
        log = self._own_log()
        return next((phase for line, phase in START_PHASES if line in log), EngineStart.importing)

    def refused_address(self) -> str | None:
        """Return the server's address if it could not listen there."""
        # SGLang does not end then, but waits for its own warm-up forever: only its log has the error.
        return f"{HOST}:{self.spec.port}" if BIND_ERROR in self._own_log() else None

    def _own_log(self) -> str:
        try:
            return self.spec.log.read_bytes()[self._log_start :].decode(errors="replace")
        except OSError:
            return ""

    def tail(self) -> str:
        """Return the last lines of the server's log, indented; of SGLang's usage, only what is wrong with its flags."""
        last = self._own_log().splitlines()[-LOG_TAIL_LINES:]
        wrong = [line for line in last if USAGE_ERROR.match(line)]
        return "\n".join(f"  | {line}" for line in wrong or last)

    async def stop(self) -> None:
        # SIGKILL at once: a server has nothing to save, and its own shutdown takes seconds.
        if self._process is not None:
            self._kill_process_group()
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        if self._reserved is not None:
            self._reserved.close()

    def _kill_process_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


async def until_healthy(client: "Client", server: Server | None, timeout_s: float) -> None:
    """Wait for the first healthy reply of a server: one of the run, or a running one (None).

    Raises `EngineError` after `rollout.start_timeout_s`, and if another program has the server's address.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await client.healthy():
        problem = ""
        if server and (address := server.refused_address()):
            problem = f": another program listens at {address}"
        elif asyncio.get_running_loop().time() > deadline:
            problem = f" at {client.url} did not become healthy within rollout.start_timeout_s={timeout_s:.0f} s"
        if problem:
            log = f"; log: {server.spec.log}; its last lines:\n{server.tail()}" if server else ""
            raise EngineError(f"{client.name}{problem}{log}")
        await asyncio.sleep(HEALTH_POLL_S)
