"""Where the program of a completion runs: under bubblewrap, under Landlock and limits alone, or on a server.

Every program gets an interpreter of its own, without packages, environment or files, which ends with it. On this
machine a seccomp filter and limits confine it in either case. All that goes in is its stdin, all that comes out is its
stdout. Whatever it does, nothing of it is left.
"""

import contextlib
import json
import marshal
import os
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
from typing import Any

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
        """Run a script for at most this long."""
        with open(os.memfd_create("in"), "r+b") as given, open(os.memfd_create("out"), "r+b") as output:
            given.write(self._job(code, True, timeout_s) + stdin.encode(errors="replace"))
            given.seek(0)
            with self._process(given.fileno(), output.fileno()) as process:
                try:
                    status = process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    status = 1
            output.seek(0)
            return Output(output.read(), status == 0)

    @contextlib.contextmanager
    def started(self, code: str, timeout_s: float) -> Iterator["LocalProgram"]:
        """Run a program until the block ends, which has this long."""
        with self._process(subprocess.PIPE, subprocess.PIPE) as process:
            yield LocalProgram(process, self._job(code, False, timeout_s))

    @contextlib.contextmanager
    def _process(self, stdin: int, stdout: int) -> Iterator[subprocess.Popen[bytes]]:
        environment = {MARK: os.environ[MARK]} if MARK in os.environ else {}  # for the process reaper
        with subprocess.Popen(
            self._command,
            stdin=stdin,
            stdout=stdout,
            stderr=self._stderr,
            env=environment,
            cwd="/",
            start_new_session=True,  # a signal to its process group must not reach ours
        ) as process:
            try:
                yield process
            finally:
                process.kill()  # of bubblewrap's namespaces the kernel then ends all processes

    def _job(self, code: str, script: bool, timeout_s: float) -> bytes:
        # root's programs have a user of their own, other ones share that of the run, whose tasks count
        others = (
            0 if os.getuid() == 0 else int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].split("/")[1])
        )
        limits = {
            "parent": 1 if self._kind == NAMESPACES else os.getpid(),
            "readable": READABLE,
            "filter": seccomp_filter(),
            "uid": 60_100 + os.getpid() % 400,  # another one for each worker
            "AS": self._memory,
            "CPU": int(timeout_s) + 1,
            "FSIZE": MAX_OUTPUT,
            "NPROC": others + MAX_THREADS,
            "NOFILE": MAX_DESCRIPTORS,
            "CORE": 0,
        }
        return COMPILED + frame(repr({"code": code, "script": script, "limits": limits}))


class LocalProgram:
    """A program that evaluates expressions, see `runner.py`. Another process may use it than the one that started it."""

    def __init__(self, process: subprocess.Popen[bytes], job: bytes) -> None:
        self._stdin: Any = process.stdin
        self._stdout: Any = process.stdout
        self._unsent = job

    def ask(self, expressions: Sequence[str]) -> Iterator[bytes]:
        """Yield a line for each expression, none after the program has ended. It may wait for ever."""
        for each in expressions:
            with contextlib.suppress(BrokenPipeError):
                self._stdin.write(self._unsent + frame(each))
                self._stdin.flush()
            self._unsent = b""
            line = self._stdout.readline(MAX_OUTPUT)
            if not line.endswith(b"\n"):
                return
            yield line


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
        self._url = f"{url.rstrip('/')}/run_code"
        self._memory = memory
        self.description = f"{url}: a Sandbox Fusion server, which isolates programs itself"

    def run(self, code: str, stdin: str, timeout_s: float, script: bool = True) -> Output:
        """Run a script, or a program and its expressions, for at most this long.

        Raises:
            SandboxError: The server does not answer, or not with a result.
        """
        job = repr({"code": code, "script": script, "limits": None})
        request = {
            "language": "python",
            "code": RUNNER,
            "stdin": (frame(job) + stdin.encode(errors="replace")).decode(),
            "run_timeout": timeout_s,
            "memory_limit_MB": self._memory >> 20,
        }
        body, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
        try:
            post = urllib.request.Request(self._url, body, headers)
            with urllib.request.urlopen(post, timeout=timeout_s + NETWORK_TIMEOUT_S) as reply:
                answer = json.load(reply)
        except (OSError, ValueError) as error:
            raise SandboxError(f"{self._url}: {error}") from error
        if not isinstance(answer, dict) or answer.get("status") == "SandboxError":
            raise SandboxError(f"{self._url} returned {str(answer)[:100]!r}")
        result = answer.get("run_result") or {}
        text = str(result.get("stdout") or "").encode(errors="replace")
        return Output(text, result.get("status") == "Finished" and result.get("return_code") == 0)

    @contextlib.contextmanager
    def started(self, code: str, timeout_s: float) -> Iterator["FusionProgram"]:
        """Run a program until the block ends, which has this long."""
        yield FusionProgram(self, code, time.monotonic() + timeout_s)


@dataclass(slots=True)
class FusionProgram:
    """As `LocalProgram`. Each time the server runs the program anew, and it evaluates all expressions so far."""

    server: SandboxFusion
    code: str
    deadline: float
    sent: str = ""
    answered: int = 0

    def ask(self, expressions: Sequence[str]) -> Iterator[bytes]:
        """See `LocalProgram.ask`. Raises `SandboxError`."""
        self.sent += b"".join(map(frame, expressions)).decode()
        output = self.server.run(self.code, self.sent, max(0.1, self.deadline - time.monotonic()), script=False)
        lines = output.text.split(b"\n")[self.answered : -1][: len(expressions)]
        self.answered += len(lines)
        yield from lines


Sandbox = LocalSandbox | SandboxFusion
Program = LocalProgram | FusionProgram


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


def describe(kind: str) -> str:
    """Return a sentence about what a local sandbox protects."""
    if kind == NAMESPACES:
        return "namespaces: bubblewrap, without network, files or processes of the machine"
    import ctypes

    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1:  # the version of Landlock
        return "process: a seccomp filter and Landlock, without network, files or processes of the machine"
    user = "another user" if os.getuid() == 0 else "this user"
    return f"process: a seccomp filter; a program can read files as {user} can, since the kernel has no Landlock"


def sandbox_of(name: str, memory: int) -> Sandbox:
    """Return the sandbox of a setting.

    Raises:
        SandboxError: It does not run programs here, of `auto` none does.
    """
    if "://" in name:
        server = SandboxFusion(name, memory)
        if not runs_programs(server):
            raise SandboxError(f"{name} does not print 42 for a program that does")
        return server

    reasons = []
    for kind in (NAMESPACES, PROCESS) if name == "auto" else (name,):
        reason = available(kind)
        if reason is None:
            sandbox = LocalSandbox(kind, memory)
            sandbox.description += f" ({'; '.join(reasons)})" if reasons else ""
            return sandbox
        reasons.append(f"{kind}: {reason}")
    raise SandboxError("; ".join(reasons))
