"""`mode=doctor` on this machine: passes for the CPU, fails clearly for missing devices, and each check can fail."""

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.device import Device, device_of
from app.device.cpu import DEVICE as CPU
from app.mode import doctor
from app.mode.doctor import device as doctor_device
from app.mode.doctor import examine
from app.mode.doctor import software as doctor_software
from app.model.hf_directory import load_tokenizer
from app.start.inputs import CheckStage, CheckStatus, Finding, RunInputs
from app.start.preflight import findings
from tests.compose import composed
from tests.warm import run_warm

ROOT = Path(__file__).parents[2]
MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")
OK, WARN, FAIL = CheckStatus.ok, CheckStatus.warn, CheckStatus.fail


def of(found: Iterable[Finding], subject: str) -> Finding:
    (match,) = [one for one in found if one.subject == subject]
    return match


def inputs(*overrides: str) -> list[Finding]:
    return list(findings(RunInputs(composed(*overrides), CheckStage.doctor, Path("outputs"))))


def checked(check: Any, *overrides: str) -> list[Finding]:
    config = composed(*overrides)
    return list(check(config, device_of(config.device.kind)))


def test_the_cpu_passes_on_this_machine() -> None:
    found = examine(composed())
    assert [one for one in found if one.status is FAIL] == []
    assert of(found, "sglang").status is OK
    assert not [one for one in found if one.subject == "episodes"]


def test_the_npu_fails_clearly_on_this_machine_and_nothing_starts(tmp_path: Path) -> None:
    done = run_warm("mode=doctor", *MISSION, f"model.path={ROOT}", "data=arithmetic", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    for subject in ("npu-smi", "torch_npu", "sgl_kernel_npu", "devices", "toolkit"):
        assert f"fail  {subject}" in done.stdout
    assert f"free for {tmp_path}/outputs" in done.stdout
    assert not list(tmp_path.iterdir())

    for check in (doctor_software.software, doctor_device.hardware):
        assert [one for one in checked(check, *MISSION) if one.status is not OK and not one.hint] == []


def test_with_reward_code_the_sandbox_and_the_form_of_the_tests_are_shown(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"text": "Add one.", "code": "def inc(n): return n + 1", "test_list": ["assert inc(1) == 2"]}
    rows.write_text(f"{json.dumps(row)}\n" * 40)
    found = inputs("data=mbpp", "reward=code", f"data.path={rows}")
    assert of(found, "tests").message == "asserts in 40 rows"
    assert of(found, "sandbox").status in (CheckStatus.ok, CheckStatus.warn)

    rows.write_text(f"{json.dumps({**row, 'test_list': ['assert inc(']})}\n" * 40)
    assert of(inputs("data=mbpp", "reward=code", f"data.path={rows}"), "code").status is FAIL


def test_the_first_prompt_of_local_files_is_rendered(tmp_path: Path, tiny_model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n' * 20)
    line = [f"model.path={tiny_model}", f"data.path={rows}", "data.template=chat", "data.system=Add."]
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    rendered = load_tokenizer(tiny_model).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert json.loads(of(inputs(*line), "first prompt").message) == rendered
    short = [each for each in inputs(*line, "rollout.max_prompt_tokens=4") if each.subject == "prompts"]
    assert [each.status for each in short] == [FAIL]


def test_versions_outside_the_range_fail_and_plugins_must_match_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software, "installed", {"sglang": "0.5.24", "torch": "2.13.0+cpu"}.get)
    found = list(doctor_software.software(composed(), CPU))
    # A local version counts as its release.
    assert [of(found, package).status for package in ("sglang", "torch", "ray")] == [FAIL, OK, FAIL]

    for torch, status in (("2.10.0", OK), ("2.11.0", FAIL)):
        monkeypatch.setattr(doctor_software, "installed", {"torch": torch, "torch_npu": "2.10.0.post7"}.get)
        assert of(checked(doctor_software.software, *MISSION), "torch_npu for torch").status is status


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=driver_version) echo 570.124.06; echo 570.124.06 ;;
  --query-gpu=memory.total) echo 81559 ;;
  *) echo NVIDIA-SMI ;;
