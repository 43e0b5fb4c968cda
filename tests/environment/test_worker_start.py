"""How a worker starts and ends: its interpreter, its search path, what it refuses, and the end of its parent."""

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.environment.pool import EnvironmentSpec
from app.environment.wire import End, RendererChoice
from app.errors import ConfigError, RunError
from tests.environment.pools import PATIENCE_S, Maker, a_task, play_one, running_pool
from tests.waiting import until

PLAIN = "class Env:\n    def begin(self, task): ...\n    def step(self, reply): ..."
ROOT = Path(__file__).parents[2]


def refusal(spec: EnvironmentSpec, kind: type[Exception] = ConfigError, **pool: Any) -> str:
    """The sentence with which a pool does not start; nothing of it is left."""

    async def run() -> None:
        async with running_pool(spec, **pool):
            raise AssertionError("the pool has started")

    with pytest.raises(kind) as refused:
        asyncio.run(run())
    return str(refused.value)


def end_of(spec: EnvironmentSpec, *replies: str) -> End:
    async def run() -> End:
        async with running_pool(spec) as pool:
            return (await play_one(pool, *replies)).scored

    return asyncio.run(run())


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without packages, this one's included."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python")


def test_a_worker_imports_nothing_heavy(own: Maker) -> None:
    source = PLAIN + (
        "\n    def score(self):"
        "\n        import sys"
        "\n        names = 'numpy torch hydra omegaconf ray transformers psutil aiohttp app.errors app.types'.split()"
        "\n        return {name: 1 for name in names if name in sys.modules}"
    )
    assert end_of(own(source), "a").scores == {}


def test_an_environment_of_our_interpreter_imports_what_the_driver_can(own: Maker) -> None:
    source = (
        "import numpy, psutil, app, app.environment.protocol\n"
        + PLAIN
        + "\n    def score(self): return numpy.float32(2)"
    )
    assert end_of(own(source), "a").scores == {"score": 2.0}


