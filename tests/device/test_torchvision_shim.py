"""torchvision's two operators are declared only where torch cannot load torchvision's own library."""

from pathlib import Path

import pytest
import torch

from tests.folders import ROOT, python

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


@pytest.mark.parametrize(("loader", "own"), [(LOADS, True), (FAILS, False)])
def test_the_operators_are_declared_where_torchvisions_library_does_not_load(
    loader: str, own: bool, tmp_path: Path
) -> None:
    (tmp_path / "torchvision").mkdir()
    for file in ("__init__.py", "_C.so"):
        (tmp_path / "torchvision" / file).touch()
    assert python("-c", SCRIPT.format(loader=loader), str(tmp_path)).split() == [str(own), "True", "True"]


def test_setup_declares_both_in_an_environment_whose_torchvision_has_none(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "extension.py").write_text("import torch\n")
    (package / "__init__.py").write_text(
        "import torch\nfrom torchvision import extension\n"
        "print(torch.ops.torchvision.nms, torch.ops.torchvision.qnms)\n"
    )
    declare, there = str(ROOT / "launch" / "torchvision_operators.py"), str(tmp_path)
    python(declare, cwd=tmp_path, PYTHONPATH=there)
    once = (package / "extension.py").read_text()
    python(declare, cwd=tmp_path, PYTHONPATH=there)
    assert (package / "extension.py").read_text() == once
    names = "torchvision.nms torchvision.qnms"
    assert python("-c", "import torchvision", cwd=tmp_path, PYTHONPATH=there).strip() == names
