"""What the whole session shares: one Ray, one SGLang server, one tiny model."""

import asyncio
import gc
import inspect
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from app.cluster.process_reaper import RAY_PARENT_BYTES, temporary_folder
from app.utils.child_environment import for_children, home_is_writable, make_home, replace_environment
from tests.environment.pools import Maker
from tests.runs import Run, shared_fork_server

if TYPE_CHECKING:  # heavy: imported where used
    from app.rollout.engine.remote import RemoteEngine
    from app.rollout.engine.server import ServerSpec

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private cluster of the tests
settings.register_profile("any machine", deadline=None)  # a busy one is slower than hypothesis allows
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests what a run gives its processes: an environment, a home and temporary files that they can use."""
    if hasattr(config, "workerinput"):
        return  # inherited
    replace_environment(for_children(os.environ))
    if len(tempfile.gettempdir()) > RAY_PARENT_BYTES or not home_is_writable():
        parent = tempfile.gettempdir()
        folder = temporary_folder(parent, f"tests-{os.getpid()}")
        config.add_cleanup(lambda: shutil.rmtree(Path(parent, Path(folder).name), ignore_errors=True))
        config.add_cleanup(lambda: Path(folder).unlink() if Path(folder).is_symlink() else None)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if not home_is_writable():
            make_home(Path(folder, "home"))
            os.environ["HOME"] = str(Path(folder, "home"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes", type=Path, help="a JSON file that gets a line a test: its outcome, its seconds and the machine"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How slow tests ended, to be committed: a test that ran again replaces what the file said of it."""
    path: Path | None = config.getoption("--outcomes")
    if path is None:
        return
    from tests.bench.machine import machine

    found = json.loads(path.read_text()) if path.exists() else {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            name = report.nodeid.removeprefix("tests/")
            properties = dict(report.user_properties)
            found[name] = {"outcome": outcome, "seconds": round(report.duration, 1), **properties, **machine()}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, who runs what."""
    from tests.parallel import WholeFiles

    return WholeFiles(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not visit it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The model of `model=tiny`."""
    from app.config.model import TINY_MODELS

    return TINY_MODELS / "tiny"


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny models of other seeds or sizes: `made_model(Recipe(layers=4), seed=1)`, each once in a session."""
    from tests.tiny_models.make import Recipe, make

    @cache
    def made(recipe: Recipe, *, seed: int = 0, warmed_up: bool = True) -> Path:
        return make(recipe, tmp_path_factory.mktemp("tiny"), seed=seed, warmed_up=warmed_up)

    return made


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Makes the spec of an environment from its source; the module is on the driver's search path."""
    monkeypatch.syspath_prepend(tmp_path)
    return Maker(tmp_path)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module into the working directory, which sys.path lacks as with the installed command; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])

    def write(source: str) -> str:
        (tmp_path / f"own_{tmp_path.name}.py").write_text(source)
        return f"own_{tmp_path.name}"

    return write


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small models: they compute faster on one thread, the more so on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray, with more CPU slots than cores: they are only places for actors."""
    import ray

    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.parallel import uses_ray

        file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        assert uses_ray(file), f"{file} is missing in RAY of tests/parallel.py"
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 * 1024 * 1024
    )
    yield
    ray.shutdown()


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run with these overrides; several in one test are attempts of the same run."""
    runs: list[Run] = []

    def start_run(*overrides: str, module: str = "app") -> Run:
        runs.append(Run(tmp_path, *overrides, module=module))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


@pytest.fixture(scope="session")
def engine(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["RemoteEngine"]:
    """One SGLang server with the tiny model, behind its host actor. Tests leave it idle, with these weights."""
    yield from running(make_engine(tiny_model, tmp_path_factory.mktemp("engine")))


@pytest.fixture(scope="session")
def engine_with_adapters(
    ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["RemoteEngine"]:
    """One server that serves adapters of the tiny model, at most 4. Completions end at their token limit. Idle."""
    from tests.rollout.adapters import adapter_engine
    from tests.rollout.support import without_end

    folder = tmp_path_factory.mktemp("adapters")
    yield from running(adapter_engine(without_end(tiny_model, folder), folder, name="engine 0"))


def running(engine: "RemoteEngine") -> Iterator["RemoteEngine"]:
    asyncio.run(engine.start(300))
    yield engine
    asyncio.run(engine.stop())


def server_spec(model: Path, folder: Path, *, name: str = "engine 0", seed: int = 0, **flags: Any) -> "ServerSpec":
    """A server of our own making, from the session's fork server."""
    from app.device.cpu import DEVICE
    from app.rollout.engine.server import ServerSpec

    return ServerSpec(
        name=name,
        model_path=str(model),
        port=0,
        key=secrets.token_urlsafe(16),
        flags={
            **DEVICE.engine_flags,
            "mem-fraction-static": DEVICE.engine_fraction,
            "dtype": "float32",
            "skip-tokenizer-init": True,
            "random-seed": seed,
            "log-level-http": "warning",
            "max-total-tokens": 16384,
            **{flag.replace("_", "-"): value for flag, value in flags.items()},
        },
        environment={**DEVICE.engine_env, "OMP_NUM_THREADS": os.environ.get("BENCH_THREADS", "1")},
        log=folder / f"{name.replace(' ', '_')}.log",
        fork=shared_fork_server(),
    )


def make_engine(model: Path, folder: Path, *, name: str = "engine 0", seed: int = 0, **flags: Any) -> "RemoteEngine":
    """An engine host of our own making, not started: `asyncio.run(make_engine(...).start(300))`."""
    from tests.rollout.support import host_spec, remote

    server = server_spec(model, folder, name=name, seed=seed, **flags)
    return remote(host_spec(folder, name=name, server=server))
