"""The memory plan against a hand calculation."""

from dataclasses import replace

import pytest

from app.config.offload import OptimizerOffload
from app.config.trainer import Checkpointing
from app.device import device_of
from app.errors import ConfigError
from app.mode.plan.memory import MemoryPlan, Phase, capacity, plan_memory, with_inflight_groups, with_memory_settings
from app.model.architecture import QWEN3_4B, QWEN35_9B, VISION_PARAMETERS, Architecture
from app.utils.units import GIB
from tests.compose import composed

P = 8_953_803_264  # parameters of Qwen3.5-9B
ROOT = 2 * 248_320 * 4096 + 4096
LINEAR = 24 * (4096 * (8192 + 4096 + 64) + 4096 * 4096 + 8192 * 4 + 64 + 128)  # gated delta-nets
FULL = 8 * (4096 * (8192 + 2 * 1024) + 4096 * 4096 + 2 * 256)  # gated attention
MLP = 32 * (3 * 4096 * 12288 + 2 * 4096)


def memory_plan(model: Architecture, *overrides: str) -> MemoryPlan:
    config = composed(*overrides)
    device = device_of(config.device.kind)
    return plan_memory(config, device, model)


def planned(model: Architecture, *overrides: str) -> dict[tuple[str, str], Phase]:
    return {(phase.device, phase.name): phase for phase in memory_plan(model, *overrides).phases}


@pytest.fixture(scope="module")
def mission() -> dict[tuple[str, str], Phase]:
    return planned(QWEN35_9B, "device=npu", "placement=fully_async", "model=qwen35_9b")


def test_a_trainer_rank_of_the_mission_is_a_hand_count(mission: dict[tuple[str, str], Phase]) -> None:
    assert ROOT + LINEAR + FULL + MLP == P
    items = mission["trainer device", "backward of a layer"].items
    layer = LINEAR // 24 + MLP // 32  # a linear layer is the larger kind
    assert (items["masters"], items["gradients"], items["Adam"]) == (P * 4 / 4, P * 4 / 4, P * 8 / 4)
    assert items["gathered"] == 3 * layer * 2
    assert items["unreduced gradients"] == layer * 2 + 2 * layer * 4
    head = mission["trainer device", "loss and head"].items
    assert head["gathered"] == 248_320 * 4096 * 2  # the embedding is a group of its own
    assert head["logits"] == 3 * 2**26 * 4  # three head chunks


def test_recomputed_layers_keep_their_inputs_and_what_is_chosen() -> None:
    def saved(checkpointing: str) -> float:
        overrides = ("device=npu", "model=qwen35_9b", f"trainer.activation_checkpointing={checkpointing}")
        return planned(QWEN35_9B, *overrides)["shared device", "loss and head"].items["activations"]

    full = 2 * 16 * 256 + 2 * 4 * 256 + 4096  # queries with gates, keys and values, output
    linear = 8192 + 4096 + 4096  # queries, keys and values, the gate, output
    mlp = 2 * 12288 + 4096
    attention = 8 * 16 * (256 * 2 + 16 * 4)  # heads of 8 layers, with float32 statistics
    assert saved("all") == 32 * 9216 * 4096 * 2
    assert saved("attention") == saved("all") + 9216 * attention
    assert saved("matmuls") == saved("attention") + 9216 * 2 * (8 * (full + mlp) + 24 * (linear + mlp))
    assert saved("none") > 1.4 * saved("matmuls")


@pytest.mark.parametrize(("gib", "chosen"), [(90, "none"), (64, "matmuls"), (40, "attention"), (8, "all")])
def test_auto_is_the_least_recomputation_that_leaves_a_tenth_of_the_device(gib: float, chosen: str) -> None:
    given = ("device=npu", "placement=fully_async", "model=qwen3_4b", f"device.memory_gib={gib}")
    config = composed(*given)
    device = device_of(config.device.kind)
    assert config.trainer.activation_checkpointing is Checkpointing.auto
    assert with_memory_settings(config, device, QWEN3_4B).trainer.activation_checkpointing is Checkpointing[chosen]
    assert memory_plan(QWEN3_4B, *given) == memory_plan(QWEN3_4B, *given, f"trainer.activation_checkpointing={chosen}")

    fitting = []
    for each in (Checkpointing.none, Checkpointing.matmuls, Checkpointing.attention):
        plan = memory_plan(QWEN3_4B, *given, f"trainer.activation_checkpointing={each.name}")
        peaks = [phase.bytes for phase in plan.phases if phase.device == "trainer device" and phase.name != "sync"]
        fitting += [each.name] if max(peaks) <= 0.9 * gib * 2**30 else []
    assert [*fitting, "all"][0] == chosen


