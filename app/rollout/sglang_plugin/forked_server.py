"""Servers that a fork server starts (`fork_server.py`): how a run starts one, and how a host asks it for a server."""

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
from pathlib import Path

from app.utils.process import module_command, package_path

PROCESS = "app.rollout.sglang_plugin.fork_server"
HEADER_BYTES = 8  # length of a request
ANSWER_BYTES = 4096
IMPORT_TIMEOUT_S = 300.0  # until SGLang is imported
STOP_TIMEOUT_S = 5.0
LISTEN = 64
SOCKET_VARIABLE = "POSTTRAIN_FORK_SERVER"  # the socket of a fork server that several runs share
NAMESPACES = ("mnt", "net", "pid")  # of Linux, that a process has from the one that forks it
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
PARENT_VARIABLE = "POSTTRAIN_ENGINE_PARENT"  # of the environment of servers, where it is the first


@contextmanager
def fork_server(environment: Mapping[str, str], log: Path) -> Iterator[Path]:
    """Start a fork server, which imports SGLang meanwhile, and end it after the block. Yields its socket.

    Runs that begin with `SOCKET_VARIABLE` in their environment use that one and start none.

    Args:
        environment: Variables that SGLang reads when it is imported.
        log: Its output.
    """
    if shared := os.environ.get(SOCKET_VARIABLE):
        yield Path(shared)
        return

    with tempfile.TemporaryDirectory(prefix="posttrain-fork-") as folder:
        path = Path(folder) / "socket"
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as output:
            listener.bind(str(path))  # here: hosts may ask before the process runs
            listener.listen(LISTEN)
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
            yield path
        finally:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
            assert process.stdin is not None
            process.stdin.close()


# --- in the engine's host


class ForkedProcess:
    """A server that was forked. Like a process of asyncio it has a `pid` and can be awaited."""

    def __init__(self, pid: int, connection: socket.socket, stdin: int):
        self.pid = pid
        self._connection = connection
        self._stdin = stdin  # our end
        self._exit: asyncio.Future[int] | None = None

    async def wait(self) -> int:
        """Wait until it ends; return its exit code, negative for a signal."""
        if self._exit is None:
            self._exit = asyncio.ensure_future(self._read_exit())
        return await asyncio.shield(self._exit)

    async def _read_exit(self) -> int:
        self._connection.setblocking(False)
        received = b""
        while not received.endswith(b"\n"):
            part = await asyncio.get_running_loop().sock_recv(self._connection, ANSWER_BYTES)
            if not part:  # the fork server is gone, and its children with it
                break
            received += part
        self._connection.close()
        os.close(self._stdin)
        return int(json.loads(received)["code"]) if received else -signal.SIGKILL


def fork(path: Path, arguments: Sequence[str], environment: Mapping[str, str], log: int) -> ForkedProcess:
    """Ask the fork server at `path` for a server. Blocks until SGLang is imported there.

    Args:
        path: The socket.
        arguments: The launcher's.
        environment: All of its environment.
        log: Descriptor of its output.

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
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        socket.send_fds(connection, [len(request).to_bytes(HEADER_BYTES)], [theirs, log])
        connection.sendall(request)
        answer = connection.recv(ANSWER_BYTES)
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
    driver, _, _ = CREDENTIALS.unpack(credentials)  # of who listened first; 0 if it has no pid here
    for name in NAMESPACES:
        if os.readlink(f"/proc/{driver}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            raise ConnectionRefusedError(f"the fork server is in another {name} namespace")
