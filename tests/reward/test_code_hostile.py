"""Programs that want to pass without the answer, or to harm the machine. Each scores 0 and leaves nothing behind."""

import ctypes
import glob
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.reward.code.judge import Judge
from app.reward.code.row_tests import Asserts, Stdin, read_tests
from app.reward.code.sandbox import LocalSandbox, unavailable
from tests.waiting import alive, until

SECRET = f"secret-{uuid.uuid4().hex}"
NAME = f"hostile-{uuid.uuid4().hex}"
ROW = Asserts("", [f"assert f(3) == '{SECRET}'"])
INPUT = Stdin([("3\n", SECRET)])
GUESS = "def f(x):\n    return 'PASSED'\n"
FORGED = '[0, 0, {"object": "X"}]\n[0, 0, true]\n{"score": 1}\nPASSED\n'

ASSERTED = {
    "forks": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
    + GUESS,
    "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(600,)).start()\n",
    "loop": "while True:\n    pass\n",
    "loop in the function": "def f(x):\n    while True:\n        pass\n",
    "memory": "def f(x):\n    return [bytearray(1 << 24) for _ in range(1 << 16)]\n",
    "one string": "def f(x):\n    return 'x' * (1 << 40)\n",
    "output": "import os\nwhile True:\n    os.write(1, b'x' * 65536)\n",
    "files": (
        "import os\n"
        "for folder in ('.', '/tmp', '/var/tmp', '/dev/shm', '/'):\n"
        "    try:\n"
        f"        with open(os.path.join(folder, '{NAME}'), 'wb') as file:\n"
        "            for _ in range(256):\n"
        "                file.write(bytes(1 << 20))\n"
        "    except OSError:\n"
        "        pass\n"
    )
    + GUESS,
    "signals": (
        "import os, signal\n"
        "for pid in (os.getppid(), 0, -1, *map(int, filter(str.isdigit, os.listdir('/proc')))):\n"
        "    for number in (signal.SIGTERM, signal.SIGKILL):\n"
        "        try:\n"
        "            if pid != os.getpid():\n"
        "                os.kill(pid, number)\n"
        "        except OSError:\n"
        "            pass\n"
    )
    + GUESS,
    "closed stdout": "import os\nos.closerange(0, 64)\n" + GUESS,
    "equal to everything": (
        "class Yes(str):\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n    __hash__ = str.__hash__\n"
        "def f(x):\n    return Yes('x')\n"
    ),
    "assert": (
        "import builtins, sys\n"
        "class Silent(BaseException):\n    pass\n"
        "builtins.AssertionError = Silent\n"
        "builtins.isinstance = builtins.eval = builtins.exec = lambda *_: True\n"
        "sys.modules['builtins'] = sys.modules['os'] = sys\n"
        "sys.excepthook = sys.settrace = print\n"
    )
    + GUESS,
    "marker": (
        "import os\n"
        "for each in range(64):\n"
        "    try:\n"
        f"        os.write(each, {FORGED.encode()!r})\n"
        "    except OSError:\n"
        "        pass\n"
    )
    + GUESS,
    "deep value": (
        "def f(x):\n    value = []\n    for _ in range(100_000):\n        value = [value]\n    return value\n"
    ),
}
READING = {
    "loop": "while True:\n    pass\n",
    "output": "while True:\n    print('x' * 65536)\n",
    "exit": "import os\nos._exit(0)\n",
    "closed stdout": "import os\nos.closerange(0, 64)\nprint(input())\n",
    "marker": f"print({FORGED!r})\n",
    "input": "print(open(0).read())\n",
}
SEARCH = """
import gc, os, re, sys
MARK = "secret-" + "control"
def f(path):
    texts = [repr(gc.get_objects()), repr(sys.argv), repr(dict(os.environ)), repr(sys.orig_argv)]
    frame = sys._getframe()
    while frame is not None:
        texts.append(repr(frame.f_globals) + repr(frame.f_locals))
        frame = frame.f_back
    files = [path, "/proc/self/environ", "/proc/self/cmdline"]
    try:
        pids = [each for each in os.listdir("/proc") if each.isdigit()]
    except OSError:
        pids = []
    for pid in pids:
        files += [f"/proc/{pid}/environ", f"/proc/{pid}/cmdline"]
        files += [f"/proc/{pid}/fd/{number}" for number in range(8)] if pid == str(os.getpid()) else []
    for file in files:
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
                texts.append((opened.read(1 << 20) or b"").decode(errors="replace"))
        except OSError:
            pass
    found = {each for text in texts for each in re.findall("secret-[0-9a-z]+", text)}
    return sorted(found)
"""