LONG = {  # one trajectory of this many tokens in a microbatch; where Adam's moments have to be
    "4b, 32k on one card": (QWEN3_4B, "qwen3_4b", 1, 32_768, OptimizerOffload.update),
    "9b, 64k on eight": (QWEN35_9B, "qwen35_9b", 8, 65_536, OptimizerOffload.step),
}


@pytest.mark.parametrize(("model", "preset", "devices", "tokens", "place"), LONG.values(), ids=LONG)
def test_long_contexts_leave_a_tenth_of_80_gib(
    model: Architecture, preset: str, devices: int, tokens: int, place: OptimizerOffload
) -> None:
    given = (
        f"device=cuda model={preset} placement.devices={devices} rollout.tensor_parallel=1 device.memory_gib=80 "
        f"rollout.max_prompt_tokens=2048 rollout.max_completion_tokens={tokens - 2048}"
    ).split()
    config = composed(*given)
    assert with_memory_settings(config, device_of(config.device.kind), model).offload.optimizer is place
    left = {}
    for each in ("auto", "update", "step"):
        plan = memory_plan(model, *given, f"offload.optimizer={each}")
        left[each] = 1 - max(phase.bytes for phase in plan.phases if phase.name in plan.training) / plan.capacity.bytes
        kept = [phase for phase in plan.phases if phase.name in plan.training and "Adam" in phase.items]
        used = place.name if each == "auto" else each
        assert len(kept) == (len(plan.training) if used == "step" else 1)
    assert left["auto"] == left[place.name] >= 0.1
    assert left["step"] < left["update"]


def test_replicas_shard_over_their_own_ranks() -> None:
    given = ("device=cuda", "placement=fully_async", "model=qwen3_4b", "placement.trainer_devices=8")
    eight, four = (planned(QWEN3_4B, *given, f"trainer.replicas={n}")["trainer device", "sync"].items for n in (1, 2))
    for item in ("masters", "gradients", "Adam"):
        assert four[item] == 2 * eight[item]
    with pytest.raises(ConfigError, match=r"trainer\.replicas"):
        composed(*given, "trainer.replicas=3")


def test_auto_recomputes_all_of_a_model_whose_shapes_are_not_known() -> None:
    config = composed("device=cuda", "model=qwen3_4b")
    decided = with_memory_settings(config, device_of(config.device.kind), None)
    assert decided.trainer.activation_checkpointing is Checkpointing.all


