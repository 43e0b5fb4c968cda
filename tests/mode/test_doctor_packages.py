"""`mode=doctor` names the packages of an environment's own interpreter, and the versions that are supported."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from app.mode.doctor.environment_packages import environment_packages
from app.mode.doctor.finding import Check, CheckStatus
from tests.compose import composed

VERIFIERS = ("model=qwen3_4b", "environment=verifiers", "environment.id=x")
OPENENV = ("model=qwen3_4b", "environment=openenv", "environment.url=ws://127.0.0.1:9")
PINS = "supported: verifiers 0.4.x"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without packages."""
    folder = tmp_path_factory.mktemp("interpreter") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    return folder / "bin" / "python"


def install(python: Path, **versions: str) -> None:
    """Leave the metadata of these packages alone in an interpreter."""
    folder = python.parents[1]
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for path in packages.glob("*.dist-info/METADATA"):
        path.unlink()
        path.parent.rmdir()
    for name, version in versions.items():
        metadata = packages / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def line(python: Path | None, *overrides: str) -> Check:
    own = [] if python is None else [f"environment.python={python}"]
    (found,) = environment_packages(composed(*overrides, *own))
    return found


@pytest.mark.parametrize(
    ("versions", "status", "shown"),
    [
        ({}, CheckStatus.fail, "verifiers not installed"),
        ({"verifiers": "0.4.7", "renderers": "0.2.3"}, CheckStatus.ok, "verifiers 0.4.7"),
        ({"verifiers": "0.2.1", "renderers": "0.1.8"}, CheckStatus.fail, "verifiers 0.2.1"),
        ({"verifiers": "0.5.0"}, CheckStatus.fail, "verifiers 0.5.0"),
    ],
)
def test_the_versions_of_verifiers_are_compared_with_the_pins(
    python: Path, versions: dict[str, str], status: CheckStatus, shown: str
) -> None:
    install(python, **versions)
    found = line(python, *VERIFIERS)
    assert (found.subject, found.status) == ("verifiers", status)
    assert found.message == f"{shown} in {python} ({PINS})"
    assert ("environment.python=<venv>/bin/python" in found.hint) == (status is CheckStatus.fail)


def test_a_client_of_openenv_needs_aiohttp_in_the_interpreter_of_the_workers(python: Path) -> None:
    install(python)
    missing = line(python, *OPENENV)
    assert missing.status is CheckStatus.fail
    assert missing.message.startswith(f"aiohttp not installed in {python} (supported: ")

    ours = line(None, *OPENENV)
    assert ours.status is CheckStatus.ok
    assert ours.message.endswith(f" in {sys.executable} (supported: aiohttp here, openenv 0.4 or later at the server)")


def test_an_interpreter_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    assert f"environment.python={tmp_path / 'python'} " in line(tmp_path / "python", *VERIFIERS).message
    assert "cannot be asked" in line(Path("/bin/false"), *VERIFIERS).message


def test_other_environments_need_no_packages_of_a_library() -> None:
    assert list(environment_packages(composed("experiment=tiny_tools"))) == []
