"""Nothing of a run stays in `/tmp` and `/dev/shm`, which it has for itself, whatever was killed."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recovery.private_folders import PrivateFolders
from tests.runs import Run
from tests.waiting import until

RUNS = {
    "colocate": ["placement=colocate"],
    "fully_async": ["placement=fully_async"],
    "lora": ["model=tiny_lora", "placement=colocate"],
}
COMMON = ["eval.before_train=false", "data.arithmetic.eval_problems=20"]
COMMON += ["checkpoint.every=1", "checkpoint.export=false"]


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateFolders]:
    monkeypatch.delenv("TMPDIR", raising=False)
    made = PrivateFolders.make()
    if not made.permitted:
        pytest.skip("no mount namespaces for this user")
    yield made
    made.remove()


@pytest.fixture
def start(folders: PrivateFolders, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run that has these folders."""
    runs: list[Run] = []

    def start_run(*overrides: str, module: str = "app") -> Run:
        prefix = folders.prefix
        runs.append(Run(folders.base, *overrides, *COMMON, module=module, prefix=prefix, imports_sglang=True))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", list(RUNS.values()), ids=list(RUNS))
def test_after_kill_9_of_an_engine_of_a_rank_and_of_the_driver(
    overrides: list[str], start: Callable[..., Run], folders: PrivateFolders
) -> None:
    run = start("steps=500", *overrides)
    for part in ("sglang::scheduler", "TrainerRank"):
        run.wait_for_step(len(run.metrics()) + 2)
        os.kill(run.pid_of(part), signal.SIGKILL)
    run.wait_for_step(run.metrics()[-1]["step"] + 3)
    files = folders.left()
    assert any("sglang_loads" in name for name in files)
    run.process.kill()
    run.process.wait(10)
    assert run.gone_within(30), run.processes()
    until(lambda: folders.left() == [], 15)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_after_an_interrupt_in_a_weight_sync(
    start: Callable[..., Run], folders: PrivateFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLD", "sync")
    monkeypatch.setenv("HOLD_FOLDER", str(folders.base))
    run = start("steps=500", "weight_sync.bucket_mib=0.1", module="tests.cluster.held_app")
    until(lambda: (folders.base / "held").exists() or run.process.poll() is not None, 200)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(100) == 130, run.text
    assert folders.left() == []
