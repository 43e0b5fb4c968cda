"""oneDNN's matrix products are those of float64, in every layout that training uses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.device import cpu_matmul
from app.device.cpu_matmul import helps, matmul

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def operands(rows: int, inner: int, columns: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a forward pass (x·Wᵀ), of the gradient of x (g·W) and of W (gᵀ·x)."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
    transposed = {"x·Wᵀ": (False, True), "g·W": (False, False), "gᵀ·x": (True, False)}[layout]
    return tuple(each.t().contiguous().t() if flip else each for each, flip in zip((a, b), transposed, strict=True))


@pytest.mark.parametrize("layout", ["x·Wᵀ", "g·W", "gᵀ·x"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 4096, 300), (300, 300, 65), (2048, 256, 512)])
def test_products_are_those_of_float64(shape: tuple[int, int, int], layout: str) -> None:
    a, b = operands(*shape, layout)
    exact = a.double() @ b.double()
    error = (matmul(a, b) - exact).abs().max() / exact.std()
    assert error < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_types_are_left_to_torch(dtype: torch.dtype) -> None:
    a, b = torch.arange(6).view(2, 3).to(dtype), torch.arange(12).view(3, 4).to(dtype)
    assert matmul(a, b).equal(a @ b)


def test_factors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(\(1024, 2\) and \(1024, 1024\)\)"):
        matmul(torch.ones(1024, 2), torch.ones(1024, 1024))


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_it_serves_amd_only(vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description = tmp_path / "cpuinfo"
    description.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(cpu_matmul, "CPU_DESCRIPTION", description)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert helps() is (vendor == "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not helps()


def test_a_process_that_uses_it_computes_forward_and_backward_passes_with_it() -> None:
    program = """
import torch
from app.device import cpu_matmul
cpu_matmul.helps = lambda: True
calls = []
inner = cpu_matmul.matmul
cpu_matmul.matmul = lambda a, b: (calls.append(a.dtype), inner(a, b))[1]
assert cpu_matmul.use_onednn_matmul() and cpu_matmul.use_onednn_matmul()
x, w = torch.randn(64, 256, requires_grad=True), torch.randn(512, 256, requires_grad=True)
torch.nn.functional.linear(x, w).square().sum().backward()
exact = [each.detach().double().requires_grad_() for each in (x, w)]
torch.nn.functional.linear(*exact).square().sum().backward()
for got, wanted in zip((x, w), exact):
    assert (got.grad - wanted.grad).abs().max() < 1e-5 * wanted.grad.abs().max()
with torch.inference_mode():
    torch.nn.functional.linear(x, w)
assert calls.count(torch.float32) == 4, calls  # forward, two gradients, inference
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
