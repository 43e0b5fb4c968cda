"""What a program cannot reach or leave: the seccomp filter by its decisions, and the sandboxes by trying."""

import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from app.reward.code import sandbox
from app.reward.code.judge import Judge
from app.reward.code.row_tests import read_tests
from app.reward.code.sandbox import LocalSandbox, unavailable
from tests.reward.test_code_hostile import returned
from tests.waiting import until

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
ALLOWED, REFUSED, KILLED = sandbox.ALLOW, sandbox.REFUSE, sandbox.KILL
LIBC = "import ctypes, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def numbers(machine: str) -> dict[str, int]:
    """Return the numbers of system calls, from the kernel's header."""
    if not Path(HEADERS[machine]).exists():
        pytest.skip("the kernel's headers are not installed")
    text = Path(HEADERS[machine]).read_text()
    found = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text)}
    return {"newfstatat" if name == "fstatat" else name: number for name, number in found.items()}


def decision(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """Run the filter of an architecture as the kernel would."""
    words = [number, architecture, 0, 0]
    for each in [*arguments, *[0] * (6 - len(arguments))]:
        words += [each & 0xFFFFFFFF, each >> 32]
    original = os.uname
    os.uname = lambda: os.uname_result((*original()[:4], machine))
    try:
        code = sandbox.seccomp_filter()
    finally:
        os.uname = original
    position, loaded = 0, 0
    while True:
        operation = int.from_bytes(code[position : position + 2], "little")
        if_true, if_false = code[position + 2], code[position + 3]
        operand = int.from_bytes(code[position + 4 : position + 8], "little")
        position += 8
        if operation == 0x06:
            return operand
        if operation == 0x20:
            loaded = words[operand // 4]
        else:
            holds = loaded == operand if operation == 0x15 else bool(loaded & operand)
            position += 8 * (if_true if holds else if_false)


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_allows_what_it_names_and_nothing_else(machine: str) -> None:
    known = numbers(machine)
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    names = {entry.split()[0] for entry in sandbox.ALLOWED.split(",")}
    free = names - set(sandbox.VALUES) - set(sandbox.BITS)
    decided = {name: decision(machine, architecture, number) for name, number in known.items()}
    allowed = {name for name, found in decided.items() if found == ALLOWED}
    assert allowed - {"prlimit64", "fcntl", "openat"} == free & set(known)
    dangerous = (
        "socket connect bind sendmsg sendmmsg fork vfork clone3 execve execveat kill tgkill ptrace process_vm_readv "
        "shmget msgget semget mq_open memfd_create add_key keyctl unshare setns mount prctl io_uring_setup bpf "
        "unlink unlinkat rename mkdir mkdirat ftruncate truncate fallocate setsid rt_sigqueueinfo pidfd_open"
    )
    assert {decided[name] for name in dangerous.split() if name in known} == {REFUSED}
    assert decision(machine, architecture ^ 1, known["read"]) == KILLED
    assert decision(machine, architecture, known["read"] | 0x40000000) == REFUSED  # the x32 interface

    def ask(name: str, *arguments: int) -> bool:
        return decision(machine, architecture, known[name], *arguments) == ALLOWED

    assert [ask("clone", flags) for flags in (signal.SIGCHLD, 0x10000000, 0x3D0F00)] == [False, False, True]
    assert [ask("openat", 0, 0, flags) for flags in (0, os.O_CLOEXEC)] == [True] * 2
    assert [ask("openat", 0, 0, flags) for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT)] == [False] * 3
    assert [ask("prlimit64", pid) for pid in (0, 1)] == [True, False]
    assert [ask("fcntl", 0, command) for command in (1, 1030, 8, 10, 1024, 1031)] == [True, True, *[False] * 4]
    assert [ask("ioctl", 0, command) for command in (0x5401, 0x5421)] == [True] * 2
    assert [ask("ioctl", 0, command) for command in (0x8901, 0x8902, 0x5412)] == [False] * 3
    pairs = [(1, 1), (1, 1 | socket.SOCK_CLOEXEC), (1, 2), (1, 5), (2, 1), (30, 1)]
    assert [ask("socketpair", *each) for each in pairs] == [True, True, *[False] * 4]


@pytest.fixture
def judge() -> Judge:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    return Judge(LocalSandbox(256 << 20), stop_early=True, timeout_s=10.0)


# What a program tries: one of each kind that the filter decides
REFUSALS = {
    "SysV memory": "def f(_):\n    return libc.shmget(0, 1 << 20, 0o1600)\n",
    "POSIX memory": "def f(_):\n    return libc.shm_open(b'/left', 0o102, 0o600)\n",
    "a fork": "def f(_):\n    return libc.fork()\n",
    "a life after its parent": "def f(_):\n    return libc.prctl(1, 0)\n",
    "a Unix socket": "def f(_):\n    return libc.socket(1, 1, 0)\n",
    "a pair of sockets that send anywhere": "def f(_):\n    return libc.socketpair(1, 2, 0, (ctypes.c_int * 2)())\n",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_program_cannot_have(judge: Judge, name: str) -> None:
    assert returned(judge, LIBC + REFUSALS[name]) == -1


@pytest.fixture
def listening() -> Iterator[tuple[str, socket.socket]]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, 0o711)
        server.bind(path := f"{folder}/socket")
        os.chmod(path, 0o777)
        server.listen()
        server.setblocking(False)
        yield path, server


def test_a_program_connects_to_no_socket_and_reads_no_file_of_others(
    judge: Judge, listening: tuple[str, socket.socket]
) -> None:
    path, server = listening
    program = (
        "import os, socket\ndef f(path):\n    found = []\n"
        "    for act in (lambda: socket.socket(socket.AF_UNIX).connect(path), lambda: open(path + '.txt').read(),\n"
        "        lambda: os.listdir(os.path.dirname(path)), lambda: open(f'/proc/{os.getppid()}/environ').read(),\n"
        "        lambda: open(f'/proc/{os.getppid()}/mem').read(1)):\n"
        "        try:\n            found.append(str(act()))\n"
        "        except (OSError, ValueError) as error:\n            found.append(type(error).__name__)\n"
        "    return [each for each in found if not each.endswith('Error')]\n"
    )
    Path(f"{path}.txt").write_text("secret")
    os.chmod(f"{path}.txt", 0o644)
    assert returned(judge, program, path) == []
    with pytest.raises(BlockingIOError):
        server.accept()


SURVIVOR = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.prctl(1, 0)
libc.prctl(15, b"survivor")
environ = ctypes.POINTER(ctypes.c_void_p).in_dll(libc, "environ")
for index in range(100):
    if not environ[index]:
        break
    ctypes.memset(environ[index], 0, len(ctypes.string_at(environ[index])))
time.sleep(100)
"""
WORKER = """
import sys
from app.reward.code.sandbox import LocalSandbox
LocalSandbox(1 << 28).run(sys.argv[1], "", 300.0)
"""


def test_a_program_that_hides_ends_with_its_worker() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    worker = psutil.Popen(
        [sys.executable, "-c", WORKER, SURVIVOR], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        until(lambda: bool(worker.children(recursive=True)), 30)
        time.sleep(0.5)  # it hides now
        programs = worker.children(recursive=True)
    finally:
        worker.kill()
        worker.wait()
    assert programs
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in programs), 10)


BARE = {
    "a bare except": "try:\n    f(-1)\n    ok = False\nexcept:\n    ok = True\nassert ok",
    "every exception": "try:\n    f(-1)\n    ok = False\nexcept BaseException:\n    ok = True\nassert ok",
    "suppressed": "import contextlib\nok = True\n"
    "with contextlib.suppress(BaseException):\n    f(-1)\n    ok = False\nassert ok",
    "a return in finally": "def t():\n    try:\n        return f(-1) == 1 and 'bad'\n"
    "    finally:\n        return 'ok'\nassert t() == 'ok'",
    "a helper": "def raises(g, *a):\n    try:\n        g(*a)\n    except:\n        return True\n    return False\n"
    "assert raises(f, -1)",
    "one exception": "try:\n    f(-1)\n    ok = False\nexcept ValueError:\n    ok = True\nassert ok",
}
ABSENT = {
    "nothing": "pass\n",
    "no syntax": "def f(:\n",
    "an exception": "def f(x):\n    raise ValueError\nraise ValueError\n",
    "an end": "import sys\ndef f(x):\n    raise ValueError\nsys.exit(0)\n",
    "an end in the function": "import os\ndef f(x):\n    os._exit(0)\n",
    "closed descriptors": "import os\ndef f(x):\n    os.closerange(0, 64)\n    raise ValueError\n",
    "a crash": "import ctypes\ndef f(x):\n    ctypes.string_at(0)\n",
    "a signal": "import signal\ndef f(x):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    signal.pause()\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BARE)
def test_a_test_that_catches_everything_passes_only_if_the_program_ran(judge: Judge, name: str) -> None:
    row = read_tests({"test_list": [BARE[name]]})
    assert judge.passed("def f(x):\n    raise ValueError\n", row) == 1
    assert judge.passed("def f(x):\n    return 1\n", row) == (name == "a return in finally")
    assert {each: judge.passed(program, row) for each, program in ABSENT.items()} == dict.fromkeys(ABSENT, 0)


def test_a_test_that_never_asks_the_program_fails(judge: Judge) -> None:
    for row in ({"test_list": ["assert max(1, 2) == 2"]}, {"test_list": ["assert True"]}):
        assert judge.passed("pass\n", read_tests(row)) == 0
    check = {"test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n", "entry_point": "sum"}
    assert judge.passed("pass\n", read_tests(check)) == 0


FORGED = """import os
line = {line}
for descriptor in range(3, 64):
    try:
        left = line
        while left:
            left = left[os.write(descriptor, left):]
    except OSError:
        pass
def f(x):
    return 1
"""
LINES = {
    "colliding hashes": """b'["value",{"set":[%b]}]\\n' % b','.join(b'%d' % n for n in range(0, 2**77, 2**61 - 1))""",
    "an endless range": """b'["value",{"deque":{"range":[0,1000000000000,1]}}]\\n'""",
    "nesting": """b'["value",' + b'[' * 1_000_000 + b'\\n'""",
    "a long number": """b'["value",' + b'9' * 3_000_000 + b']\\n'""",
    "an exponent": """b'["value",{"dict":[[{"Decimal":["1e999999999"]},1]]}]\\n'""",
    "endless calls": """b'["call",[0,[],{"dict":[]}]]\\n' * 1000""",
    "an object of another place": """b'["value",{"object":99}]\\n'""",
    "an expression for an object": """b'["value",{"object":"0] or 1"}]\\n'""",
    "a class": """b'["value",{"class":["eval"]}]\\n'""",
    "no line": """b'x' * 5_000_000""",
}


@pytest.mark.parametrize("name", LINES)
def test_forged_answers_cost_no_time_and_gain_nothing(judge: Judge, name: str) -> None:
    judge = replace(judge, timeout_s=1.0)
    row = read_tests({"test_list": ["value = f(1)\nassert value == 2 or next(iter(value)) < 0 or int(value) == 2"]})
    begin = time.monotonic()
    assert judge.passed(FORGED.replace("{line}", LINES[name]), row) == 0
    assert time.monotonic() - begin < 2.5


def test_an_argument_cannot_be_changed_to_fit_a_result(judge: Judge) -> None:
    row = read_tests({"test_list": ["a = [3, 1, 2]\nassert f(a) == sorted(a)"]})
    assert judge.passed("def f(a):\n    a.clear()\n    return []\n", row) == 0


def test_a_comparison_with_a_value_is_never_the_programs(judge: Judge) -> None:
    liar = (
        "class Yes:\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *_: True\n"
        "    __ne__ = lambda *_: False\n    __hash__ = lambda _: 0\n    __len__ = lambda _: 1\n"
        "    __class__ = int\n    __float__ = lambda _: 1.0\ndef f(x):\n    return Yes()\n"
    )
    tests = "f(3) == 9; 9 == f(3); not f(3) != 9; 8 < f(3) < 10; f(3) in [9]; 9 in f(3); f(3) in {9: 1}; [f(3)] == [9]"
    for test in tests.split("; "):
        assert judge.passed(liar, read_tests({"test_list": [f"assert {test}"]})) == 0, test


def test_a_difference_from_a_value_is_never_the_programs(judge: Judge) -> None:
    liar = (
        "class Near:\n    __sub__ = __rsub__ = __mod__ = __xor__ = lambda *_: 0.0\n    __add__ = lambda *_: Zero()\n"
        "    __truediv__ = __rtruediv__ = lambda *_: 1.0\ndef f(x):\n    return Near()\n"
        "class Zero:\n    __abs__ = __float__ = lambda _: 0.0\n    __bool__ = lambda _: False\n"
        "    __neg__ = __sub__ = lambda *_: Zero()\n"
    )
    tests = "abs(f(3) - 9) < 1e-6; abs(9 - f(3)) < 1e-6; f(3) % 9 == 0; not f(3) ^ 9; f(3) / 9 == 1; 9 / f(3) == 1; "
    tests += "abs(f(3) + -9) < 1e-6; float(f(3) + -9) == 0; not f(3) + -9; abs(-(f(3) + -9)) == 0"
    for test in tests.split("; "):
        assert judge.passed(liar, read_tests({"test_list": [f"assert {test}"]})) == 0, test
    own = (
        "class V:\n    def __init__(self, x): self.x = x\n    __mul__ = __rmul__ = lambda self, n: V(self.x * n)\n"
        "f = V\n"
    )
    for test in ("(f(3) * 2).x == 6", "(2 * f(3)).x == 6"):
        assert judge.passed(own, read_tests({"test_list": [f"assert {test}"]})) == 1, test
