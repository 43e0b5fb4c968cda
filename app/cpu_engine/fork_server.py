"""Forks SGLang servers from a process that has imported SGLang: `python -m app.cpu_engine.fork_server <descriptor>`.

Importing SGLang takes most of a server's start. A run imports it once, while the driver loads its inputs, and every
engine of that machine, restarted ones too, begins as a copy.

    driver ─ starts ─→ fork server ─ forks ─→ server of engine 0, server of engine 1 …
                          ↑ socket: arguments, environment, standard input, log ─ engine host
                          └→ pid, later the exit code ──────────────────────────→ engine host

Invariants:
    - The fork server ends with the driver, and a server with its host: both hold the other end of its standard input.
    - Messages are JSON from processes of this user: the socket's folder is private.
    - The fork server computes nothing and has no Python thread beside its main one when it forks; the threads that
      OpenBLAS starts when numpy is imported survive forks by its own handlers.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from app.device.torchvision_shim import define_operators
from app.utils.process import PARENT_VARIABLE, module_command

DESCRIPTORS = 2  # standard input, log
REQUEST_TIMEOUT_S = 10.0  # until a host has sent its request
WAKE_BYTES = 4096
OMP_THREADS = "OMP_NUM_THREADS"


def main() -> None:
    """Import SGLang, then fork a server for every request until standard input closes."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    began = time.monotonic()
    gc.disable()

    define_operators()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401 - what a server and its children import

    gc.freeze()  # a collection in a child would copy every page
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    sys.stdout.write(f"imported SGLang in {time.monotonic() - began:.1f} s, {threads} thread(s)\n")
    sys.stdout.flush()
    serve(listener)


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
            os.read(wake, WAKE_BYTES)
        _report_exits(hosts)


def _answer(connection: socket.socket, hosts: dict[int, socket.socket], own: Sequence[int]) -> None:
    """Fork the server that a host requests. `own`: descriptors that it must not inherit."""
    connection.settimeout(REQUEST_TIMEOUT_S)
    descriptors: Sequence[int] = ()
    try:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, DESCRIPTORS)
        stdin, log = descriptors
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline())
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for descriptor in (*own, connection.fileno(), *(each.fileno() for each in hosts.values())):
                os.close(descriptor)
            _become_server(parent, request["arguments"], request["environment"], stdin, log)
        with contextlib.suppress(OSError):  # the child does it too: neither knows which of them runs first
            os.setpgid(pid, pid)
        connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        hosts[pid] = connection
    except (OSError, ValueError) as error:  # the host ended; its server, if there is one, ends by its standard input
        sys.stdout.write(f"a request was not answered: {error}\n")
        sys.stdout.flush()
        connection.close()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _report_exits(hosts: dict[int, socket.socket]) -> None:
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
        os.setpgid(0, 0)
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

    from app.rollout.engine import entry

    # The first variable must never change: see `Server.start`.
    kept = {PARENT_VARIABLE}
    for name in os.environ.keys() - environment.keys() - kept:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if name not in kept})
    tempfile.tempdir = None  # that of the environment now
    if OMP_THREADS in environment:  # read by torch when it was imported
        torch.set_num_threads(int(environment[OMP_THREADS]))

    command = module_command(entry.__name__)
    setproctitle.setproctitle(" ".join([*command, *arguments]))
    sys.argv = [entry.__name__, *arguments]
    entry.main(parent)


if __name__ == "__main__":
    main()
