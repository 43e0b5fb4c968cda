"""Where the program of a completion runs: under bubblewrap, under Landlock and limits alone, or on a server.

Every program gets an interpreter of its own, without packages, environment or files, which ends with it. On this
machine a seccomp filter and limits confine it in either case. All that goes in is its stdin, all that comes out is its
stdout.
"""

import contextlib
import json
import marshal
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from app.reward.code.seccomp import seccomp_filter
from app.utils.process import MARK

RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")
COMPILED = marshal.dumps(compile(RUNNER, "runner", "exec"))  # in front of the job: to compile takes 3 ms
LOAD_RUNNER = f"""import marshal, os
text = b""
while len(text) < {len(COMPILED)}:
    text += os.read(0, {len(COMPILED)} - len(text))
exec(marshal.loads(text))"""
PYTHON = os.path.realpath(sys.executable)
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom")
MAX_OUTPUT = 4 << 20  # bytes, of a script and of an answer
MAX_THREADS = 32
MAX_DESCRIPTORS = 64
EXIT_TIMEOUT_S = 0.5  # of a program that has closed its stdout
PROBE_TIMEOUT_S = 10.0
NETWORK_TIMEOUT_S = 3.0  # beyond the timeout of a program on a server
NAMESPACES, PROCESS = "namespaces", "process"


class SandboxError(Exception):
    """A sandbox cannot run programs here."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a script wrote to its stdout, and whether it ended by itself with exit status 0."""

    text: bytes
    ok: bool


class Program(Protocol):
    """A program that evaluates expressions, see `runner.py`."""

    def ask(self, expressions: Sequence[str]) -> Iterator[bytes]:
        """Yield a line for each expression, none after the program has ended. It may wait for ever."""
        ...


class Sandbox(Protocol):
    """Runs programs. `LocalSandbox` and `SandboxFusion` implement it. Whatever a program does, nothing of it is left."""

    description: str

    def run(self, code: str, stdin: str, timeout_s: float) -> Output:
        """Run a script for at most this long."""
        ...

    def started(self, code: str, timeout_s: float) -> contextlib.AbstractContextManager[Program]:
        """Run a program until the block ends, which is after at most this long."""
        ...


def frame(text: str) -> bytes:
    """Return a frame of `runner.py`. Surrogates of a completion's text, which no source has, become `?`."""
    encoded = text.encode(errors="replace")
    return b"%d\n%b" % (len(encoded), encoded)


