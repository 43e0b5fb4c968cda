"""Linear attention over packed sequences equals each sequence alone: with kernels that take boundaries, and without."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from app.config.device import DeviceKind
from app.config.trainer import Checkpointing, Compile
from app.device import device_of
from app.model.kernels import Kernels, kernels_of
from app.model.load import load
from tests.folders import ROOT
from tests.model.linear_double import DOUBLE
from tests.model.support import Batch, batch, reference, relative, save_qwen35, siblings, weights

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


@pytest.mark.parametrize("packed", [batch(101), siblings(101)], ids=["apart", "shared prompts"])
def test_kernels_get_the_packed_tokens_and_give_the_gradients_of_each_sequence_alone(
    packed: Batch, tmp_path: Path
) -> None:
    path = save_qwen35(tmp_path)
    model, logprobs, entropies = reference(path, packed, 0.7)
    (logprobs * weights(packed)).sum().backward()

    kernels = Kernels(linear=DOUBLE)
    policy = load(path, mesh=None, device="cpu", kernels=kernels, activation_checkpointing=Checkpointing.all)
    ours, our_entropies = policy(**packed.inputs, temperature=0.7)
    (ours * weights(packed)).sum().backward()

    assert relative(ours, logprobs) < 1e-5
    assert relative(our_entropies, entropies) < 1e-5
    theirs = dict(model.named_parameters())
    for name, parameter in policy.causal_lm.named_parameters():
        assert relative(parameter.grad, theirs[name].grad) < 5e-5, name  # theirs are of a chunked rule in float32


def test_tensors_on_a_cpu_take_the_reference_where_kernels_are_installed(tmp_path: Path) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text(FLA)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", ON_A_CPU, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "fla" / "__init__.py")


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
    assert found == {"cpu": False, "cuda": installed, "npu": False}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_the_kernels_of_cuda_in_tritons_interpreter_equal_their_definition() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.model.interpreted_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    errors = [float(word) for word in done.stdout.split()]
    assert len(errors) == (1 + 2) + (1 + 5)  # output and gradients
    assert max(errors) < 1e-5


@pytest.mark.cuda
def test_the_kernels_of_cuda_equal_their_definition() -> None:
    from tests.model.interpreted_kernels import errors

    assert max(errors(torch.bfloat16, "cuda")) < 2e-2
