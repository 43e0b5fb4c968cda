"""Fresh environments of a device's real packages, on a machine without the device."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.real_stack.check import ROOT

REQUIREMENTS = Path("launch") / "requirements"
DEADLINE_S = 5400.0
PINNED = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)$", re.M)
ARGUMENT = re.compile(r"^ARG (\w+)=(\S+)$", re.M)


def cuda_environment(folder: Path) -> tuple[Path, Path]:
    """Clone the last commit and run `launch/setup.sh cuda` there; return the clone and its interpreter."""
    clone = folder.absolute() / "clone"
    _run("git", "clone", "--quiet", str(ROOT), str(clone))
    _run("bash", "launch/setup.sh", "cuda", cwd=clone, PYTHON=newest_python())
    return clone, clone / ".venv" / "bin" / "python"


def npu_environment(folder: Path) -> tuple[Path, Path]:
    """Install of the NPU stack what package indexes have; return this tree and the interpreter.

    torch_npu requires torch's CPU build. Where no index has it (TORCH_INDEX_URL names one), the default build is
    installed in its place, see `npu_import.py`.
    """
    folder.mkdir(exist_ok=True)
    environment = folder.absolute() / "environment"
    _run(newest_python(), "-m", "venv", str(environment))
    python = environment / "bin" / "python"
    pins = pins_of("npu")
    arguments = dict(ARGUMENT.findall((ROOT / "Dockerfile.npu").read_text()))
    torch = [f"torch=={pins['torch']}", f"torchvision=={arguments['TORCHVISION_VERSION']}"]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*torch, f"transformers=={pins['transformers']}"]))

    application = [f"{name}=={pin}" for name, pin in pins.items() if name not in ("torch", "torch_npu")]
    index = os.environ.get("TORCH_INDEX_URL")
    _pip(python, *torch, *(("--index-url", index) if index else ()))
    imported = [each for each in imported_by_sglang() if each.partition("==")[0] not in pins]
    _pip(python, "-c", str(constraints), *application, *imported, "renderers", "pytest")
    _pip(python, "--no-deps", f"torch_npu=={pins['torch_npu']}", *without_dependencies(), "--editable", str(ROOT))
    return ROOT, python


def pins_of(device: str) -> dict[str, str]:
    """Package → version, of the requirements of a device."""
    return dict(PINNED.findall((ROOT / REQUIREMENTS / f"{device}.txt").read_text()))


def imported_by_sglang() -> list[str]:
    """What SGLang imports on every device: the first section of the CPU's requirements, without torch's family."""
    section, _, _ = (ROOT / REQUIREMENTS / "cpu.txt").read_text().partition("# the application")
    return [f"{name}=={pin}" for name, pin in PINNED.findall(section) if name not in ("torch", "transformers")]


def without_dependencies() -> list[str]:
    """SGLang and what it imports of its accelerator stack, without torch's family."""
    text = (ROOT / REQUIREMENTS / "cpu-no-deps.txt").read_text()
    return [f"{name}=={pin}" for name, pin in PINNED.findall(text) if name not in ("torchvision", "triton")]


def newest_python() -> str:
    """PYTHON, else the Python of the images if this machine has it, else this one."""
    candidate = os.environ.get("PYTHON") or shutil.which("python3.12")
    works = candidate and subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0
    return candidate if candidate and works else sys.executable


def _pip(python: Path, *arguments: str) -> None:
    options = ("--disable-pip-version-check", "--quiet", "--quiet")
    _run(str(python), "-m", "pip", *options, "install", "--no-compile", *arguments)


def _run(*command: str, cwd: Path = ROOT, **variables: str) -> None:
    subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, check=True, timeout=DEADLINE_S)
