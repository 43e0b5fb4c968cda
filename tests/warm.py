"""Runs `python -m app` in a fork of a process that has imported it, for a third of the CPU time of a new process."""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "sglang")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    heavy: list[str]  # the libraries among HEAVY that it had imported


def run_warm(
    *arguments: str,
    cwd: Path = ROOT,
    environment: Mapping[str, str] = os.environ,
    module: str = "app",
    one_stream: bool = False,
    seconds: float = 280,
) -> Ended:
    """Run a command to its end, or kill it (`TimeoutError`); with `one_stream`, its stderr goes to its stdout."""
    request = {"arguments": arguments, "folder": str(cwd), "environment": dict(environment), "module": module}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr", "heavy")]
        opened = [os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND) for file in files]
        link = _server()
        streams = [opened[0], opened[0 if one_stream else 1], opened[2]]
        socket.send_fds(link, [json.dumps(request).encode()], streams)
        for each in opened:
            os.close(each)
        code = _code(link, seconds)
        stdout, stderr, heavy = (file.read_text() for file in files)
    return Ended(code, stdout, stderr, heavy.split())


def _code(link: socket.socket, seconds: float) -> int:
    pid = int(link.recv(64))
    link.settimeout(seconds)
    try:
        return int(link.recv(64))
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        link.settimeout(None)
        link.recv(64)
        raise
    finally:
        link.settimeout(None)


@cache
def _server() -> socket.socket:
    """The process that forks; it ends when this one has ended."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    return mine


def _serve(link: socket.socket) -> str:
    """Fork for each request; return in the forks, where a module is to run."""
    while True:
        message, opened, _, _ = socket.recv_fds(link, 1 << 20, 3)
        if not message:
            raise SystemExit(0)
        pid = os.fork()
        if pid == 0:
            link.close()
            request = json.loads(message)
            _become(request, *opened)
            return str(request["module"])
        for each in opened:
            os.close(each)
        link.send(str(pid).encode())
        link.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(request: dict, stdout: int, stderr: int, heavy: int) -> None:
    """Take over what a new process would have been given."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    sys.path[0] = request["folder"]
    atexit.register(lambda: os.write(heavy, " ".join(name for name in HEAVY if name in sys.modules).encode()))


def main() -> None:
    """Import the application, wait for commands, and run one in each fork."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import app.start.preflight  # noqa: F401
    from tests.compose import composed

    composed()  # Hydra's parsers learn their grammars
    gc.collect()
    gc.freeze()
    module = _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
