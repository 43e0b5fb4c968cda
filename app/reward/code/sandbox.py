"""Where the program of a completion runs: under bubblewrap, under limits of the process alone, or on a server.

Every program gets an interpreter of its own, without packages, environment or files, which ends with it. All that goes
in is text on its stdin, all that comes out is its stdout.
"""

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from app.utils.process import MARK

RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")
COMPILED = marshal.dumps(compile(RUNNER, "runner", "exec"))  # in front of the job: to compile takes 3 ms
LOAD_RUNNER = f"import marshal, os; exec(marshal.loads(os.read(0, {len(COMPILED)})))"
PYTHON = os.path.realpath(sys.executable)
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom")
MAX_OUTPUT = 4 << 20  # bytes
MAX_FILES = 64 << 20  # bytes of the private temporary folder, and of a file in it
MAX_PROCESSES = 8
MAX_DESCRIPTORS = 64
EXIT_TIMEOUT_S = 0.5  # of a program that has closed its stdout
PROBE_TIMEOUT_S = 10.0
NETWORK_TIMEOUT_S = 3.0  # beyond the timeout of a program on a server
NAMESPACES, PROCESS = "namespaces", "process"


class SandboxError(Exception):
    """A sandbox cannot run programs here."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a program wrote to its stdout, and whether it ended by itself with exit status 0."""

    text: bytes
    ok: bool


class Sandbox(Protocol):
    """Runs programs. `LocalSandbox` and `SandboxFusion` implement it."""

    description: str

    def run(self, job: dict[str, Any], stdin: str, timeout_s: float) -> Output:
        """Run the job of `runner.py` for at most this long. Whatever the program does, nothing of it is left."""
        ...


def job_text(job: dict[str, Any], stdin: str) -> bytes:
    """Return the stdin of `runner.py`. Surrogates of a completion's text, which no source has, become `?`."""
    literal = repr(job).encode(errors="replace")
    return b"%d\n%b%b" % (len(literal), literal, stdin.encode(errors="replace"))


class LocalSandbox:
    """Runs programs on this machine.

    Args:
        kind: namespaces or process.
        memory: Address space of each process of a program, in bytes.
        stderr: Descriptor of what programs write there.
    """

    def __init__(self, kind: str, memory: int, stderr: int = subprocess.DEVNULL) -> None:
        self._kind = kind
        self._memory = memory
        self._stderr = stderr
        self._command = [*(bubblewrap() if kind == NAMESPACES else ()), PYTHON, "-I", "-S", "-B", "-c", LOAD_RUNNER]
        self.description = describe(kind)

    def run(self, job: dict[str, Any], stdin: str, timeout_s: float) -> Output:
        """See `Sandbox.run`."""
        deadline = time.monotonic() + timeout_s
        with open(os.memfd_create("job"), "w+b") as file:
            file.write(COMPILED + job_text({**job, "limits": self._limits(timeout_s)}, stdin))
            file.seek(0)
            return self._run(file.fileno(), deadline)

    def _run(self, stdin: int, deadline: float) -> Output:
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
                assert process.stdout is not None
                text = _read(process.stdout.fileno(), deadline)
                timeout_s = min(EXIT_TIMEOUT_S, max(0.0, deadline - time.monotonic()))
                return Output(text, len(text) <= MAX_OUTPUT and process.wait(timeout_s) == 0)
            except subprocess.TimeoutExpired:
                return Output(text, ok=False)
            finally:
                process.kill()  # of bubblewrap's namespaces the kernel then ends all processes

    def _limits(self, timeout_s: float) -> dict[str, Any]:
        process = self._kind == PROCESS
        return {
            "process": process,
            "parent": os.getpid(),
            "readable": READABLE,
            "uid": 60_100 + os.getpid() % 400,  # of no user; another one for each worker, whose processes are counted
            "AS": self._memory,
            "CPU": int(timeout_s) + 1,
            "FSIZE": 0 if process else MAX_FILES,
            "NPROC": 0 if process else MAX_PROCESSES,
            "NOFILE": MAX_DESCRIPTORS,
            "CORE": 0,
        }


def _read(descriptor: int, deadline: float) -> bytes:
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
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--perms", "1777", "--size", str(MAX_FILES), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return command


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

    def run(self, job: dict[str, Any], stdin: str, timeout_s: float) -> Output:
        """See `Sandbox.run`.

        Raises:
            SandboxError: The server does not answer, or not with a result.
        """
        request = {
            "language": "python",
            "code": RUNNER,
            "stdin": job_text({**job, "limits": None}, stdin).decode(),
            "run_timeout": timeout_s,
            "memory_limit_MB": self._memory >> 20,
        }
        result = self._post("/run_code", request, timeout_s + NETWORK_TIMEOUT_S).get("run_result") or {}
        text = str(result.get("stdout") or "").encode(errors="replace")
        return Output(text, result.get("status") == "Finished" and result.get("return_code") == 0)

    def _post(self, path: str, value: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        body = json.dumps(value).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                answer = json.load(reply)
        except (OSError, ValueError) as error:
            raise SandboxError(f"{self._url}{path}: {error}") from error
        if not isinstance(answer, dict) or answer.get("status") == "SandboxError":
            raise SandboxError(f"{self._url}{path} returned {str(answer)[:100]!r}")
        return answer


def runs_programs(sandbox: Sandbox) -> bool:
    """Whether a sandbox runs a program that prints 42. Raises `SandboxError`."""
    output = sandbox.run({"code": "print(42)", "operations": None}, "", PROBE_TIMEOUT_S)
    return output == Output(b"42\n", ok=True)


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
