"""oneDNN's matrix products are those of float64, in every layout that training uses."""

import subprocess
import sys

import pytest
import torch

from app.cpu_engine.matmul import multiply

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def operands(rows: int, inner: int, columns: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a forward pass (x·Wᵀ), of the gradient of x (g·W) and of W (gᵀ·x)."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
    transposed = {"x·Wᵀ": (False, True), "g·W": (False, False), "gᵀ·x": (True, False)}[layout]
    left, right = (each.t().contiguous().t() if flip else each for each, flip in zip((a, b), transposed, strict=True))
    return left, right


@pytest.mark.parametrize("layout", ["x·Wᵀ", "g·W", "gᵀ·x"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 4096, 300), (300, 300, 65), (2048, 256, 512)])
def test_products_are_those_of_float64(shape: tuple[int, int, int], layout: str) -> None:
    a, b = operands(*shape, layout)
    exact = a.double() @ b.double()
    error = (multiply(a, b) - exact).abs().max() / exact.std()
    assert error < 1e-5


PROGRAM = """
import torch
from app.cpu_engine import matmul

matmul.onednn_is_faster = lambda: True
multiplied = []
multiply = matmul.multiply
matmul.multiply = lambda a, b: (multiplied.append(tuple(a.shape)), multiply(a, b))[1]
assert matmul.use_onednn_matmul() and matmul.use_onednn_matmul()

def agree(got, exact):
    assert (got - exact).abs().max() < 1e-5 * exact.abs().max()

x, w = torch.randn(64, 256, requires_grad=True), torch.randn(512, 256, requires_grad=True)
torch.nn.functional.linear(x, w).square().sum().backward()
exact = [each.detach().double().requires_grad_() for each in (x, w)]
torch.nn.functional.linear(*exact).square().sum().backward()
agree(x.grad, exact[0].grad)
agree(w.grad, exact[1].grad)
assert sorted(multiplied) == [(64, 256), (64, 512), (512, 64)], multiplied  # forward, gradients of x and w

with torch.inference_mode():
    a, b, total = torch.randn(300, 70), torch.randn(70, 900), torch.randn(300, 900)
    product = a.double() @ b.double()
    agree(torch.mm(a, b, out=torch.empty(300, 900)), product)
    agree(total.clone().addmm_(a, b), total + product)
    agree(total.clone().addmm_(a, b, beta=0.5, alpha=-2), 0.5 * total - 2 * product)
    agree(torch.full_like(total, torch.nan).addmm_(a, b, beta=0), product)
    assert multiplied[3:] == 4 * [(300, 70)], multiplied

    resized = torch.mm(a, b, out=torch.empty(0))  # torch's kernel resizes it
    agree(resized, product)
    assert len(multiplied) == 7, multiplied

    bias = torch.randn(900)
    agree(torch.nn.functional.linear(a, b.t(), bias), product + bias)
    assert multiplied.pop() == (300, 70) and len(multiplied) == 7, multiplied
    agree(torch.addmm(total, a, b), total + product)  # left to torch
    agree(torch.addmm(bias, a, b, beta=0.5, alpha=-2), 0.5 * bias - 2 * product)
    assert len(multiplied) == 7, multiplied

    for dtype in (torch.float64, torch.bfloat16, torch.int64):  # these and small ones are left to torch
        a, b = torch.ones(1024, 3, dtype=dtype), torch.ones(3, 1024, dtype=dtype)
        assert (torch.mm(a, b) == 3).all() and (torch.ones(1024, 1024, dtype=dtype).addmm_(a, b) == 4).all()
    assert (torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4)) == 3).all()
    assert len(multiplied) == 7, multiplied
"""


def test_a_process_that_uses_it_computes_large_products_with_it_in_forward_and_backward_passes() -> None:
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch cannot override an operator and keep its kernel")
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
