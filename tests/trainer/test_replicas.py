"""Four ranks with replicas of the sharded model compute, save and send what four ranks with one model do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from app.config.model import LoraConfig
from app.config.trainer import TrainerConfig
from app.model.parallelize import replica_mesh
from app.model.policy import named_trained_tensors
from app.trainer.checkpoint_state import RankState
from app.weight_sync.buckets import Receivers
from app.weight_sync.gather import gather_full
from tests.model.support import relative, save_qwen3
from tests.trainer.ranks import run_on
from tests.trainer.support import Result, Scenario, full, make_step, play, sampled, scored_groups, train
from tests.trainer.test_step import GRPO
from tests.weight_sync.test_delta import ROUNDS, messages_of

RANKS = 4
REPLICAS = (1, 2, 4)  # four: each rank has the whole model, in plain tensors
SCENARIOS: dict[str, dict[str, Any]] = {
    "float64": {"compute_dtype": torch.float64, "algorithm": replace(GRPO, updates_per_step=2)},
    "mixed precision": {"compute_dtype": torch.bfloat16},
    "adapters": {"lora": LoraConfig(rank=3), "moved": True},
}


class Replicated:
    """A mesh of four ranks in this many replicas."""

    def __init__(self, replicas: int) -> None:
        self.mesh, process_group = replica_mesh("cpu", RANKS, replicas)
        self.options = {"replica_group": process_group}


def played(_mesh: DeviceMesh, path: Path, folder: Path, scenarios: dict[str, Scenario]) -> dict[str, Any]:
    meshes = {replicas: Replicated(replicas) for replicas in REPLICAS}
    results: dict[str, Any] = {
        name: {n: play(path, scenario, each.mesh, **each.options) for n, each in meshes.items()}
        for name, scenario in scenarios.items()
    }
    trained = replace(scenarios["float64"], compute_dtype=torch.float32, trainer=TrainerConfig(lr=1e-3))
    saved = {n: Saved(path, trained, each, folder / str(n)) for n, each in meshes.items()}
    results["files"] = {n: each.files for n, each in saved.items()}
    results["resumed"] = {
        (n, other): each.differs_after_restoring(saved[other]) for n, each in saved.items() for other in saved
    }
    results["deltas"] = {n: messages_of(Receivers.rank_0, each.mesh) for n, each in meshes.items()}
    results["gathered"] = {n: each.wrong_tensors() for n, each in saved.items()}
    return results


class Saved:
    """A trained step of this rank, and its checkpoint."""

    def __init__(self, path: Path, scenario: Scenario, replicated: Replicated, folder: Path) -> None:
        self.step = make_step(path, scenario, replicated.mesh, **replicated.options)
        self.state = RankState(self.step.model, self.step.optimizer, torch.device("cpu"), timeout_s=60)
        train(self.step, scenario)
        self.content = self._tensors()
        self.folder = folder
        self.state.capture()
        folder.mkdir(exist_ok=True)
        self.state.write(folder)
        dist.barrier()
        self.files = sum(file.stat().st_size for file in folder.iterdir())

    def _tensors(self) -> list[Tensor]:
        state = [value for _, _, value in self.step.optimizer.state()]
        return [full(tensor) for tensor in (*self.step.model.parameters(), *state)]

    def differs_after_restoring(self, other: "Saved") -> bool:
        """Whether a restored trainer has anything that the saved one had not. A collective."""
        with torch.no_grad():
            for tensor in self.step.model.parameters():
                tensor.zero_()
        self.state.restore(other.folder)
        restored = self._tensors()
        return len(restored) != len(other.content) or not all(map(torch.equal, restored, other.content))

    def wrong_tensors(self) -> dict[str, int]:
        """How many gathered tensors of rank 0, or of every rank, are not the parameters. A collective."""
        wrong = {}
        for receivers in Receivers:
            count = 0
            for _, tensor in named_trained_tensors(self.step.model):
                receives = receivers is Receivers.every_rank or dist.get_rank() == 0
                out = torch.empty(tensor.numel(), dtype=torch.bfloat16) if receives else None
                gather_full(tensor.detach(), torch.bfloat16, out=out, receivers=receivers)
                count += out is not None and not torch.equal(out, full(tensor).bfloat16().reshape(-1))
                if not receives and isinstance(tensor, DTensor):
                    full(tensor)  # the others gather it to compare
            counts = torch.tensor(count)
            dist.all_reduce(counts)
            wrong[receivers.name] = int(counts)
        return wrong


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replicas")
    path = save_qwen3(folder / "policy", tied=False)
    groups = sampled(path, scored_groups(8))
    given: dict[str, Any] = {"algorithm": GRPO, "groups": groups}
    scenarios = {name: Scenario(**given | each) for name, each in SCENARIOS.items()}
    return run_on(RANKS, played, folder / "results.pt", path, folder, scenarios)


@pytest.mark.parametrize(("name", "tolerance"), [("float64", 1e-12), ("mixed precision", 1e-6), ("adapters", 1e-5)])
@pytest.mark.parametrize("replicas", REPLICAS[1:])
def test_replicas_have_the_gradients_and_metrics_of_one_model(
    name: str, tolerance: float, replicas: int, results: dict[str, Any]
) -> None:
    one: Result = results[name][1]
    ours: Result = results[name][replicas]
    assert len(ours.gradients) == len(one.gradients) == (2 if name == "float64" else 1)
    for found, expected in zip(ours.gradients, one.gradients, strict=True):
        assert found.keys() == expected.keys()
        assert all(relative(found[key], gradient) < tolerance for key, gradient in expected.items())
    timed = ("time/", "trainer/tokens_per_second")
    metrics = {key: value for key, value in one.metrics.items() if not key.startswith(timed)}
    assert {"grad_norm", "trainer/tokens"} <= metrics.keys()
    assert {key: ours.metrics[key] for key in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("to", REPLICAS)
@pytest.mark.parametrize("origin", REPLICAS)
def test_a_checkpoint_resumes_with_another_number_of_replicas(origin: int, to: int, results: dict[str, Any]) -> None:
    assert results["resumed"][to, origin] is False
    assert results["files"][origin] <= results["files"][1]  # each shard is written once


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_sync_sends_the_parameters_of_the_first_replica(replicas: int, results: dict[str, Any]) -> None:
    assert results["gathered"][replicas] == {each.name: 0 for each in Receivers}
    whole = messages_of(Receivers.every_rank)
    assert len(whole) == len(results["deltas"][replicas]) == ROUNDS
    sent = zip(results["deltas"][replicas], whole, strict=True)
    assert all(one is not None and other is not None and torch.equal(one, other) for one, other in sent)
