"""The fused AdamW of two FSDP2 ranks: the parameters of the other kernels, and checkpoints that either can resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from app.config.trainer import TrainerConfig
from app.model.load import load
from app.trainer.checkpoint_state import RankState
from app.trainer.optimizer import PolicyOptimizer
from tests.model.support import relative, save_qwen3
from tests.trainer.ranks import run_on
from tests.trainer.support import parameters

CONFIG = TrainerConfig(lr=1e-3)


class Trained:
    """A sharded policy and its optimizer, with gradients that depend on the parameters."""

    def __init__(self, path: Path, mesh: DeviceMesh, *, fused: bool, foreach: bool = False) -> None:
        self.policy = load(path, mesh=mesh, device="cpu")
        self.optimizer = PolicyOptimizer(self.policy.parameters(), CONFIG, fused=fused)
        for param_group in self.optimizer.torch_optimizer.param_groups:
            param_group["foreach"] = foreach
        self.state = RankState(self.policy, self.optimizer, torch.device("cpu"), timeout_s=60)

    def update(self, times: int) -> None:
        for _ in range(times):
            for parameter in self.optimizer.parameters:
                parameter.grad = parameter.detach().sin()
            assert self.optimizer.update(scale=0.5).applied

    @property
    def counters(self) -> set[float]:
        return {float(value) for _, slot, value in self.optimizer.state() if slot == "step"}


def _play(mesh: DeviceMesh, path: Path, folder: Path) -> dict[str, Any]:
    fused, foreach = Trained(path, mesh, fused=True), Trained(path, mesh, fused=False, foreach=True)
    for trained in (fused, foreach):
        trained.update(3)
    results = {
        "kernels": (
            fused.optimizer.torch_optimizer.defaults["fused"],
            foreach.optimizer.torch_optimizer.defaults["fused"],
        ),
        "fused": parameters(fused.policy),
        "foreach": parameters(foreach.policy),
    }

    fused.state.capture()
    fused.state.write(folder)
    fused.update(2)
    results["without a restart"] = parameters(fused.policy)
    for name, kind in (("fused", True), ("foreach", False)):
        resumed = Trained(path, mesh, fused=kind, foreach=not kind)
        resumed.state.restore(folder)
        results[f"counters of {name}"] = resumed.counters
        resumed.update(2)
        results[f"resumed by {name}"] = parameters(resumed.policy)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fused")
    return run_on(2, _play, folder / "results.pt", save_qwen3(folder / "model"), folder / "checkpoint")


def test_the_fused_kernel_equals_the_foreach_kernels_after_three_updates(results: dict[str, Any]) -> None:
    assert results["kernels"] == (True, None)
    for name, theirs in results["foreach"].items():
        assert relative(results["fused"][name], theirs) < 1e-6, name


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_either_kernel_resumes_a_checkpoint_of_the_fused_one(kernel: str, results: dict[str, Any]) -> None:
    assert results[f"counters of {kernel}"] == {3.0}
    for name, theirs in results["without a restart"].items():
        assert relative(results[f"resumed by {kernel}"][name], theirs) < (1e-6 if kernel == "foreach" else 1e-9), name
