"""The other sides of a fork server (`fork_server.py`): the driver starts it, and engine hosts get servers from it."""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from app.device.base import Fork
from app.utils.process import PARENT_VARIABLE, module_command, package_path

PROCESS = "app.cpu_engine.fork_server"
IMPORT_TIMEOUT_S = 300.0  # until SGLang is imported
STOP_TIMEOUT_S = 5.0
BACKLOG = 64
SOCKET_VARIABLE = "POSTTRAIN_FORK_SERVER"  # the socket of a fork server that several runs share
NAMESPACES = ("mnt", "net", "pid")  # of Linux, that a process has from the one that forks it
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@contextmanager
def fork_server(environment: Mapping[str, str], log: Path) -> Iterator[Fork]:
    """Start a fork server, which imports SGLang meanwhile, and end it after the block. Yields `fork` of its socket.

    Runs that begin with `SOCKET_VARIABLE` in their environment use that one and start none.

    Args:
        environment: Variables that SGLang reads when it is imported.
    """
    if shared := os.environ.get(SOCKET_VARIABLE):
        yield partial(fork, Path(shared))
        return

    with tempfile.TemporaryDirectory(prefix="posttrain-fork-") as folder:
        path = Path(folder) / "socket"
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as output:
            listener.bind(str(path))  # here: hosts may connect before the process runs
            listener.listen(BACKLOG)
            process = subprocess.Popen(
                [*module_command(PROCESS), str(listener.fileno())],
                env={
                    PARENT_VARIABLE: str(os.getpid()),
                    **os.environ,
                    **environment,
                    "PYTHONPATH": package_path(os.environ.get("PYTHONPATH")),
                },
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        try:
            yield partial(fork, path)
        finally:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
            assert process.stdin is not None
            process.stdin.close()


# --- in the engine's host


@dataclass(eq=False)
class ForkedProcess:
    """A server that was forked. Like a process of asyncio it has a `pid` and can be awaited."""

    pid: int
    _connection: socket.socket
    _stdin: int  # our end
    _exit: asyncio.Future[int] | None = None

    async def wait(self) -> int:
        """Wait until it ends; return its exit code, negative for a signal."""
        if self._exit is None:
            self._exit = asyncio.ensure_future(self._read_exit())
        return await asyncio.shield(self._exit)

    async def _read_exit(self) -> int:
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        answer = await reader.read()  # until it is closed; empty if the fork server and with it its children ended
        writer.close()
        os.close(self._stdin)
        return int(json.loads(answer)["code"]) if answer else -signal.SIGKILL


def fork(path: Path, arguments: Sequence[str], environment: Mapping[str, str], log: int) -> ForkedProcess:
    """Get a server from the fork server at `path`. Blocks until SGLang is imported there.

    Args:
        environment: All of its environment.

    Raises:
        OSError: There is no fork server at `path` or it is another container's, it ended, or it did not answer within
            `IMPORT_TIMEOUT_S`.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(IMPORT_TIMEOUT_S)
    theirs, ours = os.pipe()
    try:
        connection.connect(str(path))
        _require_same_namespaces(connection)
        socket.send_fds(connection, [b"\n"], [theirs, log])
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)})
        connection.sendall(request.encode() + b"\n")
        with connection.makefile("rb", buffering=0) as lines:  # unbuffered: the exit code may follow at once
            answer = lines.readline()
        if not answer:
            raise ConnectionResetError(f"the fork server at {path} ended")
        return ForkedProcess(json.loads(answer)["pid"], connection, ours)
    except OSError:
        connection.close()
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def _require_same_namespaces(connection: socket.socket) -> None:
    """Raise `OSError` if the driver runs in another container: its folders may be shared, its network is not."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    driver, _, _ = CREDENTIALS.unpack(credentials)  # of the process that listened first; 0 if it has no pid here
    for name in NAMESPACES:
        if os.readlink(f"/proc/{driver}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            raise ConnectionRefusedError(f"the fork server is in another {name} namespace")
