"""Train steps of adapters: against float64 without the application, on one rank and on two."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from app.config.algorithm import Kl
from app.config.model import LoraConfig
from app.config.trainer import TrainerConfig
from app.model.lora.names import delta, pairs
from app.model.policy import named_checkpoint_tensors
from app.types import ScoredGroup
from tests.model.lora.support import adapt
from tests.model.support import relative, save_qwen3, save_qwen35
from tests.trainer import plain
from tests.trainer.ranks import play_on, run_on
from tests.trainer.support import SGD, Result, Scenario, full, make_step, play, sampled, scored_groups, train
from tests.trainer.test_step import GRPO, assert_same

pytestmark = pytest.mark.usefixtures("one_thread")
LORA = LoraConfig(rank=3, alpha=2.0)
KL = replace(GRPO, kl=Kl.k3, kl_coefficient=0.1)
TWO_UPDATES = replace(KL, updates_per_step=2, clip_low=0.05, clip_high=0.05)
ADAM = TrainerConfig(lr=1e-3)
RESETS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13
FAILURES = ("failed forward", "failed backward") if RESETS else ()
SAVE: dict[str, Callable[[Path], Path]] = {"qwen3": save_qwen3, "qwen35": save_qwen35}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in SAVE.items()}


@pytest.fixture(scope="module")
def groups(paths: dict[str, Path]) -> list[ScoredGroup]:
    return sampled(paths["qwen3"], scored_groups(8))


@pytest.fixture(scope="module")
def scenarios(groups: list[ScoredGroup]) -> dict[str, Scenario]:
    moved = Scenario(KL, groups, lora=LORA, moved=True)
    return {
        "moved": moved,
        "from the base": replace(moved, moved=False),
        "two updates": replace(moved, algorithm=TWO_UPDATES),
        "adam": replace(moved, trainer=ADAM),
        "abort": replace(moved, trainer=ADAM, before="abort"),
        **{each: replace(moved, trainer=ADAM, before=each) for each in FAILURES},
    }


@pytest.fixture(scope="module")
def on_two_ranks(
    paths: dict[str, Path], scenarios: dict[str, Scenario], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    return play_on(2, paths["qwen3"], scenarios, tmp_path_factory.mktemp("ranks") / "results.pt")


# --- one rank


@pytest.mark.parametrize("kind", SAVE)
def test_a_step_matches_merged_weights_of_transformers_in_float64(kind: str, paths: dict[str, Path]) -> None:
    """Its loss with the KL to the base, its gradients, and the parameters after an SGD update."""
    path = paths[kind]
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


def test_a_rank_of_full_width_takes_the_step_of_full_fine_tuning(paths: dict[str, Path]) -> None:
    """With A = I and B = 0: dL/dB = scale · dL/dW, so that one update moves W as training all weights does."""
    path, groups = paths["qwen3"], sampled(paths["qwen3"], scored_groups(8))
    width = 32
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]  # all that take 32 features
    scenario = Scenario(GRPO, groups, lora=LoraConfig(rank=width, alpha=float(width), targets=targets))
    step = make_step(path, scenario)
    with torch.no_grad():
        for name, parameter in step.model.named_parameters():
            if name.endswith("lora_A"):
                parameter.copy_(torch.eye(width))
    train(step, scenario)
    everything = play(path, Scenario(GRPO, groups))

    adapters = {name: full(parameter) for name, parameter in named(step)}
    gradients = step.optimizer.gradients[0]  # type: ignore[attr-defined]
    assert len(pairs(adapters)) == 3 * len(targets)
    for layer, (a, b) in pairs(adapters).items():
        weight = f"{layer}.weight"
        name = f"base_model.model.{layer}"
        assert relative(gradients[f"{name}.lora_B.weight"], everything.gradients[0][weight]) < 1e-5, layer
        assert not gradients[f"{name}.lora_A.weight"].any(), layer
        assert relative(delta(a, b, 1.0), everything.moved(weight)) < 1e-3, layer


def named(step: object) -> list[tuple[str, Tensor]]:
    from app.model.policy import named_trained_tensors

    return list(named_trained_tensors(step.model))  # type: ignore[attr-defined]


def test_the_base_has_no_gradient_and_stays_as_it_is(paths: dict[str, Path], groups: list[ScoredGroup]) -> None:
    step = make_step(paths["qwen35"], scenario := Scenario(KL, groups, trainer=TrainerConfig(lr=0.05), lora=LORA))
    before = {name: full(tensor) for name, tensor in named_checkpoint_tensors(step.model)}
    for version in (1, 2, 3):
        step.begin(version)
        step.add_groups(scenario.groups[:4])
        assert all(parameter.grad is None for parameter in step.model.parameters() if not parameter.requires_grad)
        step.finish()
    for name, tensor in named_checkpoint_tensors(step.model):
        assert torch.equal(tensor, before[name]), name


def test_the_reference_is_the_base_and_no_second_model(paths: dict[str, Path], groups: list[ScoredGroup]) -> None:
    """The KL of a policy to itself is 0 until the adapters move, and then that to a frozen copy of the base."""
    path = paths["qwen3"]
    step = make_step(path, scenario := Scenario(KL, groups, lora=LORA))
    assert step.reference is step.model
    assert train(step, scenario).metrics["kl/reference"] == 0.0
    second = train(step, scenario, version=2).metrics["kl/reference"]
    assert second > 1e-6

    other = make_step(path, scenario)
    train(other, scenario)
    other.reference = make_step(path, Scenario(GRPO, groups)).model
    assert train(other, scenario, version=2).metrics["kl/reference"] == pytest.approx(second, rel=1e-5)


def test_the_norm_is_that_of_what_the_adapters_add(paths: dict[str, Path], groups: list[ScoredGroup]) -> None:
    result = play(paths["qwen3"], Scenario(GRPO, groups, lora=LORA, moved=True))
    deltas = [delta(a.double(), b.double(), LORA.scale) for a, b in pairs(result.after).values()]
    assert result.metrics["lora/norm"] == pytest.approx(torch.stack([each.norm() for each in deltas]).norm().item())
    assert "lora/norm" not in play(paths["qwen3"], Scenario(GRPO, groups)).metrics
    nothing = play(paths["qwen3"], Scenario(GRPO, [], lora=LORA))
    assert (nothing.updates, nothing.metrics["lora/norm"]) == (0, 0.0)


# --- two ranks


@pytest.mark.parametrize("name", ["moved", "from the base", "two updates"])
def test_two_ranks_compute_the_step_of_one(
    name: str, paths: dict[str, Path], scenarios: dict[str, Scenario], on_two_ranks: dict[str, Result]
) -> None:
    ours, theirs = on_two_ranks[name], play(paths["qwen3"], scenarios[name])
    for parameter, before in theirs.before.items():
        assert torch.equal(ours.before[parameter], before), parameter
    assert_same(ours, theirs)
    assert ours.metrics["lora/norm"] == pytest.approx(theirs.metrics["lora/norm"], rel=1e-5)
    assert ours.metrics["kl/reference"] == pytest.approx(theirs.metrics["kl/reference"], rel=1e-4)


@pytest.mark.parametrize("before", ["abort", *FAILURES])
def test_abort_then_step_equals_step_alone(before: str, on_two_ranks: dict[str, Result]) -> None:
    for name, parameter in on_two_ranks["adam"].after.items():
        assert torch.equal(on_two_ranks[before].after[name], parameter), name
        assert not torch.equal(parameter, on_two_ranks["adam"].before[name]), name


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


def gradients_without_fsdp(path: Path, scenario: Scenario) -> dict[str, Tensor]:
    step = make_step(path, scenario)
    for name, parameter in step.model.named_parameters():
        if name.endswith("conv1d.weight"):  # computes with the decays, in float32
            parameter.data = parameter.data.float()
    train(step, scenario)
    return step.optimizer.gradients[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", SAVE)
def test_a_bfloat16_base_and_float32_adapters_train_in_one_fsdp_group(
    kind: str, paths: dict[str, Path], groups: list[ScoredGroup], tmp_path: Path
) -> None:
    scenario = Scenario(KL, groups, lora=LORA, moved=True, compute_dtype=torch.bfloat16)
    one, dtypes, base = run_on(1, in_bfloat16, tmp_path / "one", paths[kind], scenario)
    two, same_dtypes, same_base = run_on(2, in_bfloat16, tmp_path / "two", paths[kind], scenario)
    decays = {"A_log torch.float32", "dt_bias torch.float32"} if kind == "qwen35" else set()
    assert dtypes == same_dtypes == {"base torch.bfloat16", "lora_A torch.float32", "lora_B torch.float32"} | decays
    plain_module = gradients_without_fsdp(paths[kind], scenario)
    for name, gradient in one.gradients[0].items():
        assert gradient.dtype == one.after[name].dtype == torch.float32
        assert relative(gradient, plain_module[name]) < 1e-2, name  # each microbatch's gradient is rounded
        assert relative(two.gradients[0][name], gradient) < 0.02, name  # microbatches are packed differently
    source = make_step(paths[kind], Scenario(GRPO, groups))
    for name, tensor in named_checkpoint_tensors(source.model):
        assert torch.equal(base[name], same_base[name]), name
        assert torch.equal(base[name], tensor.to(base[name].dtype)), name


def test_first_values_are_the_same_on_any_number_of_ranks(on_two_ranks: dict[str, Result]) -> None:
    first = on_two_ranks["from the base"].before
    norms = {name: tensor.norm().item() for name, tensor in first.items()}
    assert all((norm == 0) == ("lora_B" in name) for name, norm in norms.items())
