"""torchvision's two operators are declared only where torch cannot load torchvision's own library."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.device.packages import ROOT

# Registers `nms` as torchvision's own library does, when it is loaded.
LIBRARY = """
#include <torch/library.h>
TORCH_LIBRARY(torchvision, m) {
    m.def("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor");
    m.def("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor");
}
"""
# Import torchvision's library again afterwards, as torchvision does: a second definition would abort the process.
SCRIPT = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
{loader}
from app.device.torchvision_shim import define_operators
print(define_operators() is None, hasattr(torch.ops.torchvision, "nms"), hasattr(torch.ops.torchvision, "qnms"))
assert "torchvision" not in sys.modules
torch.ops.load_library(sys.argv[1] + "/torchvision/_C.so")
"""
LOADS = """
libraries = []
def load(path):
    if not libraries:
        libraries.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            libraries[0].define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.ops.load_library = load
"""
FAILS = """
def load(path):
    if "app.device.torchvision_shim" in sys.modules and not hasattr(torch.ops.torchvision, "nms"):
        raise OSError("libcudart.so.12: cannot open shared object file")
torch.ops.load_library = load
"""

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")


def run(folder: Path, loader: str) -> list[str]:
    (folder / "torchvision").mkdir(exist_ok=True)
    (folder / "torchvision" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(loader=loader), str(folder)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_declared_where_torchvision_brings_its_operators(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "_C.so").touch()
    assert run(tmp_path, LOADS) == ["True", "True", "True"]


def test_both_are_declared_where_its_library_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "_C.so").touch()
    assert run(tmp_path, FAILS) == ["False", "True", "True"]


def test_setup_declares_both_in_an_environment_whose_torchvision_has_none(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "extension.py").write_text("import torch\n")
    (package / "__init__.py").write_text(
        "import torch\nfrom torchvision import extension\n"
        "print(torch.ops.torchvision.nms, torch.ops.torchvision.qnms)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def python(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    declare = str(ROOT / "launch" / "torchvision_operators.py")
    python(declare)
    once = (package / "extension.py").read_text()
    python(declare)
    assert (package / "extension.py").read_text() == once
    assert python("-c", "import torchvision") == "torchvision.nms torchvision.qnms"


@pytest.mark.slow
def test_a_library_that_registers_the_operators_does_not_abort_the_process(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    source = tmp_path / "library.cpp"
    source.write_text(LIBRARY)
    include = Path(torch.__file__).parent / "include"
    libraries = include.parent / "lib"
    folders = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    built = subprocess.run(
        [
            *("g++", "-std=c++20", "-shared", "-fPIC", abi),
            *(f"-I{each}" for each in folders),
            *(str(source), f"-L{libraries}", "-lc10", "-ltorch_cpu"),
            *("-o", str(tmp_path / "torchvision" / "_C.so")),
        ],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert run(tmp_path, "") == ["True", "True", "True"]
