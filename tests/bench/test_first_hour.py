"""The first hour: what it compares, what it prints, and the whole of it on a CPU with the tiny model."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from app.config.device import DeviceKind
from app.device import device_of
from app.mode.plan.memory import plan_memory
from app.model.architecture import architecture_of
from app.rollout.engine.server_args import engine_flags
from app.utils.units import MIB
from tests.bench import first_hour
from tests.bench.first_hour import DIFFERS, FAILED, PASSED, SKIPPED, Check, Outcome
from tests.bench.random_model import QWEN3_4B
from tests.compose import composed
from tests.folders import ROOT

ON_CARDS = ("device=cuda", "model=qwen3_4b", "placement.devices=1", "rollout.tensor_parallel=1")


def a_run(folder: Path, *steps: dict[str, float]) -> Path:
    folder.mkdir()
    first = {"step": 1, "time/step": 99.0, "staleness/max": 0, "mismatch/kl": 0.5}  # warms up, so it does not count
    lines = [json.dumps(each) + "\n" for each in (first, *steps)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def a_step(**values: float) -> dict[str, float]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"step": 2, "time/step": 2.0, "staleness/max": 0, "mismatch/kl": 1e-8, **named}


def test_every_command_composes() -> None:
    for kind, devices, model in (("cpu", 2, []), ("cuda", 8, ["model=qwen3_4b"]), ("npu", 8, ["model=qwen3_4b"])):
        for check in first_hour.checks(kind, devices, model, steps=10):
            composed(*(each for each in check.overrides if not each.startswith("mode=")))


def test_without_a_driver_it_is_a_sentence_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if device_of(DeviceKind.cuda).count():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.setattr("sys.argv", ["first_hour", "cuda", "--tiny", "--only", "none", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        first_hour.main()
    assert ended.value.code == 2
    assert "device=cuda" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_card_leaves_out_what_needs_two(tmp_path: Path) -> None:
    left_out = [each for each in first_hour.checks("cuda", 1, [], steps=10) if each.least_devices > 1]
    assert [each.name for each in left_out] == ["syncs", "fully_async", "published"]
    outcome = first_hour.run_check(left_out[0], tmp_path, kind="cuda", devices=1)
    assert (outcome.status, outcome.reason) == (SKIPPED, "needs 2 devices, this machine has 1")


def test_numbers_of_a_run_are_medians_without_its_first_step(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", *(a_step(time__train=seconds) for seconds in (1.0, 3.0, 2.0)))
    values, expectations = first_hour.read_run(composed(), folder, "")
    assert values["time/train"] == 2.0
    assert {each.name: each.met for each in expectations} == {"staleness/max": True, "mismatch/kl on policy": True}


@pytest.mark.parametrize(
    ("model", "values", "differing"),
    [
        ("qwen3_4b", {"mismatch__kl": 0.02, "trainer__mfu": 0.1}, {"mismatch/kl on policy", "trainer/mfu"}),
        ("qwen3_4b", {"trainer__mfu": 0.15}, set()),
        ("qwen3_4b_lora", {"trainer__mfu": 0.15}, {"trainer/mfu"}),
    ],
)
def test_a_mismatch_a_stale_trajectory_and_a_slow_trainer_differ(
    model: str, values: dict[str, float], differing: set[str], tmp_path: Path
) -> None:
    folder = a_run(tmp_path / "run", a_step(**values), {**a_step(**values), "staleness/max": 1})
    _, expectations = first_hour.read_run(composed("device=cuda", f"model={model}"), folder, "")
    assert {each.name for each in expectations if not each.met} == {"staleness/max", *differing}


@pytest.mark.parametrize(
    ("kind", "devices"), [("cuda", {"published": 8}), ("npu", {"published_sync": 4, "published_async": 4})]
)
def test_published_workloads_run_on_the_published_number_of_devices(kind: str, devices: dict[str, int]) -> None:
    found = [each for each in first_hour.checks(kind, 8, [], steps=10, path="org/model") if each.published]
    assert {each.name: each.least_devices for each in found} == devices
    for check in found:
        config = composed(*check.overrides)
        assert (config.device.kind.name, config.placement.kind.name, config.steps) == (kind, "fully_async", 10)
        assert config.placement.trainer_devices + config.placement.rollout_devices == check.least_devices
        assert config.model.path == "org/model"
        assert (config.algorithm.prompts_per_step, config.rollout.max_completion_tokens) == (32, 2048)
        assert check.published is not None
        assert set(check.published.seconds) <= set(first_hour.SHOWN)
        assert (config.placement.max_staleness == 0) == (check.name != "published_async")


def test_memory_is_compared_with_the_plan(tmp_path: Path, qwen3_4b: str) -> None:
    config = composed(*ON_CARDS, f"model.path={qwen3_4b}")
    planned = first_hour.trainer_peaks(config)["train"]
    for share, met in ((1.05, True), (1.2, False)):
        step = a_step(memory__trainer_device_peak_train_mib=share * planned)
        expectations = first_hour.memory_expectations(config, [step])
        assert [each.met for each in expectations] == [met]

    model = architecture_of(config.model)
    assert model is not None
    device = device_of(DeviceKind.cuda)
    peak = plan_memory(config, device, model, engine_flags(config, device)).peak_phase.bytes / MIB
    assert first_hour.card_expectation(config, 1.05 * peak).met
    assert not first_hour.card_expectation(config, 1.2 * peak).met


@pytest.fixture
def qwen3_4b(tmp_path: Path) -> str:
    """A folder with Qwen3-4B's config.json."""
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **QWEN3_4B}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "model")


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


def test_the_table_marks_what_differs_and_has_our_seconds_beside_the_published_ones() -> None:
    missed = first_hour.Expectation("trainer/mfu", 0.1, "at least 0.2", met=False)
    published = {"time/step": 68.0, "time/train": 16.8}
    text = first_hour.table(
        [
            Outcome("doctor", PASSED, 3.0),
            Outcome("published", DIFFERS, 60.0, {"time/step": 34.0}, [missed], published, "https://where"),
            Outcome("fully_async", SKIPPED, reason="needs 2 devices, this machine has 1"),
        ]
    )
    assert "  ! trainer/mfu: 0.1 (expected: at least 0.2)" in text.splitlines()
    assert re.search(r"time/step: 34 .*68 s, 0\.50", text)
    assert "https://where" in text
    assert text.splitlines()[-1] == "1 ok, 1 differs, 1 not run"


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
