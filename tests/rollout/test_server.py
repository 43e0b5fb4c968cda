"""The command line, port and environment of a server."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from app.device import device_of
from app.rollout.engine.entry import forbid_expandable_segments
from app.rollout.engine.server import HOST, Server
from app.rollout.engine.server_args import engine_flags, engine_seed, teacher_flags
from tests.compose import composed
from tests.rollout.support import KEY, server_spec


def test_the_command_has_the_flags_and_not_the_key(tmp_path: Path) -> None:
    spec = server_spec(tmp_path, tmp_path, name="engine 0", tp_size=2, trust_remote_code=False, log_level=None)
    command = spec.command()
    assert command[1:4] == ["-P", "-m", "app.rollout.engine.entry"]
    assert command[command.index("--tp-size") + 1] == "2"
    assert "--disable-cuda-graph" in command
    assert command[command.index("--disable-cuda-graph") + 1].startswith("--")  # a bare flag
    assert not {"--trust-remote-code", "--log-level"} & set(command)
    assert KEY not in " ".join(command)


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        (["device=cuda", "model=qwen3_4b_lora"], 2),
        (["device=cuda", "model=qwen3_4b_lora", "placement=fully_async", "placement.max_staleness=2"], 5),
    ],
)
def test_a_server_holds_the_adapters_of_all_policies_in_flight(overrides: list[str], most: int) -> None:
    config = composed(*overrides)
    flags = engine_flags(config, device_of(config.device.kind))
    assert flags["max-loaded-loras"] == flags["max-loras-per-batch"] == most
    assert (flags["enable-lora"], flags["lora-target-modules"], flags["lora-backend"]) == (True, "all", "csgmv")
    assert flags["max-lora-rank"] == config.model.lora.rank > 0


@pytest.mark.parametrize(("placement", "released"), [("colocate", True), ("fully_async", False)])
def test_drafts_of_the_models_own_head_are_loaded_from_the_model_and_copied_where_it_is_released(
    placement: str, released: bool, tmp_path: Path
) -> None:
    config = composed("device=cuda", "model=qwen35_9b", f"placement={placement}", "rollout.speculative=mtp")
    flags = engine_flags(config, device_of(config.device.kind))
    chain = [flags[f"speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert (flags["speculative-algorithm"], chain) == ("EAGLE", [3, 1, 4])
    assert flags["enable-draft-weights-cpu-backup"] is released
    assert not any("speculative" in flag for flag in teacher_flags(config, device_of(config.device.kind)))

    command = replace(server_spec(tmp_path, tmp_path, name="engine 0"), flags=flags).command()
    assert command[command.index("--speculative-draft-model-path") + 1] == str(tmp_path)


def test_drafts_of_a_directory_are_an_eagle3_models(tmp_path: Path) -> None:
    config = composed("device=cuda", "model=qwen3_4b", f"rollout.speculative={tmp_path}")
    flags = engine_flags(config, device_of(config.device.kind))
    assert (flags["speculative-algorithm"], flags["speculative-draft-model-path"]) == ("EAGLE3", str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "requests", "tokens"),
    [
        (["experiment=cpu1_smollm2"], 16 * 8, 16 * 8 * (64 + 32)),
        (["experiment=cpu1_smollm2", "algorithm.prompts_per_step=2"], 64, 64 * (64 + 32)),  # as many for evaluations
        (["experiment=cpu1_smollm2", "placement=fully_async"], 256, 256 * (64 + 32)),  # of (2 + 1) x 128 in flight
        (["experiment=cpu1_smollm2", "rollout.max_completion_tokens=4000"], 128, 65536),
        (["device=cuda", "model=qwen3_4b"], 128, None),
    ],
)
def test_on_a_cpu_an_engine_caches_what_its_requests_can_need(
    overrides: list[str], requests: int, tokens: int | None
) -> None:
    config = composed(*overrides)
    flags = engine_flags(config, device_of(config.device.kind))
    assert flags["max-running-requests"] == requests
    assert flags.get("max-total-tokens") == tokens


def test_engines_of_neighboring_runs_have_different_seeds() -> None:
    seeds = {engine_seed(seed, index, restarts) for seed in range(4) for index in range(8) for restarts in range(4)}
    assert len(seeds) == 4 * 8 * 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    resumed = {engine_seed(0, index, 0, step) for index in range(8) for step in (5, 10)}
    assert len(resumed - seeds) == 16
    config = composed("seed=3")
    device = device_of(config.device.kind)
    assert engine_flags(config, device, index=1, resumed_at=5)["random-seed"] == engine_seed(3, 1, 0, 5)


async def test_the_port_of_a_server_is_reserved_from_its_start_to_its_stop(tmp_path: Path) -> None:
    """SGLang imports for seconds before it binds the port."""
    server = Server(replace(server_spec(tmp_path, tmp_path, name="engine 0"), fork=None))

    await server.start()
    address = (HOST, server.spec.port)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(address)
    await server.stop()
    with socket.socket() as other:
        other.bind(address)


def test_expandable_segments_are_kept_from_engines_with_a_memory_saver() -> None:
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
        "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:128",
        "OTHER_ALLOC_CONF": "expandable_segments:True",
    }
    forbid_expandable_segments(environment)
    assert environment == {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:128",
        "OTHER_ALLOC_CONF": "expandable_segments:True",
    }
