"""`mode=doctor` on this machine: passes for the CPU, fails clearly for missing devices, and each check can fail."""

import platform
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.device import device_of
from app.device.cpu import DEVICE as CPU
from app.mode import doctor
from app.mode.doctor import device as doctor_device
from app.mode.doctor import examine
from app.mode.doctor import software as doctor_software
from app.start.inputs import CheckStatus, Finding
from tests.compose import composed
from tests.warm import run_warm

ROOT = Path(__file__).parents[2]
MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")
OK, WARN, FAIL = CheckStatus.ok, CheckStatus.warn, CheckStatus.fail


def of(found: Iterable[Finding], subject: str) -> Finding:
    (match,) = [one for one in found if one.subject == subject]
    return match


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


def test_versions_outside_the_range_fail_and_plugins_must_match_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software, "installed", {"sglang": "0.5.24", "torch": "2.13.0+cpu"}.get)
    found = list(doctor_software.software(composed(), CPU))
    # A local version counts as its release.
    assert [of(found, package).status for package in ("sglang", "torch", "ray")] == [FAIL, OK, FAIL]

    for torch, status in (("2.10.0", OK), ("2.11.0", FAIL)):
        monkeypatch.setattr(doctor_software, "installed", {"torch": torch, "torch_npu": "2.10.0.post7"}.get)
        assert of(checked(doctor_software.software, *MISSION), "torch_npu for torch").status is status


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


@pytest.mark.parametrize(("name", "value"), [("TMS_HOOK_MODE", "preload"), ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")])
def test_variables_that_release_graph_memory_fail_where_engines_release_memory(
    name: str, value: str, npu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert of(of_npus("placement=colocate"), "memory saver").status is FAIL
    for harmless in (["placement=fully_async"], ["placement=colocate", "offload.engine=false"]):
        assert "memory saver" not in {one.subject for one in of_npus(*harmless)}


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, FAIL), (2**30, WARN), (2**34, OK)])
def test_little_shared_memory_warns_and_dockers_default_fails(
    free: int, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=free, total=2**40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert of(doctor.machine(), "shared memory").status is status
