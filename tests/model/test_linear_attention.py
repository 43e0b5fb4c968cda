"""Linear attention over packed sequences equals each sequence alone: with kernels that take boundaries, and without."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.config.device import DeviceKind
from app.config.trainer import Checkpointing, Compile
from app.device import device_of
from app.device.base import LinearKernels
from app.model import attention
from app.model.attention import working_kernels
from app.model.kernels import Kernels, kernels_of
from app.model.load import load
from tests.folders import ROOT, python
from tests.model import linear_double
from tests.model.linear_double import DOUBLE
from tests.model.support import Batch, batch, reference, relative, save_qwen35, siblings, weights

REQUIREMENTS = ROOT / "launch" / "requirements" / "npu.txt"
# The operators of fla that a layer calls.
ASCEND = (
    "causal_conv1d_fwd",
    "causal_conv1d_bwd",
    "l2norm_fwd",
    "l2norm_bwd",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt_fwd",
    "solve_tril",
    "recompute_w_u_fwd",
    "chunk_gated_delta_rule_fwd_intra",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_fwd_o",
    "chunk_bwd_dv_local",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_bwd_dqkwg",
    "prepare_wy_repr_bwd",
)
# What transformers takes for flash-linear-attention. Its kernels refuse every tensor, as Triton does those of a CPU.
FLA = """
def chunk_gated_delta_rule(q, k, v, g=None, beta=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    raise RuntimeError("0 active drivers")
fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
ON_A_CPU = """
import sys
from pathlib import Path
from app.model.load import load
from tests.model.support import batch, save_qwen35
policy = load(save_qwen35(Path(sys.argv[1])), mesh=None, device="cpu")
logprobs, _ = policy(**batch(101).inputs, temperature=1.0)
logprobs.sum().backward()
import fla
print(fla.__file__)
"""


@pytest.mark.parametrize(
    "linear",
    [DOUBLE, LinearKernels(convolve=DOUBLE.convolve), LinearKernels(delta_rule=DOUBLE.delta_rule)],
    ids=["both", "the convolution alone", "the delta rule alone"],
)
@pytest.mark.parametrize("packed", [batch(101), siblings(101)], ids=["apart", "shared prompts"])
def test_kernels_get_the_packed_tokens_and_give_the_gradients_of_each_sequence_alone(
    packed: Batch, linear: LinearKernels, tmp_path: Path
) -> None:
    path = save_qwen35(tmp_path)
    model, logprobs, entropies = reference(path, packed, 0.7)
    (logprobs * weights(packed)).sum().backward()

    kernels = Kernels(linear=linear)
    policy = load(path, mesh=None, device="cpu", kernels=kernels, activation_checkpointing=Checkpointing.all)
    ours, our_entropies = policy(**packed.inputs, temperature=0.7)
    (ours * weights(packed)).sum().backward()

    assert relative(ours, logprobs) < 1e-5
    assert relative(our_entropies, entropies) < 1e-5
    theirs = dict(model.named_parameters())
    for name, parameter in policy.causal_lm.named_parameters():
        assert relative(parameter.grad, theirs[name].grad) < 2e-4, name  # theirs are of a chunked rule in float32


def refuse(*_: Tensor) -> Tensor:
    raise RuntimeError("ub overflow, requires 2099200 bits while 1572864 bits available")


def without_a_token(*inputs: Tensor) -> Tensor:
    """The convolution, but for one token of a sequence's last chunk."""
    out = linear_double.convolve(*inputs)
    out[:, 69] = 0
    return out


def not_a_number(*inputs: Tensor) -> Tensor:
    return linear_double.delta_rule(*inputs) * float("nan")


def wrong_gradient(*inputs: Tensor) -> Tensor:
    out = linear_double.delta_rule(*inputs)
    out.register_hook(lambda gradient: 2 * gradient)
    return out


@pytest.mark.parametrize(
    ("kernels", "kept"),
    [
        (DOUBLE, DOUBLE),
        (replace(DOUBLE, convolve=refuse), replace(DOUBLE, convolve=None)),
        (replace(DOUBLE, convolve=without_a_token), replace(DOUBLE, convolve=None)),
        (replace(DOUBLE, delta_rule=not_a_number), replace(DOUBLE, delta_rule=None)),
        (replace(DOUBLE, delta_rule=wrong_gradient), replace(DOUBLE, delta_rule=None)),
        (LinearKernels(refuse, refuse), LinearKernels()),
    ],
    ids=["none", "raises", "a token", "not a number", "a gradient", "both"],
)
def test_a_kernel_that_fails_or_differs_costs_its_operator_alone(
    kernels: LinearKernels, kept: LinearKernels, short: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = load(save_qwen35(tmp_path), mesh=None, device="cpu").causal_lm.get_decoder()
    assert working_kernels(kernels, decoder, "cpu", torch.bfloat16) == kept
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == [kept.convolve, kept.delta_rule].count(None)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LENGTHS", (70, 33, 153))


def test_tensors_on_a_cpu_take_the_reference_where_kernels_are_installed(tmp_path: Path) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text(FLA)
    printed = python("-c", ON_A_CPU, str(tmp_path / "model"), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert printed.strip() == str(tmp_path / "fla" / "__init__.py")


@pytest.mark.parametrize("installed", [False, True])
def test_a_device_has_kernels_where_its_distribution_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        from importlib.metadata import PackageNotFoundError

        if not installed:
            raise PackageNotFoundError(name)
        return "0.6.0"

    monkeypatch.setattr("app.device.base.version", version)
    found = {kind.name: kernels_of(device_of(kind), Compile.auto).linear is not None for kind in DeviceKind}
    assert found == {"cpu": False, "cuda": installed, "npu": installed}


@pytest.fixture(scope="module")
def fla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fla-core. It stays outside of the environment, where transformers would take it for a CPU's."""
    folder = tmp_path_factory.mktemp("fla")
    pinned = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("fla-core=="))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), pinned]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        pytest.skip(f"no package index has {pinned}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_the_kernels_of_a_device_in_tritons_interpreter_equal_their_definition(device: str, fla: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{fla}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.model.interpreted_kernels", device]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {case: len(errors) for case, errors in found["errors"].items()} == {
        "convolution": 1 + 2,  # output and gradients
        "two heads": 1 + 5,
        "grouped heads of full width": 1 + 5,
    }
    assert max(max(errors) for errors in found["errors"].values()) < 2e-6
    convolution = "fla.modules.causal_conv1d.backends.triton_ascend"  # with chunks of its own
    assert found["copying"] == ([] if device == "cuda" else [convolution])
    # On NPUs no operator is left to the kernels of other devices.
    assert found["kernels"] == ({} if device == "cuda" else dict.fromkeys(ASCEND, "triton_ascend"))


@pytest.mark.cuda
def test_the_kernels_of_cuda_equal_their_definition() -> None:
    from tests.model.interpreted_kernels import errors

    assert max(max(each) for each in errors(torch.bfloat16, "cuda").values()) < 2e-2
