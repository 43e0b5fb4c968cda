"""Runs the program of a completion in an interpreter of its own, without packages, environment or files.

Landlock, resource limits and a seccomp filter confine it to one process. It reaches nothing but its stdin and stdout,
and leaves nothing behind. Without Landlock in the kernel it reads what its user can read. Unless the run is root's,
that is the run's user, so it can read the tests, in the data files and in `/proc/<pid>/mem` of the judging process.
Setting PR_SET_DUMPABLE to 0 there would hide that process from the process reaper too, and would not hide the files.

Why a filter of our own: sockets, signals, SysV memory, queues and keys are not files, so neither Landlock nor resource
limits refuse them. The libseccomp binding on the package index (pyseccomp) is from 2021. The filter lists what an
interpreter needs, so it does not age: system calls that new kernels add are refused.
"""

import contextlib
import ctypes
import marshal
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
LANDLOCK_VERSION = 444, None, ctypes.c_size_t(0), 1  # the system call landlock_create_ruleset

# Name, number on x86_64, on aarch64; - where there is none. As in asm/unistd_64.h and asm-generic/unistd.h.
ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, lseek 8 62, close 3 57, dup 32 23, dup2 33 -,
dup3 292 24, pipe2 293 59, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -,
faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, mmap 9 222,
munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, futex 202 98, set_robust_list 273 99,
rseq 334 293, sched_yield 24 124, sched_getaffinity 204 123, exit 60 93, exit_group 231 94, restart_syscall 219 128,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, setitimer 38 103,
getitimer 36 102, alarm 37 -, pause 34 -, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
nanosleep 35 101, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getrandom 318 278, getpid 39 172,
getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, uname 63 160,
sysinfo 99 179, getrlimit 97 163, setrlimit 160 164, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, sendto 44 206,
recvfrom 45 207, getsockname 51 204, getsockopt 55 209, shutdown 48 210,
clone 56 220, openat 257 56, prlimit64 302 261, fcntl 72 25, ioctl 16 29, socketpair 53 199
"""
# Values that an argument may have. fcntl and ioctl could make another process receive a signal; a datagram socket could
# send to an address.
VALUES = {
    "prlimit64": {0: [0]},  # this process
    "fcntl": {1: [0, 1, 2, 3, 4, 1030]},  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
    "ioctl": {1: [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]},  # a terminal?, its size, FIONREAD, FIONBIO, FIOCLEX
    "socketpair": {0: [1], 1: [1, 0o4001, 0o2000001, 0o2004001]},  # AF_UNIX, SOCK_STREAM; asyncio has one
}
# Bits of an argument: at least one must be set, or none may be.
BITS = {"clone": (0, 0x10000, True), "openat": (2, 0o1103, False)}  # a thread; no writing
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
LOAD, EQUALS, HAS_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 38  # ENOSYS, for which libc has its fallbacks

Instruction = tuple[int, int, int, int]  # code, instructions to skip if true, if false, operand
Ask = Callable[[str], bytes]  # an expression → the line that answers it, empty at the end of the program; may block


def frame(text: str) -> bytes:
    """Return a frame for `runner.py`. Lone surrogates, which no source file has, become `?`."""
    encoded = text.encode(errors="replace")
    return b"%d\n%b" % (len(encoded), encoded)


class LocalSandbox:
    """Runs programs in at most `memory` bytes of address space. Their stderr goes to a descriptor."""

    def __init__(self, memory: int, stderr: int = subprocess.DEVNULL) -> None:
        self._memory = memory
        self._process: dict[str, Any] = {
            "args": [PYTHON, "-I", "-S", "-B", "-c", LOAD_RUNNER],
            "stderr": stderr,
            "env": {MARK: os.environ[MARK]} if MARK in os.environ else {},  # for the process reaper
            "cwd": "/",
            "start_new_session": True,  # a signal to its process group must not reach ours
        }

    def run(self, code: str, stdin: str, timeout_s: float) -> str | None:
        """Return the stdout of a script; None unless it exits with status 0 within this time."""
        # Files, not pipes: the kernel limits the size of stdout, and programs ask for the size of stdin, or map it.
        with open(os.memfd_create("stdin"), "r+b") as given, open(os.memfd_create("stdout"), "r+b") as output:
            given.write(self._job(code, True, timeout_s) + stdin.encode(errors="replace"))
            given.seek(0)
            try:
                done = subprocess.run(**self._process, stdin=given, stdout=output, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return None
            output.seek(0)
            return output.read().decode(errors="replace") if done.returncode == 0 else None

    @contextlib.contextmanager
    def started(self, code: str, timeout_s: float) -> Iterator[Ask]:
        """Run a program until the block ends, with this much CPU time. A fork of this process may send expressions."""
        unsent = [self._job(code, False, timeout_s)]
        with subprocess.Popen(**self._process, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            to_program: Any = process.stdin
            from_program: Any = process.stdout

            def ask(expression: str) -> bytes:
                with contextlib.suppress(BrokenPipeError):
                    to_program.write(b"".join(unsent) + frame(expression))
                    to_program.flush()
                unsent.clear()
                line: bytes = from_program.readline(MAX_OUTPUT)
                return line

            try:
                yield ask
            finally:
                process.kill()

    def _job(self, code: str, script: bool, timeout_s: float) -> bytes:
        others = 0  # root's programs have a user of their own; others share the run's, whose threads count too
        if os.getuid():
            others = int(Path("/proc/loadavg").read_text(encoding="ascii").split("/")[1].split()[0])
        limits = {
            "parent": os.getpid(),
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


@cache
def unavailable() -> str | None:
    """Return why programs cannot run on this machine; None if they can."""
    with tempfile.TemporaryFile() as errors:
        try:
            if LocalSandbox(512 << 20, errors.fileno()).run("print(42)", "", PROBE_TIMEOUT_S) == "42\n":
                return None
        except (OSError, KeyError) as error:  # of another architecture than the filter knows
            return str(error)
        errors.seek(0)
        return errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "a program did not end there"


def reads_files() -> bool:
    """Whether programs can read their user's files, as in a kernel without Landlock."""
    libc: Any = ctypes.CDLL(None)
    return bool(libc.syscall(*LANDLOCK_VERSION) < 1)


def seccomp_filter() -> bytes:
    """Return the filter for this machine. Raises `KeyError` unless it is x86_64 or aarch64."""
    column, architecture = ARCHITECTURES[os.uname().machine]
    program: list[Instruction] = [(LOAD, 0, 0, 4), (EQUALS, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for entry in ALLOWED.split(","):
        name, *numbers = entry.split()
        block: list[Instruction] = []  # decides by the call's arguments, of which it compares the lower 32 bits
        for argument, values in VALUES.get(name, {}).items():
            block.append((LOAD, 0, 0, 16 + 8 * argument))
            block += [(EQUALS, len(values) - index, 0, value) for index, value in enumerate(values)]
            block.append((RETURN, 0, 0, REFUSE))
        if name in BITS:
            argument, bits, required = BITS[name]
            block += [(LOAD, 0, 0, 16 + 8 * argument), (HAS_BITS, int(required), int(not required), bits)]
            block.append((RETURN, 0, 0, REFUSE))
        block.append((RETURN, 0, 0, ALLOW))
        if numbers[column] != "-":
            program += [(EQUALS, 0, len(block), int(numbers[column])), *block]
    return b"".join(struct.pack("=HBBI", *each) for each in [*program, (RETURN, 0, 0, REFUSE)])
