"""Forks SGLang servers from a process that has imported SGLang: `python -m ….sglang_plugin.fork_server <descriptor>`.

Importing SGLang takes most of a server's start. Where its processes are forked anyway (on a CPU:
sglang_plugin/entry_points.py), a run imports it once, while the driver loads its inputs, and every engine of that
machine, restarted ones too, begins as a copy.

    driver ─ starts ─→ fork server ─ forks ─→ server of engine 0, server of engine 1 …
                          ↑ socket: arguments, environment, standard input, log ─ engine host
                          └→ pid, later the exit code ──────────────────────────→ engine host

Invariants:
    - The fork server ends with the driver, and a server with its host: both hold the other end of its standard input.
    - Messages are JSON from processes of this user: the socket's folder is private.
    - The fork server computes nothing and has no thread of its own when it forks.
"""

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from app.utils.process import module_command, package_path

HEADER_BYTES = 8  # length of a request
DESCRIPTORS = 2  # standard input, log
ANSWER_BYTES = 4096
IMPORT_SECONDS = 300.0  # until SGLang is imported
REQUEST_SECONDS = 10.0  # until a host has sent its request
STOP_SECONDS = 5.0
LISTEN = 64
SOCKET_VARIABLE = "POSTTRAIN_FORK_SERVER"  # the socket of a fork server that several runs share
OMP_THREADS = "OMP_NUM_THREADS"
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
                [*module_command(__name__), str(listener.fileno())],
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
            process.wait(STOP_SECONDS)
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
        OSError: There is no fork server at `path`, it ended, or did not answer within `IMPORT_SECONDS`.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(IMPORT_SECONDS)
    theirs, ours = os.pipe()
    try:
        connection.connect(str(path))
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


# --- in the fork server


def main() -> None:
    """Import SGLang, then fork a server for every request until standard input closes."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    began = time.monotonic()
    import_sglang()
    sys.stdout.write(f"imported SGLang in {time.monotonic() - began:.1f} s, {threads()} thread(s)\n")
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    serve(listener)


def import_sglang() -> None:
    """Import what a server and its children import."""
    from app.rollout import launcher  # noqa: F401  # its top level prepares torchvision

    # isort: split
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def serve(listener: socket.socket) -> None:
    """Answer requests and report exits until standard input closes."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    own = (listener.fileno(), wake, woken)

    hosts: dict[int, socket.socket] = {}  # by pid of the server
    while True:
        ready, _, _ = select.select([sys.stdin, listener, wake], [], [])
        if sys.stdin in ready:
            os.killpg(0, signal.SIGKILL)
        if listener in ready:
            _answer(listener.accept()[0], hosts, own)
        if wake in ready:
            os.read(wake, ANSWER_BYTES)
        _report_exits(hosts)


def _answer(connection: socket.socket, hosts: dict[int, socket.socket], own: Sequence[int]) -> None:
    """Fork the server that a host asks for. `own`: descriptors that it must not inherit."""
    connection.settimeout(REQUEST_SECONDS)
    descriptors: Sequence[int] = ()
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, HEADER_BYTES, DESCRIPTORS)
        stdin, log = descriptors
        request = json.loads(_exactly(connection, int.from_bytes(header)))
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for descriptor in (*own, connection.fileno(), *(each.fileno() for each in hosts.values())):
                os.close(descriptor)
            _become_server(parent, request["arguments"], request["environment"], stdin, log)
        connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        hosts[pid] = connection
    except (OSError, ValueError) as error:  # the host ended meanwhile; a server that it got ends by its standard input
        sys.stdout.write(f"a request was not answered: {error}\n")
        sys.stdout.flush()
        connection.close()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the host ended")
        received += part
    return received


def _report_exits(hosts: dict[int, socket.socket]) -> None:
    """Tell the hosts of servers that ended their exit codes."""
    while hosts:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = hosts.pop(pid, None)
        if connection is None:
            continue
        with contextlib.suppress(OSError):  # the host is gone
            connection.sendall(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        connection.close()


def _become_server(
    parent: int, arguments: Sequence[str], environment: Mapping[str, str], stdin: int, log: int
) -> NoReturn:
    """Run a server in this process, which was just forked."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdin, 0)
        for output in (1, 2):
            os.dup2(log, output)
        os.close(stdin)
        os.close(log)
        _launch(parent, arguments, environment)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # whatever a server raises goes to its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launch(parent: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    import setproctitle
    import torch

    from app.rollout import launcher

    # The first variable must never change: see `Server.start`.
    kept = {PARENT_VARIABLE}
    for name in os.environ.keys() - environment.keys() - kept:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if name not in kept})
    if OMP_THREADS in environment:  # read by torch when it was imported
        torch.set_num_threads(int(environment[OMP_THREADS]))

    command = module_command(launcher.__name__)
    setproctitle.setproctitle(" ".join([*command, *arguments]))
    sys.argv = [launcher.__name__, *arguments]
    launcher.main(parent)


if __name__ == "__main__":
    main()
