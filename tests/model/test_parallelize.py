"""FSDP2 on one and two ranks equals a plain module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from app.config.trainer import Checkpointing
from app.model.load import load
from app.model.policy import named_checkpoint_tensors
from tests.model.support import SAVE, batch, relative, weights
from tests.trainer.ranks import run_on
from tests.trainer.support import full

KINDS = tuple(SAVE)
OPTIONS: list[dict[str, Any]] = [{}, {"compute_dtype": torch.bfloat16, "activation_checkpointing": Checkpointing.all}]
Result = dict[str, Any]
Runs = list[list[Result]]  # by options, by model


def all_played(two_ranks: DeviceMesh, paths: list[Path]) -> dict[int, Runs]:
    """Load, forward and backward each model with each set of `load`'s options, on one rank and on two."""
    one_rank = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "ranks"))["ranks"]
    return {
        mesh.size(): [[played(path, mesh, options) for path in paths] for options in OPTIONS]
        for mesh in (one_rank, two_ranks)
    }


def played(path: Path, mesh: Any, options: dict[str, Any]) -> Result:
    """Each rank computes the whole batch: FSDP2 averages gradients over ranks, so they equal those of one rank."""
    policy = load(path, mesh=mesh, device="cpu", **options)
    compute: dict[str, str] = {}  # dtypes of a layer's parameters during its forward pass
    layer: Any = policy.layers[0]
    layer.mlp.register_forward_pre_hook(
        lambda *_: compute.update((name, str(each.dtype)) for name, each in layer.named_parameters())
    )
    packed = batch(101)
    logprobs, entropies = policy(**packed.inputs, temperature=0.7, chunk_tokens=7)
    (logprobs * weights(packed)).sum().backward()

    tensors: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for name, parameter in named_checkpoint_tensors(policy):
        # One rank has nothing to shard, unless it computes in another dtype.
        assert isinstance(parameter, DTensor) == (mesh.size() > 1 or "compute_dtype" in options)
        tensors[name] = full(parameter)
        gradients[name] = full(parameter.grad)

    return {
        "logprobs": logprobs.detach(),
        "entropies": entropies,
        "tensors": tensors,
        "gradients": gradients,
        "compute": compute,
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [SAVE[kind](tmp_path_factory.mktemp(kind)) for kind in KINDS]


@pytest.fixture(scope="module")
def all_runs(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Runs]:
    return run_on(2, all_played, tmp_path_factory.mktemp("runs") / "runs.pt", paths)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def runs(request: pytest.FixtureRequest, all_runs: dict[int, Runs]) -> Runs:
    """Two sets of options: float32, and bf16 with activation checkpointing."""
    return all_runs[request.param]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_gradients_of_shards_equal_those_of_a_plain_module(
    kind: str, paths: list[Path], runs: Runs
) -> None:
    ours = runs[0][KINDS.index(kind)]
    policy = load(paths[KINDS.index(kind)], mesh=None, device="cpu")
    packed = batch(101)
    logprobs, entropies = policy(**packed.inputs, temperature=0.7)
    (logprobs * weights(packed)).sum().backward()
    assert relative(ours["logprobs"], logprobs.detach()) < 1e-5
    assert relative(ours["entropies"], entropies) < 1e-5
    plain = dict(named_checkpoint_tensors(policy))
    assert list(plain) == list(ours["tensors"])
    for name, parameter in plain.items():
        assert torch.equal(ours["tensors"][name], parameter.detach()), name
        assert parameter.grad is not None
        assert relative(ours["gradients"][name], parameter.grad) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_shards_equal_a_plain_module_of_bf16_parameters(kind: str, paths: list[Path], runs: Runs) -> None:
    exact, mixed = (results[KINDS.index(kind)] for results in runs)
    policy = load(paths[KINDS.index(kind)], mesh=None, device="cpu")
    for name, parameter in policy.named_parameters():
        if not name.endswith(("A_log", "dt_bias", "conv1d.weight")):
            parameter.data = parameter.data.bfloat16()
    policy.causal_lm.get_input_embeddings().sparse = False  # which float32 parameters on a CPU have
    packed = batch(101)
    logprobs, _ = policy(**packed.inputs, temperature=0.7, chunk_tokens=7)
    (logprobs * weights(packed)).sum().backward()
    assert mixed["logprobs"].dtype == torch.float32
    assert relative(mixed["logprobs"], logprobs.detach()) < 1e-6
    for name, tensor in named_checkpoint_tensors(policy):
        gradient = mixed["gradients"][name]
        assert tensor.grad is not None
        assert gradient.dtype == mixed["tensors"][name].dtype == torch.float32
        assert torch.equal(mixed["tensors"][name], exact["tensors"][name]), name
        assert relative(gradient, tensor.grad.float()) < 1e-3, name


def test_decays_of_linear_attention_compute_in_float32_beside_bf16(runs: Runs) -> None:
    exact, mixed = (results[KINDS.index("qwen35")] for results in runs)
    assert set(exact["compute"].values()) == {"torch.float32"}
    float32 = {name: dtype for name, dtype in mixed["compute"].items() if dtype == "torch.float32"}
    assert {name.rpartition(".")[2] for name in float32 if "conv1d" not in name} == {"A_log", "dt_bias"}
    assert mixed["compute"]["linear_attn.in_proj_qkv.weight"] == "torch.bfloat16"
    assert mixed["compute"]["mlp.up_proj.weight"] == "torch.bfloat16"
