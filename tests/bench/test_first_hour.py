"""The first hour: what it compares, what it prints, and the whole of it on a CPU with the tiny model."""

import json
import os
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from app.config.device import DeviceKind
from app.device import device_of
from app.mode.plan.memory import plan_memory
from app.model.architecture import architecture_of
from app.utils.units import MIB
from tests.bench import first_hour
from tests.bench.first_hour import FAILED, PASSED, Check
from tests.compose import composed
from tests.folders import ROOT


def test_every_command_composes() -> None:
    for kind, devices, model in (("cpu", 2, []), ("cuda", 8, ["model=qwen3_4b"]), ("npu", 8, ["model=qwen3_4b"])):
        for check in first_hour.checks(kind, devices, model, steps=10):
            composed(*(each for each in check.overrides if not each.startswith("mode=")))


def test_one_card_gets_settings_that_fit_it(tmp_path: Path) -> None:
    options = Namespace(kind="cuda", tiny=False, model=None, random_weights=False, settings=[])
    model = first_hour.model_settings(options, tmp_path, devices=1)
    (colocate,) = (each for each in first_hour.checks("cuda", 1, model, steps=10) if each.name == "colocate")
    config = composed(*colocate.overrides)
    assert config.rollout.tensor_parallel == 1
    device, shapes = device_of(DeviceKind.cuda), architecture_of(config.model)
    assert shapes is not None
    assert plan_memory(config, device, shapes).peak_phase.bytes < 80 * 1024 * MIB


@pytest.mark.parametrize(
    ("model", "values", "differing"),
    [
        ("qwen3_4b", {"mismatch/kl": 0.02, "time/train": 9.0}, {"mismatch/kl on policy", "time/train"}),
        ("qwen3_4b", {"time/train": 6.0}, set()),
        ("qwen3_4b_lora", {"time/train": 36.0}, {"time/train"}),
    ],
)
def test_a_mismatch_a_stale_trajectory_and_a_slow_trainer_differ(
    model: str, values: dict[str, float], differing: set[str], tmp_path: Path
) -> None:
    # A tenth of the tokens of a step that the plan takes 55 s for, 220 s with adapters.
    step = {"step": 2, "time/step": 2.0, "mismatch/kl": 1e-8, "trainer/tokens": 2**18, **values}
    first = {"step": 1, "time/step": 99.0, "staleness/max": 0, "mismatch/kl": 0.5}  # warms up, so it does not count
    steps = (first, {**step, "staleness/max": 0}, {**step, "staleness/max": 1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    _, expectations = first_hour.read_run(composed("device=cuda", f"model={model}"), tmp_path, "")
    assert {each.name for each in expectations if not each.met} == {"staleness/max", *differing}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('{}'); sys.exit('no card')", "no card"),
        ("print('not JSON')", "its result cannot be read: JSONDecodeError: Expecting value: line 1 column 1"),
        (
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
            "no end within 2 s",
        ),
    ],
    ids=["fails", "prints no result", "hangs"],
)
def test_a_check_that_fails_or_hangs_says_why(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_check.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "no end" in reason:
        monkeypatch.setattr(first_hour, "DEADLINE_SECONDS", 2.0)
        monkeypatch.setattr(first_hour, "GRACE_SECONDS", 0.5)
    outcome = first_hour.run_check(
        Check("syncs", "bad_check", [], first_hour.read_syncs), tmp_path / "out", kind="cpu", devices=2
    )
    assert outcome.status == FAILED
    assert outcome.reason.startswith(reason)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_hour_passes_on_a_cpu_with_the_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "first_hour.json"
    command = ["bash", "launch/first_hour.sh", "cpu", "--tiny", "--steps", "3", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {each["name"]: each for each in json.loads(out.read_text())["checks"]}
    assert {name: each["status"] for name, each in outcomes.items()} == dict.fromkeys(
        ("doctor", "parity", "handovers", "syncs", "colocate", "fully_async"), PASSED
    )
    killed = outcomes["syncs"]["values"]["killed"]
    assert killed["in_a_sync"]
    assert killed["answers_as_version"] == killed["synced_version"]
    assert outcomes["syncs"]["values"]["in_flight"]["of_several_versions"] >= 1
    assert done.stdout.splitlines()[-1] == "6 ok"