class LocalSandbox:
    """Runs programs on this machine.

    Args:
        kind: namespaces or process.
        memory: Address space of a program, in bytes.
        stderr: Descriptor of what programs write there.
    """

    def __init__(self, kind: str, memory: int, stderr: int = subprocess.DEVNULL) -> None:
        self._kind = kind
        self._memory = memory
        self._stderr = stderr
        self._command = [*(bubblewrap() if kind == NAMESPACES else ()), PYTHON, "-I", "-S", "-B", "-c", LOAD_RUNNER]
        self.description = describe(kind)

    def run(self, code: str, stdin: str, timeout_s: float) -> Output:
        """See `Sandbox.run`."""
        deadline = time.monotonic() + timeout_s
        with open(os.memfd_create("job"), "w+b") as file:
            file.write(self._job(code, True, timeout_s) + stdin.encode(errors="replace"))
            file.seek(0)
            with self._process(file.fileno()) as process:
                assert process.stdout is not None
                text = read(process.stdout.fileno(), deadline)
                try:
                    status = process.wait(min(EXIT_TIMEOUT_S, max(0.0, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    status = 1
                return Output(text, len(text) <= MAX_OUTPUT and status == 0)

    @contextlib.contextmanager
    def started(self, code: str, timeout_s: float) -> Iterator["LocalProgram"]:
        """See `Sandbox.started`."""
        with self._process(subprocess.PIPE) as process:
            yield LocalProgram(process, self._job(code, False, timeout_s))

    @contextlib.contextmanager
    def _process(self, stdin: int) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(
            self._command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={MARK: os.environ[MARK]} if MARK in os.environ else {},  # for the process reaper
            cwd="/",
            start_new_session=True,  # a signal to its process group must not reach ours
        ) as process:
            try:
                yield process
            finally:
                process.kill()  # of bubblewrap's namespaces the kernel then ends all processes

    def _job(self, code: str, script: bool, timeout_s: float) -> bytes:
        limits = {
            "parent": 1 if self._kind == NAMESPACES else os.getpid(),
            "readable": READABLE,
            "filter": seccomp_filter(),
            "uid": 60_100 + os.getpid() % 400,  # of no user; another one for each worker, whose threads are counted
            "AS": self._memory,
            "CPU": int(timeout_s) + 1,
            "FSIZE": 0,
            # of root a user of its own; otherwise what runs under this user counts too, which is not known
            "NPROC": MAX_THREADS + (0 if os.getuid() == 0 else _tasks()),
            "NOFILE": MAX_DESCRIPTORS,
            "CORE": 0,
        }
        return COMPILED + frame(repr({"code": code, "script": script, "limits": limits}))


class LocalProgram:
    """See `Program`. Another process may use it than the one that started it."""

    def __init__(self, process: subprocess.Popen[bytes], job: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._unsent = job

    def ask(self, expressions: Sequence[str]) -> Iterator[bytes]:
        """See `Program.ask`."""
        for each in expressions:
            try:
                self._stdin.write(self._unsent + frame(each))
                self._stdin.flush()
            except BrokenPipeError:
                return
            self._unsent = b""
            line = self._stdout.readline(MAX_OUTPUT)
            if not line.endswith(b"\n"):
                return
            yield line


def read(descriptor: int, deadline: float) -> bytes:
    """Read until the end, the deadline, or one byte more than `MAX_OUTPUT`."""
    pieces, size = [], 0
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while size <= MAX_OUTPUT and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(descriptor, min(1 << 16, MAX_OUTPUT + 1 - size))
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _tasks() -> int:
    """Return how many processes and threads the machine has."""
    return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])


def bubblewrap() -> Sequence[str]:
    """Return the command that runs another in namespaces of its own, with the interpreter and /usr as its only files.

    Raises:
        SandboxError: bubblewrap is not installed.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError("bubblewrap is not installed")

    command = [found, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    if os.getuid() != 0:
        command += ["--unshare-user"]  # root makes the namespaces as itself, and the runner gives it up
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for path in dict.fromkeys((*READABLE[:-1], sys.base_prefix)):
        command += ["--ro-bind-try", path, path]
    return [*command, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


class SandboxFusion:
    """Runs programs on a Sandbox Fusion server (https://github.com/bytedance/SandboxFusion): POST /run_code.

    Its limits of processes and files are its own.

    Args:
        url: Of the server, without /run_code.
        memory: Of a program, in bytes.
    """

    def __init__(self, url: str, memory: int) -> None:
        self._url = url.rstrip("/")
        self._memory = memory
        self.description = f"{self._url}: a Sandbox Fusion server, which isolates programs itself"

    def run(self, code: str, stdin: str, timeout_s: float) -> Output:
        """See `Sandbox.run`.

        Raises:
            SandboxError: The server does not answer, or not with a result.
        """
        return self.run_job(code, True, stdin, timeout_s)

    @contextlib.contextmanager
    def started(self, code: str, timeout_s: float) -> Iterator["FusionProgram"]:
        """See `Sandbox.started`."""
        yield FusionProgram(self, code, time.monotonic() + timeout_s)

    def run_job(self, code: str, script: bool, stdin: str, timeout_s: float) -> Output:
        """Run the runner on a job and what follows it. Raises as `run`."""
        request = {
            "language": "python",
            "code": RUNNER,
            "stdin": frame(repr({"code": code, "script": script, "limits": None})).decode()
            + stdin.encode(errors="replace").decode(),
            "run_timeout": timeout_s,
            "memory_limit_MB": self._memory >> 20,
        }
        body = json.dumps(request).encode()
        address = f"{self._url}/run_code"
        post = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(post, timeout=timeout_s + NETWORK_TIMEOUT_S) as reply:
                answer = json.load(reply)
        except (OSError, ValueError) as error:
            raise SandboxError(f"{address}: {error}") from error
        if not isinstance(answer, dict) or answer.get("status") == "SandboxError":
            raise SandboxError(f"{address} returned {str(answer)[:100]!r}")
        result = answer.get("run_result") or {}
        text = str(result.get("stdout") or "").encode(errors="replace")
        return Output(text, result.get("status") == "Finished" and result.get("return_code") == 0)


class FusionProgram:
    """See `Program`. A server runs a program once, so that each time it evaluates all expressions so far again."""

    def __init__(self, server: SandboxFusion, code: str, deadline: float) -> None:
        self._server = server
        self._code = code
        self._deadline = deadline
        self._sent = ""
        self._answered = 0

    def ask(self, expressions: Sequence[str]) -> Iterator[bytes]:
        """See `Program.ask`. Raises `SandboxError`."""
        self._sent += b"".join(map(frame, expressions)).decode()
        remaining = max(0.1, self._deadline - time.monotonic())
        lines = self._server.run_job(self._code, False, self._sent, remaining).text.split(b"\n")[:-1]
        new = lines[self._answered : self._answered + len(expressions)]
        self._answered += len(new)
        yield from new


def runs_programs(sandbox: Sandbox) -> bool:
    """Whether a sandbox runs a program that prints 42. Raises `SandboxError`."""
    return sandbox.run("print(42)", "", PROBE_TIMEOUT_S) == Output(b"42\n", ok=True)


@cache
def available(kind: str) -> str | None:
    """Return why a local sandbox cannot run a program on this machine; None if it can."""
    with tempfile.TemporaryFile() as errors:
        try:
            if runs_programs(LocalSandbox(kind, 512 << 20, errors.fileno())):
                return None
        except SandboxError as error:
            return str(error)
        errors.seek(0)
        return errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "a program did not end there"


@cache
def choose(name: str) -> str:
    """Return a local sandbox that works here, for `auto` the best one.

    Raises:
        SandboxError: There is none, or not the one that was asked for.
    """
    reasons = []
    for kind in (NAMESPACES, PROCESS) if name == "auto" else (name,):
        reason = available(kind)
        if reason is None:
            return kind
        reasons.append(f"{kind}: {reason}")
    raise SandboxError("; ".join(reasons))


def describe(kind: str) -> str:
    """Return a sentence about what a local sandbox protects."""
    if kind == NAMESPACES:
        return "namespaces: bubblewrap, without network, files or processes of the machine"
    if landlock_version() >= 6:
        return "process: limits and Landlock; a program can send UDP, and start no process or thread"
    user = "another user" if os.getuid() == 0 else "this user"
    return f"process: limits alone; a program can read files, use the network and send signals as {user} can"


def landlock_version() -> int:
    """Return the version of Landlock's interface; below 1, the kernel has none."""
    import ctypes

    return int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))


def sandbox_of(name: str, memory: int) -> Sandbox:
    """Return the sandbox of a setting. Raises `SandboxError` unless it runs programs here."""
    if "://" not in name:
        sandbox = LocalSandbox(choose(name), memory)
        if name == "auto" and (reason := available(NAMESPACES)) is not None:
            sandbox.description += f" (namespaces: {reason})"
        return sandbox
    server = SandboxFusion(name, memory)
    if not runs_programs(server):
        raise SandboxError(f"{name} does not print 42 for a program that does")
    return server