@pytest.mark.parametrize(
    ("override", "groups"),
    [
        # two engines of two devices; 73,728 bytes a token beside half of the weights; 8 requests of 2,048 tokens
        ("device.memory_gib=40", 2 * (30 * GIB - 4_022_468_096) // 73_728 // (8 * 2048)),
        ("device.memory_gib=12", 32),  # at least the groups of a step
        ("rollout.max_inflight_groups=5", 5),
        ("rollout.urls=[http://here]", None),
    ],
)
def test_as_many_groups_are_in_flight_as_the_caches_hold(override: str, groups: int | None) -> None:
    config = composed("device=cuda", "placement=fully_async", "model=qwen3_4b", override)
    device = device_of(config.device.kind)
    resolved = with_inflight_groups(config, device, QWEN3_4B)
    assert resolved.rollout.max_inflight_groups == groups
    assert resolved.groups_in_flight == min(groups or 96, 96)
    assert with_inflight_groups(config, device, None) == config


@pytest.mark.parametrize(("device", "kernels"), [("npu", 4.0), ("cuda", 2.5)])
def test_torchs_loop_of_linear_attention_keeps_more_than_kernels(device: str, kernels: float) -> None:
    """In float32 tensors as wide as the values, 4,096; a recomputed layer has its gradients too, half as much again."""
    config = composed(f"device={device}", "model=qwen35_9b", "trainer.activation_checkpointing=all")
    own = device_of(config.device.kind)
    found = []
    for each in (own, replace(own, linear_attention=None)):
        phases = plan_memory(config, each, QWEN35_9B).phases
        found += [phase.items["activations"] for phase in phases if phase.name == "backward of a layer"]
    assert found[1] - found[0] == 1.5 * 9216 * 4 * 4096 * (17.5 - kernels)


def test_the_engine_of_the_mission(mission: dict[tuple[str, str], Phase]) -> None:
    items = mission["engine device", "generate"].items
    weights = (P + 456_010_480) * 2 / 4
    rest = 0.7 * 64 * GIB - weights
    state = (
        24 * (32 * 128 * 128 * 2 + (2 * 16 + 32) * 128 * 3 * 2) // 4
    )  # bfloat16, and the last inputs of the convolution
    slots = int(rest * 0.9 / 1.9 // state)
    tokens = int((rest - slots * state) // 8192)
    assert items["engine weights"] == weights
    assert items["recurrent states"] == slots * state
    assert items["KV cache"] == tokens * 8192
    assert (slots, tokens) == (3_121, 2_788_412)


def test_an_engine_that_drafts_is_a_hand_count() -> None:
    """Four tokens are verified at a time: so many states of each request, and rows of logits in four copies."""
    plan = memory_plan(QWEN35_9B, "experiment=cuda4_colocate_9b_mtp", "device.memory_gib=80")
    draft = 2 * (FULL // 8 + MLP // 32) / 4 + 2 * (2 * 4096 * 4096 + 3 * 4096)  # a layer; every rank mixes the inputs
    rest = 0.7 * 80 * GIB - (P + VISION_PARAMETERS) * 2 / 4 - draft - 2 * 248_320 * 4096 * 2 / 4
    slots = int(rest * 0.9 / 1.9 // (12_877_824 * (1 + 4 / 5)))
    states = 12_877_824 * (slots + 4 * min(256, slots // 5))
    tokens = int((rest - states) // (8192 + 1024))

    phases = {phase.name: phase.items for phase in plan.phases}
    assert phases["generate"]["draft weights"] == phases["sync"]["draft weights"] == pytest.approx(draft)
    assert "draft weights" not in phases["backward of a layer"]
    assert phases["generate"]["recurrent states"] == states
    assert phases["generate"]["KV cache"] == tokens * (8192 + 1024)
    chunk = 8192 * (4 * 4096 + 3 * 12288 / 4) * 2
    assert phases["generate"]["engine activations"] == chunk + 4 * 4 * 4 * 256 * 248_320
    assert plan.engine.fitting(9216) == slots // 5


def test_without_a_radix_cache_states_of_drafts_come_before_the_kv_cache() -> None:
    off = ("rollout.speculative=mtp", "experiment=cuda8_fully_async_9b", "device.memory_gib=80")
    engine = memory_plan(QWEN35_9B, *off).engine
    assert engine.state_requests == 384
    assert engine.verified_states == 4 * 384 * engine.state_bytes
    assert (
        engine.fitting(9216) < 384 // 8 < memory_plan(QWEN35_9B, *off, "rollout.speculative=none").engine.fitting(9216)
    )


def test_a_request_takes_five_recurrent_states_and_one_without_a_radix_cache() -> None:
    mission = ("device=npu", "placement=fully_async", "model=qwen35_9b")
    assert memory_plan(QWEN35_9B, *mission).engine.state_requests == 3121 // 5
    alone = memory_plan(QWEN35_9B, *mission, "+rollout.engine_args.disable-radix-cache=true").engine
    assert (alone.state_slots, alone.state_requests) == (512, 512)  # max-running-requests
    assert memory_plan(QWEN3_4B, "device=cuda", "model=qwen3_4b").engine.state_requests is None


def test_sync_buffers_are_two_buckets_or_two_of_the_largest_tensor(mission: dict[tuple[str, str], Phase]) -> None:
    assert mission["trainer device", "sync"].items["sync buffers"] == 2 * 2 * GIB  # on an accelerator
    assert [name for (_, name), phase in mission.items() if "sync buffers" in phase.items] == ["sync"]
    assert mission["engine device", "sync"].items["received bucket"] == 2 * 2 * GIB

    small = planned(QWEN35_9B, "device=npu", "placement=fully_async", "model=qwen35_9b", "weight_sync.bucket_mib=512")
    assert small["trainer device", "sync"].items["sync buffers"] == 2 * 248_320 * 4096 * 2  # the embedding


def test_colocate_offloads_the_trainer_while_it_generates_and_the_caches_while_it_trains() -> None:
    line = ("device=cuda", "model=qwen3_4b", "device.memory_gib=80")
    phases = {phase.name: phase.items for phase in memory_plan(QWEN3_4B, *line).phases}
    assert "masters" not in phases["generate"]
    assert "Adam" not in phases["sync"]
    assert phases["sync"]["masters"] == QWEN3_4B.parameters * 4 / 4
    assert "KV cache" not in phases["sync"]
    assert "KV cache" not in phases["backward of a layer"]
    # Graphs stay in the memory of an engine.
    assert {items["engine runtime"] for items in phases.values()} == {4 * GIB}

    off = ("offload.engine=false", "offload.trainer=false", "offload.optimizer=step")
    resident = memory_plan(QWEN3_4B, *line, *off)
    phases = {phase.name: phase.items for phase in resident.phases}
    assert "Adam" in phases["generate"]
    assert "KV cache" in phases["backward of a layer"]
    assert resident.peak_phase.bytes > 80 * GIB  # the reason for offloading


def test_a_reference_adds_its_shards_and_its_root() -> None:
    phases = planned(QWEN3_4B, "device=cuda", "model=qwen3_4b", "algorithm.kl=k3", "algorithm.kl_coefficient=0.04")
    assert "reference" not in phases["shared device", "generate"].items  # it is offloaded with the optimizer
    assert "reference" not in phases["shared device", "sync"].items
    reference = phases["shared device", "backward of a layer"].items["reference"]
    assert reference == QWEN3_4B.parameters / 2 + (151_936 * 2560 + 2560) * 2  # a quarter of 2 bytes each, and the root


def test_sgd_has_no_adam_moments() -> None:
    phases = planned(QWEN3_4B, "device=cuda", "model=qwen3_4b", "trainer.optimizer=sgd")
    assert ("shared device", "optimizer update") not in phases
    assert all("Adam" not in phase.items for phase in phases.values())


def test_capacity_comes_from_the_setting_else_the_machine_else_a_common_card() -> None:
    def gib(*overrides: str) -> float:
        config = composed(*overrides)
        return capacity(config, device_of(config.device.kind)).bytes / GIB

    assert gib("device=npu", "model=qwen35_9b") == 64
    assert gib("device=npu", "model=qwen35_9b", "device.memory_gib=32") == 32
    assert 2 * gib("placement.devices=2") == gib()  # a CPU's memory is shared


def test_delta_sync_keeps_a_16_bit_copy_of_each_shard_where_configured() -> None:
    mission = ("device=npu", "placement=fully_async", "model=qwen35_9b", "weight_sync.mode=delta")
    items = planned(QWEN35_9B, *mission)["trainer device", "sync"].items
    assert items["last synced weights"] == P * 2 / 4
    assert "last synced weights" not in planned(QWEN35_9B, *mission[:-1])["trainer device", "sync"].items
    on_host = planned(QWEN35_9B, *mission, "weight_sync.snapshot=host")["trainer device", "sync"].items
    assert "last synced weights" not in on_host


def test_adapters_of_a_4b_leave_both_sides_resident_on_one_card() -> None:
    """Base in bfloat16 twice, float32 adapters with gradients and Adam, KV cache, and a tenth of 80 GB to spare."""
    plan = memory_plan(QWEN3_4B, "device=cuda", "model=qwen3_4b_lora")
    adapters = 66_060_288  # 36 layers · 32 · Σ (in + out) of seven linear layers
    training = {phase.name: phase for phase in plan.phases}["backward of a layer"].items
    assert training["base"] == training["engine weights"] == 2 * QWEN3_4B.parameters
    assert training["adapters"] == training["gradients"] == 4 * adapters
    assert training["Adam"] == 8 * adapters
    assert training["engine adapters"] == 2 * 2 * adapters  # two slots
    assert training["KV cache"] > 30 * GIB  # nothing is offloaded
    assert "masters" not in training
    reference = ("algorithm.kl=k3", "algorithm.kl_coefficient=0.1")  # the base is the reference
    of_reference = planned(QWEN3_4B, "model=qwen3_4b_lora", *reference)["shared device", "backward of a layer"]
    assert "reference" not in of_reference.items
    assert plan.peak_phase.bytes < 0.9 * 80 * GIB
    one_card = ("placement.devices=1", "rollout.tensor_parallel=1", "offload.optimizer=step")
    full = memory_plan(QWEN3_4B, "device=cuda", "model=qwen3_4b", *one_card)
    assert full.peak_phase.bytes > 72 * GIB


def test_engines_with_adapters_keep_their_weights_while_the_trainer_trains() -> None:
    items = planned(QWEN35_9B, "device=cuda", "model=qwen35_9b_lora")["shared device", "backward of a layer"].items
    assert items["engine weights"] == 2 * (P + VISION_PARAMETERS)
    assert "KV cache" not in items
