"""A run over two hosts whose connection is cut, on real Ray and SGLang: it goes on without the lost host, or ends."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.two_hosts import Host, TwoHosts, two_hosts, why_not
from tests.recovery.test_recovery_runs import assert_ledger, state
from tests.runs import Run
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
# CPUs of the two hosts. Ray fills the larger one first: the trainer and engine 0 are there, engine 1 is on the other.
ENGINE_ON_THE_SECOND = (2, 1)
TRAINER_ON_THE_SECOND = (1, 2)
SETTINGS = [
    "placement=fully_async",
    "placement.rollout_devices=2",
    "eval.before_train=false",
    "eval.every=0",
    "rollout.start_timeout_s=100",
    "rollout.stall_timeout_s=20",
    "weight_sync.timeout_s=20",  # a rank stays that long in a broadcast to a lost host, so shorter than the next
    "trainer.timeout_s=40",
]
LOST = r"its node has died: .*missing too many heartbeats \(on 10\.77\.0\.2\)"  # the end of an error's line
# Processes of a run on a worker node.
RUN_PARTS = ("EngineHost", "TrainerRank", "app.rollout.engine.entry", "sglang::")


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    """Skips the tests where two hosts cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def run_on(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run on the first of these hosts; several are attempts of the same run."""
    runs: list[Run] = []

    def start(hosts: TwoHosts, *overrides: str, module: str = "app") -> Run:
        joined = [*SETTINGS, f"cluster.address={hosts.address}", *overrides]
        runs.append(Run(tmp_path, *joined, module=module, prefix=hosts.first.command()))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture
def held_run(
    tmp_path: Path, run_on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Run, Callable[[], None]]]:
    """Starts a run and waits until it is held at a moment; returns it and what lets it go on."""

    def start(moment: str, hosts: TwoHosts, *overrides: str) -> tuple[Run, Callable[[], None]]:
        monkeypatch.setenv("HOLD", moment)
        monkeypatch.setenv("HOLD_FOLDER", str(tmp_path))
        run = run_on(hosts, *overrides, module="tests.cluster.held_app")
        until(lambda: (tmp_path / "held").exists() or run.process.poll() is not None, 200)
        assert run.process.poll() is None, run.text
        return run, (tmp_path / "go").touch

    return start


def parts_on(host: Host) -> list[str]:
    """The processes of a run on this host."""
    return [part for part in RUN_PARTS if host.processes(part)]


def warnings(run: Run) -> str:
    return (run.folder / "logs" / "warnings.jsonl").read_text()


def steps(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics() if "time/step" in line]


def assert_ended(*hosts: Host) -> None:
    """Within a minute no process of the run is left on these hosts, also where nobody could reach it."""
    for host in hosts:
        until(lambda host=host: not parts_on(host), 60)  # type: ignore[misc]


def test_an_engine_of_a_lost_host_is_replaced_when_a_host_joins(tmp_path: Path, run_on: Callable[..., Run]) -> None:
    """Until then the run goes on with the other engine, and what the lost host ran ends by itself."""
    with two_hosts(tmp_path / "hosts") as hosts:
        hosts.start_ray(ENGINE_ON_THE_SECOND)
        run = run_on(hosts, "steps=5000")
        run.wait_for_step(3)
        assert "EngineHost" in parts_on(hosts.second)

        hosts.cut()
        until(lambda: "(restarting, attempt 1)" in run.text, 60)
        assert re.search(rf"engine 1: .*{LOST}", warnings(run)), warnings(run)
        run.wait_for_step(steps(run)[-1] + 5)
        until(lambda: not hosts.second.processes("raylet"), 60)
        assert_ended(hosts.second)

        hosts.mend()
        hosts.join(1)
        until(lambda: run.metrics()[-1].get("recovery/engine_restarts") == 1.0, 120)
        assert "app.rollout.engine.entry" in parts_on(hosts.second)
        run.process.terminate()
        assert run.wait(60) == 130, run.text
        assert steps(run) == list(range(1, steps(run)[-1] + 1))
        assert_ended(*hosts)


def test_a_host_lost_in_a_weight_sync_costs_no_step(
    tmp_path: Path, held_run: Callable[..., tuple[Run, Callable[[], None]]]
) -> None:
    with two_hosts(tmp_path / "hosts") as hosts:
        hosts.start_ray(ENGINE_ON_THE_SECOND)
        run, go = held_run("sync", hosts, "steps=12", "weight_sync.bucket_mib=0.1")
        hosts.cut()
        go()
        assert run.wait(150) == 0, run.text
        cause = rf"weight sync of policy 3 failed at bucket 1 of 4: .*engine 1: its host died during update.*{LOST}"
        assert re.search(cause, warnings(run)), warnings(run)
        assert steps(run) == list(range(1, 13))
        assert_ended(*hosts)


def test_a_run_whose_trainer_host_is_lost_in_a_checkpoint_ends_and_resumes(
    tmp_path: Path, held_run: Callable[..., tuple[Run, Callable[[], None]]], run_on: Callable[..., Run]
) -> None:
    settings = ["steps=12", "checkpoint.every=4", "resume=auto"]
    with two_hosts(tmp_path / "hosts") as hosts:
        hosts.start_ray(TRAINER_ON_THE_SECOND)
        run, go = held_run("checkpoint", hosts, *settings)
        assert "TrainerRank" in parts_on(hosts.second)
        hosts.cut()
        go()
        assert run.wait(200) == 1, run.text
        assert re.search(rf"trainer rank 0 .*{LOST}", run.text), run.text
        assert "trainer rank 0 within trainer.timeout_s=40 s" in run.last_lines
        assert f"resume={run.folder}" in run.last_lines
        assert_ended(*hosts)
        assert state(run.folder)["step"] == 4  # the checkpoint in progress does not count

        hosts.mend()
        until(lambda: not hosts.second.processes("raylet"), 60)
        hosts.join(2)
        run = run_on(hosts, *settings)
        assert run.wait(150) == 0, run.text
        assert_ledger(run.folder, 12)