@pytest.fixture
def patient() -> Judge:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    return Judge(LocalSandbox(256 << 20), stop_early=True, timeout_s=60.0)


@pytest.fixture
def judge(patient: Judge) -> Judge:
    return replace(patient, timeout_s=0.5)


def returned(judge: Judge, program: str, argument: str = "") -> Any:
    """Return what `f(argument)` of a program returns."""
    with judge.sandbox.started(program, 60.0) as ask:
        return json.loads(ask(f"'value', g['f']({argument!r})"))[1]


@pytest.fixture(autouse=True)
def _leaves_the_machine_as_before() -> Iterator[None]:
    """Orphans of programs become children of this process."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    children = set(psutil.Process().children(recursive=True))
    descriptors = os.listdir("/proc/self/fd")
    mounts = Path("/proc/self/mountinfo").read_text()
    yield
    until(lambda: not any(map(alive, set(psutil.Process().children(recursive=True)) - children)), 30)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert [path for folder in ("", "tmp", "var/tmp", "dev/shm") for path in glob.glob(f"/{folder}/{NAME}")] == []
    assert not Path(NAME).exists()
    ctypes.CDLL(None).prctl(36, 0)


@pytest.mark.parametrize("name", ASSERTED)
def test_a_hostile_program_fails_asserts(judge: Judge, name: str) -> None:
    assert judge.passed(ASSERTED[name], ROW) == 0


@pytest.mark.parametrize("name", READING)
def test_a_hostile_program_fails_a_test_of_its_output(judge: Judge, name: str) -> None:
    assert judge.passed(READING[name], INPUT) == 0


def test_a_program_finds_the_expected_value_nowhere(patient: Judge) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as rows:
        rows.write(SECRET)
        rows.flush()
        os.chmod(rows.name, 0o644)
        assert returned(patient, SEARCH, rows.name) == ["secret-control"]


def test_names_that_a_test_needs_are_not_those_of_the_program(patient: Judge) -> None:
    row = read_tests({"test_list": ["assert math.isclose(f(3), 2.5) and all([f(3) == 2.5])"]})
    forged = "class math:\n    isclose = lambda *_: True\ndef all(x):\n    return True\ndef f(x):\n    return 1.0\n"
    assert patient.passed(forged, row) == 0
    assert patient.passed("def f(x):\n    return 2.5\n", row) == 1


def test_a_program_ends_no_loop_of_a_test(patient: Judge) -> None:
    row = read_tests({"test_list": ["assert all(map(lambda pair: f(pair[0]) == pair[1], [(1, 2), (3, 4)]))"]})
    assert patient.passed("def f(x):\n    raise StopIteration\n", row) == 0
    assert patient.passed("def f(x):\n    return x + 1\n", row) == 1


def test_an_endless_test_of_the_programs_values_ends_at_the_deadline(judge: Judge) -> None:
    row = Asserts("", ["assert sum(1 for _ in range(f(3))) < 0"])
    begin = time.monotonic()
    assert judge.passed("def f(x):\n    return 10 ** 15\n", row) == 0
    assert time.monotonic() - begin < 30


DRIVER = """
import sys
from tests.reward.scorers import running_scorer, trajectory
with running_scorer(components={"code": 1.0}, workers=1, timeout_s=600.0) as scorer:
    scorer.scored([trajectory(sys.argv[1], test_list=["assert f(3) == 3"])])
"""
ENDLESS = f"""```python
import os
try:
    open('/tmp/{NAME}', 'w').write('x')
    if os.fork() == 0:
        os.setsid()
except OSError:
    pass
while True:
    pass
```
"""
RUNNING_S = 0.3  # CPU time of an endless program, far more than the start of its interpreter


def test_a_killed_worker_and_a_killed_driver_leave_no_process_and_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = psutil.Popen([sys.executable, "-c", DRIVER, ENDLESS], env=environment, start_new_session=True)

    def running() -> bool:
        workers = driver.children()
        programs = [each for worker in workers for each in worker.children(recursive=True)]
        return sum(alive(each) and each.cpu_times().user > RUNNING_S for each in programs) == 1  # it may not fork

    def kill(victim: psutil.Process) -> None:
        descendants = victim.children(recursive=True)
        victim.kill()
        until(lambda: not any(map(alive, descendants)), 30)

    try:
        until(running, 60)
        kill(driver.children()[0])
        until(running, 60)  # in another worker
        kill(driver)
    finally:
        driver.kill()
        driver.wait()
    assert list(tmp_path.iterdir()) == []
