"""The doctor on this machine: fine for cpu, clear for devices that are not here, and each check seen failing."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.device import device_of
from app.device.cpu import DEVICE as CPU
from app.mode.doctor import device as doctor_device
from app.mode.doctor import machine as doctor_machine
from app.mode.doctor import software as doctor_software
from app.mode.doctor.check import report
from app.mode.doctor.finding import Finding, Verdict, judged, table
from tests.compose import composed

ROOT = Path(__file__).parents[2]
MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")


def of(findings: list[Finding], subject: str) -> Finding:
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


def run(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", "mode=doctor", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_cpu_is_fine_here() -> None:
    text, code = report(composed())
    assert code == 0, text
    assert "0 fail" in text
    assert "ok    sglang" in text


def test_npu_fails_clearly_here_and_starts_nothing() -> None:
    outputs = set((ROOT / "outputs").glob("*/*"))
    done = run(*MISSION, "model.path=/nowhere-in/particular/at-all", "data.path=null")
    assert done.returncode == 2  # the preflight of the configuration comes first
    assert "model.path=/nowhere-in/particular/at-all is not accepted" in done.stderr
    done = run(*MISSION, f"model.path={ROOT}", "data.path=null")
    assert done.returncode == 1
    for line in ("fail  npu-smi", "fail  torch_npu", "fail  sgl_kernel_npu", "fail  devices", "fail  toolkit"):
        assert line in done.stdout
    assert "torch_npu does not import" in done.stdout
    assert "source the toolkit's set_env.sh before Python" in done.stdout
    assert done.stderr == ""
    assert set((ROOT / "outputs").glob("*/*")) == outputs


def test_every_line_that_is_not_ok_says_what_to_do() -> None:
    config = composed(*MISSION, f"model.path={ROOT}", "data.path=null")
    device = device_of(config.device.kind)
    found = [*doctor_software.software(config, device), *doctor_device.hardware(config, device)]
    assert [finding for finding in found if finding.verdict is not Verdict.ok and not finding.advice] == []


def test_a_version_outside_of_the_range_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software, "installed", {"sglang": "0.5.24", "torch": "2.13.0+cpu"}.get)
    found = list(doctor_software.software(composed(), CPU))
    assert of(found, "sglang").verdict is Verdict.fail
    assert of(found, "torch").verdict is Verdict.ok  # a local version counts as its release
    assert of(found, "ray").told == "not installed"


def test_torch_npu_must_be_the_one_for_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(*MISSION)
    device = device_of(config.device.kind)

    def verdict(torch: str, plugin: str) -> Verdict:
        monkeypatch.setattr(doctor_software, "installed", {"torch": torch, "torch_npu": plugin}.get)
        return of(list(doctor_software.software(config, device)), "torch_npu for torch").verdict

    assert verdict("2.10.0", "2.10.0.post7") is Verdict.ok
    assert verdict("2.11.0", "2.10.0.post7") is Verdict.fail


def test_the_memory_saver_is_asked_for_in_colocate_only() -> None:
    def subjects(*overrides: str) -> set[str]:
        config = composed("device=cuda", "model=qwen3_4b", *overrides)
        return {finding.subject for finding in doctor_software.software(config, device_of(config.device.kind))}

    assert "torch_memory_saver" in subjects()
    assert "torch_memory_saver" not in subjects("placement=fully_async")
    assert "torch_memory_saver" not in subjects("offload.engine=false")


def test_a_taken_port_fails() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = list(doctor_machine.machine(composed(f"rollout.port={port}")))
    assert of(found, "ports").verdict is Verdict.fail
    assert of(found, "ports").told == f"{port} in use"


def disk_of(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=free, total=2**40)
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _: usage)


def test_a_disk_too_small_for_the_checkpoints_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of(2**38, monkeypatch)  # 256 GiB
    none = list(doctor_machine.machine(composed(*MISSION)))
    every = list(doctor_machine.machine(composed(*MISSION, "checkpoint.every=10")))
    assert of(none, "disk").verdict is Verdict.ok
    assert of(every, "disk").verdict is Verdict.fail
    assert f"the run may write {2 + 3 * 12 * 8_953_803_264 / 2**30:.0f}" in of(every, "disk").told


def test_little_shared_memory_warns_and_dockers_default_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(free: int) -> Verdict:
        disk_of(free, monkeypatch)
        return of(list(doctor_machine.machine(composed())), "shared memory").verdict

    assert verdict(64 * 2**20) is Verdict.fail
    assert verdict(2**30) is Verdict.warn
    assert verdict(2**34) is Verdict.ok


def test_a_hub_without_network_fails_with_the_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    found = of(list(doctor_machine.reachable(composed("model=qwen3_4b"))), "model")
    assert found.verdict is Verdict.fail
    assert "model.path=..." in found.advice


def test_a_cluster_and_a_server_that_do_not_answer_fail() -> None:
    config = composed("cluster.address=127.0.0.1:9", "rollout.urls=[http://127.0.0.1:9]")
    found = list(doctor_machine.reachable(config))
    assert of(found, "cluster").verdict is Verdict.fail
    assert of(found, "engine").verdict is Verdict.fail


def test_expandable_segments_and_the_memory_saver_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for placement, verdicts in (("colocate", {"allocator"}), ("fully_async", set())):
        config = composed("device=cuda", "model=qwen3_4b", f"placement={placement}")
        found = doctor_device.environment(config, device_of(config.device.kind))
        assert {finding.subject for finding in found if finding.verdict is Verdict.warn} == verdicts


def test_a_variable_set_against_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    config = composed(*MISSION)
    found = of(list(doctor_device.environment(config, device_of(config.device.kind))), "environment")
    assert found.told == "HCCL_CONNECT_TIMEOUT=60 gives way to 1500"


def test_too_few_visible_devices_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    config = composed(*MISSION)
    found = of(list(doctor_device.environment(config, device_of(config.device.kind))), "visible devices")
    assert found.verdict is Verdict.fail
    assert "leaves 4 device(s), the run takes 8" in found.told


def test_a_plan_that_does_not_fit_warns() -> None:
    config = composed(*MISSION, "device.memory_gib=32")
    found = of(list(doctor_device.hardware(config, device_of(config.device.kind))), "memory")
    assert found.verdict is Verdict.warn
    assert "56.6 of 32.0 GiB" in found.told


def test_the_table_counts_its_lines() -> None:
    lines = [judged("one", True, "fine", "never shown"), judged("other", False, "bad", "mend it")]
    assert table(lines) == "ok    one    fine\nfail  other  bad\n             → mend it\n1 fail, 0 warn, 1 ok"
