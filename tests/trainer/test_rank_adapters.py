"""A trainer rank with adapters: one model, which is its own reference, and what its memory regions hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from app.config.device import Dtype
from app.config.model import LoraConfig
from app.config.trainer import TrainerConfig
from app.model.policy import named_checkpoint_tensors, named_trained_tensors
from app.offload.trainer import Offload
from app.trainer.rank import OFFLOAD, TrainerRank
from app.types import TrainerMemory
from tests.trainer.ranks import run_on
from tests.trainer.support import full, rank_spec, scored_groups
from tests.trainer.test_adapters import KL


def local_bytes(tensors: Any) -> int:
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def played(mesh: DeviceMesh, path: Path, logs: Path) -> dict[str, Any]:
    """Two steps of a rank, its model moved to the host and back in between."""
    spec = rank_spec(
        path,
        logs,
        dtype=Dtype.bfloat16,
        trainer=TrainerConfig(lr=0.01, tokens_per_microbatch=100),
        run_updates=2,
        algorithm=KL,
        reference=True,
        ranks=mesh.size(),
        lora=LoraConfig(rank=4),
    )
    rank = TrainerRank(spec, dist.get_rank())
    rank.torch_device = torch.device("cpu")
    rank._load_models()
    rank._make_step()
    rank.extensions[OFFLOAD] = Offload(rank, moves=True)
    before = {name: full(tensor) for name, tensor in named_checkpoint_tensors(rank.model)}

    metrics = []
    for version in (1, 2):
        rank.step.begin(version)
        rank.add_groups(scored_groups(2))
        metrics.append(dict(rank.finish_step().metrics))
        for region in TrainerMemory:
            rank.offload(region)
        captured = rank.capture()
        for region in TrainerMemory:
            rank.onload(region)

    base = {name: full(tensor) for name, tensor in named_checkpoint_tensors(rank.model)}
    return {
        "metrics": metrics,
        "second model": rank.reference is not None,
        "own reference": rank.step.reference is rank.model,
        "base unchanged": all(torch.equal(base[name], tensor) for name, tensor in before.items()),
        "captured": captured,
        "base": sum(tensor.numel() for tensor in base.values()),
        "trained": local_bytes(tensor for _, tensor in named_trained_tensors(rank.model)),
        "optimizer": local_bytes(value for _, _, value in rank.optimizer.state()),
        "offloaded optimizer": rank.extensions[OFFLOAD]._copies[TrainerMemory.optimizer].bytes,
    }


@pytest.fixture(scope="module")
def result(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on(2, played, folder / "result.pt", path, folder)


def test_the_policy_is_its_own_reference_without_a_second_model(result: dict[str, Any]) -> None:
    assert (result["second model"], result["own reference"], result["base unchanged"]) == (False, True, True)
    first, second = (metrics["kl/reference"] for metrics in result["metrics"])
    assert first == 0.0 < second


def test_regions_and_checkpoints_hold_no_base_twice(result: dict[str, Any]) -> None:
    assert result["offloaded optimizer"] == result["optimizer"] < 2.1 * result["trained"]
    beside_them = result["captured"] - result["trained"] - result["optimizer"]
    assert 0 < beside_them < 1000 < 2 * result["base"]  # the schedule