esac
"""


@pytest.mark.parametrize(("cuda", "statuses"), [("13.0", [WARN]), ("12.8", [OK]), (None, []), ("14.1", [])])
def test_the_driver_is_compared_with_torchs_cuda(
    cuda: str | None, statuses: list[CheckStatus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor_device, "torch_cuda", lambda: cuda)
    found = checked(doctor_device.hardware, "device=cuda", "model=qwen3_4b")
    assert of(found, "nvidia-smi").status is OK
    assert [one.status for one in found if one.subject == "driver"] == statuses


@pytest.mark.parametrize(("found", "statuses"), [(True, [OK, OK]), (False, [WARN, FAIL])])
def test_the_compiler_and_the_memory_savers_library_are_looked_for(
    found: bool, statuses: list[CheckStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_device.shutil, "which", lambda name, path=None: f"/{name}" if found else None)
    monkeypatch.setattr(doctor_device, "library_folders", lambda: ["/pip/lib"] if found else [])
    monkeypatch.setattr(doctor_device, "find_library", lambda _: None)
    monkeypatch.setattr(doctor_device, "torch_cuda", lambda: None)
    colocated = checked(doctor_device.nvidia, "device=cuda", "model=qwen3_4b")
    assert [(one.subject, one.status) for one in colocated] == [*zip(("nvcc", "libcudart"), statuses, strict=True)]
    asynchronous = checked(doctor_device.nvidia, "device=cuda", "model=qwen3_4b", "placement=fully_async")
    assert [one.subject for one in asynchronous] == ["nvcc"]


@pytest.fixture
def npu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver, CANN and 16 device files, in a folder."""
    for name in ("driver", "dev", "dcmi", f"cann/{platform.machine()}-linux"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("install.info", *(f"dev/davinci{card}" for card in range(16)), "dev/davinci_manager"):
        (tmp_path / name).touch()
    versions(tmp_path, "25.5.0", "9.1.0")
    names = {"DRIVER": "driver", "INSTALLED": "install.info", "NPU_SMI_LIBRARY": "dcmi"}
    for constant, name in names.items():
        monkeypatch.setattr(doctor_device, constant, str(tmp_path / name))
    monkeypatch.setattr(doctor_device, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    for variable in ("NPUS", "TMS_HOOK_MODE", "SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def versions(machine: Path, driver: str, cann: str) -> None:
    (machine / "driver" / "version.info").write_text(f"Version={driver}\nascendhal_version=7.35.19\n")
    toolkit = machine / "cann" / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    toolkit.write_text(f"package_name=Ascend-cann-toolkit\nversion={cann}\n")


def of_npus(*overrides: str) -> list[Finding]:
    return checked(doctor_device.ascend, *MISSION, *overrides)


@pytest.mark.parametrize(
    ("driver", "cann", "fails"),
    [
        ("25.5.0", "9.1.0", set()),
        ("25.3.rc1.2", "8.3.RC1", set()),
        ("25.5.t3.b001", "9.0.0-beta.2", set()),
        ("25.2.3", "9.1.0", {"driver version"}),
        ("24.1.rc1", "8.2.RC1", {"driver version", "CANN version"}),
    ],
)
def test_driver_and_cann_have_to_share_memory_between_processes_in_colocate(
    driver: str, cann: str, fails: set[str], npu_machine: Path
) -> None:
    versions(npu_machine, driver, cann)
    for placement, status in {"colocate": FAIL, "fully_async": WARN}.items():
        found = of_npus(f"placement={placement}")
        assert {one.subject for one in found if one.status is not OK} == fails
        assert {one.status for one in found} <= {OK, status}
        assert {"driver version", "CANN version", "device files"} <= {one.subject for one in found}


def test_the_number_of_device_files_is_compared_with_npus(npu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, status in {"8": WARN, "16": OK}.items():
        monkeypatch.setenv("NPUS", count)
        assert of(of_npus(), "device files").status is status


@pytest.mark.parametrize(("statement", "status"), [("ascend = 1", OK), ("nvidia = 1", FAIL)])
def test_triton_of_npus_has_to_import(
    statement: str, status: CheckStatus, npu_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mainline Triton in its place has no such name."""
    (tmp_path / "path" / "triton" / "_C").mkdir(parents=True)
    (tmp_path / "path" / "triton" / "__init__.py").touch()
    (tmp_path / "path" / "triton" / "_C" / "libtriton.py").write_text(f"{statement}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setattr(doctor_device, "installed", {"triton_ascend": "3.2.2"}.get)
    assert of(of_npus(), "triton").status is status


@pytest.mark.parametrize(("name", "value"), [("TMS_HOOK_MODE", "preload"), ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")])
def test_variables_that_release_graph_memory_fail_where_engines_release_memory(
    name: str, value: str, npu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert of(of_npus("placement=colocate"), "memory saver").status is FAIL
    for harmless in (["placement=fully_async"], ["placement=colocate", "offload.engine=false"]):
        assert "memory saver" not in {one.subject for one in of_npus(*harmless)}


def test_the_memory_saver_is_required_in_colocate_only() -> None:
    def subjects(*overrides: str) -> set[str]:
        return {one.subject for one in checked(doctor_software.software, "device=cuda", "model=qwen3_4b", *overrides)}

    assert "torch_memory_saver" in subjects()
    assert "torch_memory_saver" not in subjects("placement=fully_async") | subjects("offload.engine=false")


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, FAIL), (2**30, WARN), (2**34, OK)])
def test_little_shared_memory_warns_and_dockers_default_fails(
    free: int, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=free, total=2**40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert of(doctor.machine(), "shared memory").status is status


@pytest.mark.parametrize(
    ("given", "subject", "status"),
    [
        ({}, "locale", OK),
        ({"LC_ALL": "zh_CN.GB18030"}, "locale", WARN),
        ({"HOME": "/nowhere"}, "home", WARN),
        ({"https_proxy": "http://proxy:3128"}, "proxies", OK),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "launcher", WARN),
        ({"SLURM_PROCID": "0", "WORLD_SIZE": "1"}, "launcher", OK),
    ],
)
def test_inherited_surroundings_have_a_line(
    given: dict[str, str], subject: str, status: CheckStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(tmp_path), **given})
    monkeypatch.setattr(doctor.sys, "getfilesystemencoding", lambda: "gb18030" if "LC_ALL" in given else "utf-8")
    assert of(doctor.machine(), subject).status is status


def test_variables_that_a_run_overrides_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for placement, subjects in (("colocate", {"allocator"}), ("fully_async", set())):
        found = checked(doctor_device.variables, "device=cuda", "model=qwen3_4b", f"placement={placement}")
        assert {one.subject for one in found if one.status is WARN} == subjects

    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    conflict = of(checked(doctor_device.variables, *MISSION), "variables")
    assert (conflict.status, "HCCL_CONNECT_TIMEOUT=60" in conflict.message) == (WARN, True)


def test_too_few_visible_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "require", lambda _: None)
    monkeypatch.setattr(Device, "count", lambda _: 4)
    found = of(inputs(*MISSION), "devices")
    assert (found.status, found.message.split()[0]) == (FAIL, "placement.rollout_devices=4")
    assert of(inputs(*MISSION, "cluster.address=auto"), "devices").status is OK


def test_a_plan_that_does_not_fit_warns() -> None:
    result = of(checked(doctor_device.hardware, *MISSION, "device.memory_gib=32"), "memory")
    assert (result.status, "50.2 of 32.0 GiB" in result.message) == (WARN, True)
