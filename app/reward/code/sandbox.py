"""Where the program of a completion runs: under bubblewrap, or under Landlock alone where it cannot make namespaces.

Every program gets an interpreter of its own, without packages, environment or files. In either case limits and a
seccomp filter confine it to one process, which ends with it: it cannot leave anything, or reach anything but its stdin
and stdout.
"""

import contextlib
import ctypes
import marshal
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
NAMESPACES, PROCESS = "namespaces", "process"


class SandboxError(Exception):
    """A sandbox cannot run programs here."""


def frame(text: str) -> bytes:
    """Return a frame of `runner.py`. Surrogates of a completion's text, which no source has, become `?`."""
    encoded = text.encode(errors="replace")
    return b"%d\n%b" % (len(encoded), encoded)


class LocalSandbox:
    """Runs programs.

    Args:
        kind: namespaces or process.
        memory: Address space of a program, in bytes.
        stderr: Descriptor of what programs write there.
    """

    def __init__(self, kind: str, memory: int, stderr: int = subprocess.DEVNULL) -> None:
        self._kind, self._memory, self._stderr = kind, memory, stderr
        self._command = [*(bubblewrap() if kind == NAMESPACES else ()), PYTHON, "-I", "-S", "-B", "-c", LOAD_RUNNER]
        self.description = describe(kind)

    def run(self, code: str, stdin: str, timeout_s: float) -> str | None:
        """Return the stdout of a script; None unless it ends by itself within this time, with exit status 0."""
        with open(os.memfd_create("stdin"), "r+b") as given, open(os.memfd_create("stdout"), "r+b") as output:
            given.write(self._job(code, True, timeout_s) + stdin.encode(errors="replace"))
            given.seek(0)
            with self._process(given.fileno(), output.fileno()) as process:
                try:
                    status = process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    return None
            output.seek(0)
            return output.read().decode(errors="replace") if status == 0 else None

    @contextlib.contextmanager
    def started(self, code: str, timeout_s: float) -> Iterator["Program"]:
        """Run a program until the block ends; its CPU time is limited to this."""
        with self._process(subprocess.PIPE, subprocess.PIPE) as process:
            yield Program(process, self._job(code, False, timeout_s))

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
        # root's programs have a user of their own; others share that of the run, whose threads count too
        others = (
            0 if os.getuid() == 0 else int(Path("/proc/loadavg").read_text(encoding="ascii").split("/")[1].split()[0])
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


class Program:
    """A program that evaluates expressions, see `runner.py`. A fork of the process that started it may use it."""

    def __init__(self, process: subprocess.Popen[bytes], job: bytes) -> None:
        self._process, self._unsent = process, job

    def ask(self, expression: str) -> bytes:
        """Return the line that answers an expression; nothing if the program has ended. It may wait for ever."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(self._unsent + frame(expression))
            stdin.flush()
        self._unsent = b""
        return stdout.readline(MAX_OUTPUT)


def bubblewrap() -> Sequence[str]:
    """Return the command that runs another in own namespaces, with the interpreter and /usr as its only files."""
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--die-with-parent",
    ]
    if os.getuid() != 0:
        command += ["--unshare-user"]  # root makes the namespaces as itself, and the runner gives it up
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for path in dict.fromkeys((*READABLE[:-1], sys.base_prefix)):
        command += ["--ro-bind-try", path, path]
    return [*command, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


@cache
def available(kind: str) -> str | None:
    """Return why a sandbox cannot run a program on this machine; None if it can."""
    with tempfile.TemporaryFile() as errors:
        try:
            if LocalSandbox(kind, 512 << 20, errors.fileno()).run("print(42)", "", PROBE_TIMEOUT_S) == "42\n":
                return None
        except (OSError, KeyError) as error:  # no bubblewrap, or another architecture than the filter knows
            return str(error)
        errors.seek(0)
        return errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "a program did not end there"


def describe(kind: str) -> str:
    """Return a sentence about what a sandbox protects."""
    if kind == NAMESPACES:
        return "namespaces: bubblewrap and a seccomp filter, without network, files or processes of the machine"
    libc: Any = ctypes.CDLL(None)
    if libc.syscall(444, None, ctypes.c_size_t(0), 1) >= 1:  # the version of Landlock
        return "process: Landlock and a seccomp filter, without network, files or processes of the machine"
    return "process: a seccomp filter; without Landlock in the kernel, a program reads files as its user can"


def sandbox_of(name: str, memory: int) -> LocalSandbox:
    """Return the sandbox of a setting, for `auto` the first that runs programs here; else raise `SandboxError`."""
    reasons: list[str] = []
    for kind in (NAMESPACES, PROCESS) if name == "auto" else (name,):
        if (reason := available(kind)) is None:
            sandbox = LocalSandbox(kind, memory)
            sandbox.description += f" ({reasons[0]})" if reasons else ""
            return sandbox
        reasons.append(f"{kind}: {reason}")
    raise SandboxError("; ".join(reasons))
