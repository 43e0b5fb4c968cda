"""Everything that Dockerfile.npu installs resolves together, as far as a package index has it.

Left out, since no index has them: torch's CPU build, in whose place is an empty wheel with its requirements (torch_npu
asks for it by name on x86-64), and the wheels of releases: triton-ascend, whose numpy is ours, sgl_kernel_npu
and torch_memory_saver for NPUs.
"""

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch.shell import ROOT, fetch_npu_packages, fetched_requirements
from tests.launch.test_images import arguments, pins

LEFT_OUT = "torch's CPU build, triton-ascend, sgl_kernel_npu, torch_memory_saver"
TORCH_REQUIRES = ("filelock", "fsspec>=0.8.5", "jinja2", "networkx>=2.5.1", "setuptools", "sympy>=1.13.3")
SGLANG = tomllib.loads((ROOT / "tests" / "launch" / "sglang_npu.toml").read_text())


def torch_cpu(folder: Path, version: str) -> None:
    """An empty wheel of torch's CPU build."""
    folder.mkdir()
    about = f"torch-{version}+cpu.dist-info"
    requires = "".join(f"Requires-Dist: {each}\n" for each in (*TORCH_REQUIRES, "typing-extensions>=4.10.0"))
    with zipfile.ZipFile(folder / f"torch-{version}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}+cpu\n{requires}")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def resolve(machine: str, requirements: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Resolve these with launch/requirements/npu.txt for the image's Python, under the image's constraints."""
    image = arguments("Dockerfile.npu")
    torch_cpu(folder / "wheels", image["TORCH_VERSION"])
    pinned = ("torch", "torch_npu", "torchvision", "transformers")
    constraints = "".join(f"{name}=={image[f'{name.upper()}_VERSION']}\n" for name in pinned)
    (folder / "constraints.txt").write_text(constraints)
    (folder / "sglang.txt").write_text("\n".join(requirements) + "\n")
    options = [
        *("--python-version", image["PYTHON_VERSION"], "--python-platform", f"{machine}-manylinux_2_35"),
        *("--constraints", str(folder / "constraints.txt"), "--find-links", str(folder / "wheels")),
        *("--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"),  # of Hydra: source alone, in Python
        *("--no-header", "--no-annotate", "--quiet"),
    ]
    files = [str(folder / "sglang.txt"), "launch/requirements/npu.txt"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *options, *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_all_packages_of_the_image_resolve_together(
    machine: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if find_spec("uv") is None:
        pytest.skip("uv is not installed (launch/requirements/cpu.txt brings it)")
    fetch_npu_packages(tmp_path, *SGLANG["requirements"])
    done = resolve(machine, fetched_requirements(tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]

    lines = [Requirement(line) for line in done.stdout.splitlines() if line]
    versions = {str(canonicalize_name(each.name)): next(iter(each.specifier)).version for each in lines}
    for name, version in pins("npu.txt").items():
        assert versions[canonicalize_name(name)].partition("+")[0] == version, name
    assert versions["torch"].endswith("+cpu")
    # Why triton-ascend is installed again at the end.
    assert ("triton" in versions) == (machine == "x86_64")
    record_property("packages", len(versions))
    record_property("left_out", LEFT_OUT)


@pytest.mark.slow
def test_the_pin_that_is_removed_still_has_no_wheel(tmp_path: Path) -> None:
    """Else its removal in launch/npu_packages.sh can go."""
    if find_spec("uv") is None:
        pytest.skip("uv is not installed (launch/requirements/cpu.txt brings it)")
    done = resolve("x86_64", SGLANG["requirements"], tmp_path)
    assert done.returncode != 0
    assert "memfabric-zbal==1.1.2 has no wheels with a matching Python ABI tag" in " ".join(done.stderr.split())
