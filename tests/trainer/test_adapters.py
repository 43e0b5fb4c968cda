"""Train steps of adapters: against float64 without the application, on one rank and on two."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from app.config.algorithm import Kl
from app.config.model import LoraConfig
from app.model.policy import named_checkpoint_tensors
from app.types import ScoredGroup
from tests.model.lora.support import adapt
from tests.model.support import relative, save_qwen35
from tests.trainer import plain
from tests.trainer.ranks import play_on, run_on
from tests.trainer.support import SGD, Result, Scenario, full, make_step, play, sampled, scored_groups, train
from tests.trainer.test_step import GRPO, assert_same

LORA = LoraConfig(rank=3, alpha=2.0)
KL = replace(GRPO, kl=Kl.k3, kl_coefficient=0.1)
TWO_UPDATES = replace(KL, updates_per_step=2, clip_low=0.05, clip_high=0.05)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5; `path` is a Qwen3."""
    return save_qwen35(tmp_path_factory.mktemp("qwen35"))


@pytest.fixture(scope="module")
def scenarios(groups: list[ScoredGroup]) -> dict[str, Scenario]:
    moved = Scenario(KL, groups, lora=LORA, moved=True)
    return {"from the base": replace(moved, moved=False), "two updates": replace(moved, algorithm=TWO_UPDATES)}


@pytest.fixture(scope="module")
def on_two_ranks(
    path: Path, scenarios: dict[str, Scenario], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    return play_on(2, path, scenarios, tmp_path_factory.mktemp("ranks") / "results.pt")


@pytest.mark.parametrize("kind", ["path", "linear"])
def test_a_step_matches_merged_weights_of_transformers_in_float64(kind: str, request: pytest.FixtureRequest) -> None:
    """Its loss with the KL to the base, its gradients, and the parameters after an SGD update."""
    path = request.getfixturevalue(kind)
    groups = sampled(path, scored_groups(4))
    ours = play(path, Scenario(KL, groups, lora=LORA, moved=True))
    model = plain.transformers_model(path)
    trained = adapt(model, ours.before, LORA.scale)
    loss = plain.loss(model, groups, KL, Scenario(KL, groups).correction, reference=plain.transformers_model(path))
    loss.backward()
    assert ours.metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert ours.gradients[0].keys() == trained.keys() == ours.before.keys()
    for name, parameter in trained.items():
        assert parameter.grad is not None
        assert relative(ours.gradients[0][name], parameter.grad) < 1e-4, name
        assert relative(ours.moved(name), -SGD.lr * parameter.grad) < 1e-3, name


@pytest.mark.parametrize("name", ["from the base", "two updates"])
def test_two_ranks_compute_the_step_of_one(
    name: str, path: Path, scenarios: dict[str, Scenario], on_two_ranks: dict[str, Result]
) -> None:
    ours, theirs = on_two_ranks[name], play(path, scenarios[name])
    for parameter, before in theirs.before.items():
        assert torch.equal(ours.before[parameter], before), parameter
    assert_same(ours, theirs)
    assert ours.metrics["kl/reference"] == pytest.approx(theirs.metrics["kl/reference"], rel=1e-4)


def in_bfloat16(mesh: DeviceMesh, path: Path, scenario: Scenario) -> tuple[Result, set[str], dict[str, Tensor]]:
    """Play a scenario on these ranks. Also return the dtypes of the shards, and the base after it."""
    step = make_step(path, scenario, mesh)
    dtypes = {
        f"{name.rpartition('.')[2] if 'lora' in name or 'A_log' in name or 'dt_bias' in name else 'base'} {each.dtype}"
        for name, each in step.model.named_parameters()
    }
    train(step, scenario)
    base = {name: full(tensor) for name, tensor in named_checkpoint_tensors(step.model)}
    return play(path, scenario, mesh), dtypes, base


def test_a_bfloat16_base_and_float32_adapters_train_in_one_fsdp_group(
    linear: Path, groups: list[ScoredGroup], tmp_path: Path
) -> None:
    """Layers with full attention have one group, those with linear attention two."""
    scenario = Scenario(KL, groups, lora=LORA, moved=True, compute_dtype=torch.bfloat16)
    one, dtypes, base = run_on(1, in_bfloat16, tmp_path / "one", linear, scenario)
    two, same_dtypes, same_base = run_on(2, in_bfloat16, tmp_path / "two", linear, scenario)
    float32 = {f"{name} torch.float32" for name in ("lora_A", "lora_B", "A_log", "dt_bias")}
    assert dtypes == same_dtypes == {"base torch.bfloat16"} | float32

    step = make_step(linear, scenario)  # without FSDP
    for name, parameter in step.model.named_parameters():
        if name.endswith("conv1d.weight"):  # computes with the decays, in float32
            parameter.data = parameter.data.float()
    train(step, scenario)
    plain_module = step.optimizer.gradients[0]  # type: ignore[attr-defined]
    for name, gradient in one.gradients[0].items():
        assert gradient.dtype == one.after[name].dtype == torch.float32
        assert relative(gradient, plain_module[name]) < 1e-2, name  # each microbatch's gradient is rounded
        assert relative(two.gradients[0][name], gradient) < 0.02, name  # microbatches are packed differently
    source = make_step(linear, Scenario(GRPO, groups))
    for name, tensor in named_checkpoint_tensors(source.model):
        assert torch.equal(base[name], same_base[name]), name
        assert torch.equal(base[name], tensor.to(base[name].dtype)), name