def test_an_environment_of_a_bare_interpreter_has_the_working_directory_and_our_protocol(
    own: Maker, bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (
        "import os, sys\nfrom app.environment.protocol import Reply\n"
        + PLAIN
        + (
            "\n    def score(self):"
            "\n        ours = [name for name in sys.modules if name.split('.')[0] in ('numpy', 'tests', 'hydra')]"
            f"\n        ours += [path for path in sys.path if path == {str(ROOT)!r}]"
            "\n        return {'folders': sys.path.count(os.getcwd()), 'ours': len(ours)}"
        )
    )
    spec = own(source, python=bare_python)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert end_of(spec, "a").scores == {"folders": 1.0, "ours": 0.0}


def test_a_package_that_the_other_interpreter_lacks_is_named_with_it(
    own: Maker, bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = own("import numpy\n" + PLAIN, python=bare_python)
    target = spec.environment["target"]
    assert refusal(spec) == (
        f"environment._target_={target} cannot be used: module {target.removesuffix('.Env')} needs a module that is "
        f"missing (No module named 'numpy'); the interpreter is {bare_python}."
    )


@pytest.mark.parametrize(
    ("python", "reason"),
    [("/no/such/python", "No such file or directory"), ("/etc/passwd", "Permission denied")],
)
def test_an_interpreter_that_cannot_be_run_is_refused(own: Maker, python: str, reason: str) -> None:
    sentence = refusal(own(PLAIN, python=python))
    assert sentence.startswith(f"environment.python={python} ")
    assert reason in sentence


def test_a_program_that_is_no_interpreter_is_reported_with_its_end(own: Maker, tmp_path: Path) -> None:
    log = tmp_path / "environment.log"
    sentence = refusal(own(PLAIN, python="/bin/false"), RunError, log=log)
    assert (
        sentence == f"A worker of the environment could not start: the worker process died (exit code 1); log: {log}."
    )


def test_an_old_interpreter_is_refused_by_its_version(own: Maker, tmp_path: Path) -> None:
    # the script itself, in an interpreter that says that it is old
    script = ROOT / "app" / "worker" / "__main__.py"
    fake = (
        "import sys, runpy; sys.version_info = (3, 9, 1, 'final', 0); "
        f"sys.argv = ['x', '1', '0', 'handler']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    said = subprocess.run([sys.executable, "-c", fake], capture_output=True, text=True, check=True).stdout
    assert "it is Python 3.9.1; give 3.11 or later." in said


def test_a_path_that_does_not_load_and_wrong_arguments_are_refused(own: Maker) -> None:
    spec = own(PLAIN)
    wrong = dataclasses.replace(spec, environment={**spec.environment, "target": "no_such_module.Env"})
    assert refusal(wrong) == (
        "environment._target_=no_such_module.Env cannot be used: there is no module no_such_module (searched the "
        f"working directory and PYTHONPATH); the interpreter is {sys.executable}."
    )
    target = spec.environment["target"]
    assert refusal(own(PLAIN, args={"size": 3})).partition(" cannot be used: ")[2] == (
        "it does not take environment.args={\"size\": 3} (got an unexpected keyword argument 'size'); "
        f"the interpreter is {sys.executable}."
    )
    broken = own("def f(:\n" + PLAIN)
    assert re.search(r"cannot be imported \(SyntaxError: invalid syntax at /\S+\.py:3\); ", refusal(broken))
    assert target != broken.environment["target"]


def test_a_memory_limit_that_the_worker_itself_exceeds_is_refused(own: Maker) -> None:
    refused = refusal(own(PLAIN, memory_gib=0.001))
    wanted = r"environment.memory_gib=0.001 is not accepted: give more than 0\.\d+, which the worker has allocated .*\."
    assert re.fullmatch(wanted, refused), refused


def test_an_unknown_renderer_is_refused(own: Maker) -> None:
    spec = dataclasses.replace(own(PLAIN), renderer=RendererChoice("llama", "models/llama", "template"))
    assert refusal(spec) == (
        f"The renderer llama of models/llama cannot be used in {sys.executable}: "
        "llama is not a renderer: give characters."
    )


def test_an_environment_that_ends_the_process_while_it_is_imported_is_reported(own: Maker) -> None:
    sentence = refusal(own("import os; os._exit(7)\n" + PLAIN), RunError, workers=2)
    assert sentence == "A worker of the environment could not start: the worker process died (exit code 7)."


def test_a_worker_that_dies_once_while_it_starts_is_replaced(own: Maker, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    dies_once = f"import os\nif not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w')\n    os._exit(7)\n"
    assert isinstance(end_of(own(dies_once + PLAIN), "a"), End)
    assert mark.exists()


def test_an_environment_whose_import_hangs_is_given_up(own: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.environment.pool.START_TIMEOUT_S", 1.0)
    sentence = refusal(own("import threading; threading.Event().wait()\n" + PLAIN), RunError)
    assert sentence == "A worker of the environment could not start: it did not load the environment within 1 s."


async def test_a_replaced_worker_that_cannot_load_the_environment_ends_every_wait(own: Maker, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    source = f"import os\nif os.path.exists({str(flag)!r}): raise OSError('gone')\n" + PLAIN.replace(
        "def begin(self, task): ...", f"def begin(self, task): open({str(flag)!r}, 'w'); os._exit(3)"
    )

    async with running_pool(own(source), episodes=1) as pool:
        session = await pool.begin(a_task(), [1])
        waiting = asyncio.ensure_future(pool.begin(a_task(), [1]))
        died = await asyncio.wait_for(session.next(), PATIENCE_S)
        with pytest.raises(RunError) as gone:
            await asyncio.wait_for(waiting, PATIENCE_S)
        with pytest.raises(RunError):
            await pool.begin(a_task(), [1])
        sentence = str(gone.value)
    assert died.kind == "died"
    assert sentence.startswith("A worker of the environment cannot be started: environment._target_=")
    assert "(OSError: gone at " in sentence


def test_a_worker_dies_with_its_parent_and_ignores_its_ctrl_c(own: Maker, tmp_path: Path) -> None:
    spec = own(
        PLAIN.replace("def begin(self, task): ...", "async def begin(self, task): __import__('time').sleep(1e6)")
    )
    driver = f"""
        import asyncio
        from app.environment.pool import EnvironmentPool
        from app.environment.pool import EnvironmentSpec
        from app.environment.wire import Limits, RendererChoice
        from tests.environment.pools import a_task

        async def main():
            spec = EnvironmentSpec({dict(spec.environment)!r}, {spec.renderer!r}, {spec.limits!r})
            pool = EnvironmentPool(spec, workers=2, episodes=2, log=None, warn=print)
            await pool.start()
            await pool.begin(a_task(), [1])
            print(*pool.pids, flush=True)
            await asyncio.sleep(1e6)

        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(driver)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(workers) == 2

        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
        assert all(worker.is_running() for worker in workers)

        process.kill()
        until(lambda: not any(map(_runs, workers)), PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
