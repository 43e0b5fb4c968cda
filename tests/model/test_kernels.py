"""A compiled policy computes what the eager one does, with few graphs; a device's kernels follow `trainer.compile`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from app.config.device import DeviceKind
from app.config.trainer import Checkpointing, Compile
from app.device import device_of
from app.model.kernels import Kernels, chunk_shape, kernels_of
from app.model.load import load
from app.model.policy import PolicyModel
from tests.model.support import batch, relative, save_qwen3, save_qwen35, weights
from tests.trainer.ranks import run_on
from tests.trainer.support import full

EAGER, COMPILED = Kernels(), Kernels(compiled=True)


@pytest.mark.parametrize(
    ("kind", "setting", "compiled", "fused"),
    [
        (DeviceKind.cpu, Compile.auto, False, False),
        (DeviceKind.cpu, Compile.on, True, False),
        (DeviceKind.cuda, Compile.auto, True, False),
        (DeviceKind.cuda, Compile.off, False, False),
        (DeviceKind.npu, Compile.auto, False, True),
        (DeviceKind.npu, Compile.on, True, False),
    ],
)
def test_auto_compiles_on_cuda_only_and_npus_fuse_where_nothing_is_compiled(
    kind: DeviceKind, setting: Compile, compiled: bool, fused: bool
) -> None:
    kernels = kernels_of(device_of(kind), setting)
    assert (kernels.compiled, kernels.elementwise is not None) == (compiled, fused)


def test_chunks_of_the_head_are_larger_where_a_device_has_room() -> None:
    """And compiled ones, of which the products alone are kept, in 16 bits."""
    kernels = [kernels_of(device_of(kind), Compile.auto) for kind in DeviceKind]
    large, small = (torch.empty(size, 8, dtype=torch.bfloat16, device="meta") for size in (2**17, 2**6))
    assert [chunk_shape(each, large) for each in kernels] == [(2**11, 2**10), (2**12, 2**17), (2**9, 2**17)]
    assert [chunk_shape(each, small) for each in kernels] == [(2**15, 2**6), (2**23, 2**6), (2**20, 2**6)]
    eager = kernels_of(device_of(DeviceKind.cuda), Compile.off)
    assert chunk_shape(eager, large) == (2**10, 2**17)
    assert chunk_shape(kernels[1], large.float()) == (2**11, 2**17)


def test_norms_rotary_embeddings_and_gates_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of queries and keys in the graph of their rotary embeddings."""
    made: list[Any] = []

    def compiling(function: Callable[..., Any]) -> Callable[..., Any]:
        made.append(function)
        return partial(function)

    monkeypatch.setattr("app.model.kernels._compiled", compiling)
    policy = load(save_qwen35(tmp_path), mesh=None, device="cpu", kernels=COMPILED)
    compiled = {name.split(".")[-1] for name, each in policy.named_modules() if isinstance(each.forward, partial)}
    assert compiled - {"lm_head"} == {"input_layernorm", "post_attention_layernorm", "norm"}

    def within(name: str) -> list[Any]:
        return [each.__self__ for each in made if each.__name__ == name]

    assert within("_gate") == [each for each in policy.modules() if type(each).__name__ == "Qwen3_5MLP"]
    assert within("_normed_and_rotated") == [
        each for each in policy.modules() if type(each).__name__.endswith("Attention")
    ]


def outcome(
    path: Path, kernels: Kernels, *, lengths: tuple[int, ...], mesh: DeviceMesh | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Log-probabilities, entropies and gradients of a batch, with a gradient of the entropy too."""
    policy = load(path, mesh=mesh, device="cpu", kernels=kernels, **options)
    packed = batch(101, lengths)
    logprobs, entropies = policy(**packed.inputs, temperature=0.7, entropy_gradient=True, chunk_tokens=7)
    ((logprobs + 0.1 * entropies) * weights(packed)).sum().backward()
    gradients = {name: full(parameter.grad) for name, parameter in policy.named_parameters()}
    return {"logprobs": logprobs.detach(), "entropies": entropies.detach(), **gradients}


@pytest.mark.slow
def test_compiled_equals_eager_for_batches_of_any_lengths(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    path = save_qwen3(tmp_path)
    torch._dynamo.reset()
    counters.clear()  # of other tests
    graphs = []
    for lengths in ((5, 17, 3), (16, 9, 40, 2), (30, 30)):
        eager, compiled = (outcome(path, kernels, lengths=lengths) for kernels in (EAGER, COMPILED))
        for name, expected in eager.items():
            assert relative(compiled[name], expected) < 1e-5, name
        graphs.append(counters["stats"]["unique_graphs"])
    # Norms of hidden states and of heads, the MLP, the head's forward and backward; no graph for each batch or layer.
    assert graphs[0] <= 6
    assert graphs[-1] == graphs[0]


def _after_passes_without_gradient(mesh: DeviceMesh, path: Path) -> list[dict[str, torch.Tensor]]:
    """Gradients of two batches, each after the reference's pass and the policy's own without gradients.

    The passes run in another thread than the one that loaded the model, as recomputation on a device does.
    """
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "activation_checkpointing": Checkpointing.all}
    found = []
    for kernels in (EAGER, COMPILED):
        policy = load(path, mesh=mesh, device="cpu", kernels=kernels, **options)
        reference = load(path, mesh=mesh, device="cpu", kernels=kernels, **options).requires_grad_(False)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_two_steps, policy, reference).result()
        found.append({name: full(parameter.grad) for name, parameter in policy.named_parameters()})
    return found


def _two_steps(policy: PolicyModel, reference: PolicyModel) -> None:
    for lengths in ((5, 17, 3), (16, 9, 40, 2)):
        packed = batch(101, lengths)
        with torch.no_grad():
            reference(**packed.inputs, temperature=0.7)
            policy(**packed.inputs, temperature=0.7)
        logprobs, _ = policy(**packed.inputs, temperature=0.7)
        (logprobs * weights(packed)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save", [save_qwen3, partial(save_qwen35, layers=8)], ids=["qwen3", "qwen35"])
def test_recomputed_layers_take_the_graphs_of_their_forward(
    save: Callable[..., Path], ranks: int, tmp_path: Path
) -> None:
    """Reference, passes without gradients and recomputed ones need more graphs of a norm than torch's default of 8."""
    path = save(tmp_path / "policy", spread=0.02)  # wider weights would amplify the rounding of bfloat16
    eager, compiled = run_on(ranks, _after_passes_without_gradient, tmp_path / "results.pt", path)
    total = torch.stack([expected.norm() for expected in eager.values()]).norm()
    for name, expected in eager.items():
        # Gradients that are small beside the others, as those of decays, are rounding for the most part.
        assert (compiled[name] - expected).norm() < 0.1 * expected.norm() + 0.005 * total, name
