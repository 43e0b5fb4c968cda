"""What an engine derived from its weights follows them, however they are loaded."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.cluster.engine_factory import cores_of_ranks
from app.config.device import Dtype
from app.config.weight_sync import SyncMode, Verify
from app.rollout.engine.sglang_plugin.delta_loader import DeltaLoader
from app.rollout.engine.sglang_plugin.patches import TRANSPOSED, clear_padding, finish_batch, refresh_convolutions
from app.weight_sync.sender import Sender
from app.weight_sync.transport.base import SENDER_EXTENSION
from tests.rollout.adapters import logprobs_differ
from tests.rollout.caching_double import REFRESHED, environment
from tests.rollout.support import host_spec, noisy_model, remote, request, server_spec
from tests.weight_sync.support import make_synchronizer, make_trainer, running, set_weights

CACHED = ("o_proj.weight", "down_proj.weight")  # by the double
BF16_ERROR = 0.1  # nats, on average


class Layer(torch.nn.Module):
    """As SGLang's linear attention: a view of the convolution's parameter, and with it the copy of its backend."""

    conv_weights: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 1, 4))
        self.conv_weights = self.weight.view(6, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_convolution_is_refreshed_in_its_memory(dtype: torch.dtype) -> None:
    """Also one that was made in inference mode, and one that was cast."""
    layer, unused = Layer(), Layer()
    with torch.inference_mode():
        copy = layer.conv_weights.transpose(0, 1).contiguous().to(dtype)
    setattr(layer, TRANSPOSED, copy)
    address = copy.data_ptr()

    with torch.no_grad():
        layer.weight.copy_(torch.arange(24.0).view(6, 1, 4))
    refresh_convolutions(None, torch.nn.Sequential(layer, torch.nn.Linear(2, 2), unused), torch.device("cpu"))
    assert copy.data_ptr() == address
    assert copy.tolist() == [[4.0 * channel + tap for channel in range(6)] for tap in range(4)]
    assert not hasattr(unused, TRANSPOSED)


# --- a real engine of two ranks that keeps copies


@pytest.fixture(scope="module")
def caching(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Two trainer ranks, and an engine in bfloat16 whose two ranks keep copies where the application refreshes them."""
    folder = tmp_path_factory.mktemp("caching")
    server = server_spec(tiny_model, folder, name="engine 0", dtype="bfloat16", tp_size=2)
    variables = environment(folder, REFRESHED) | {"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(os.cpu_count() or 1, 2)}
    server = replace(server, environment={**server.environment, **variables}, fork=None)
    engine = remote(host_spec(folder, name="engine 0", server=server))
    with running(engine, make_trainer(tiny_model, folder, ranks=2, dtype=Dtype.bfloat16)) as both:
        yield both


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "seed"), [("ipc", 1), ("collective", 2), ("delta", 3), ("disk", 4)])
async def test_an_engine_that_keeps_copies_computes_with_the_weights_that_it_loaded_last(
    way: str, seed: int, caching: tuple[Any, Any], tiny_model: Path, tmp_path: Path
) -> None:
    trainer, engine = caching
    export = tmp_path / "export"
    if way == "disk":
        noisy_model(tiny_model, seed).save_pretrained(export)
        await engine.update("update_weights_from_disk", {"model_path": str(export), "flush_cache": True})
    else:
        await sync(way, trainer, engine, seed, export)

    policy = noisy_model(export, 0)
    given = request(group_size=8, max_tokens=24)
    completions = await engine.generate(given)
    assert logprobs_differ(policy, given, completions) < BF16_ERROR
    old = noisy_model(tiny_model, 0)  # the policy, with the checkpoint's tensors where the double keeps copies
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.endswith(CACHED)}
    old.load_state_dict(state, strict=False)
    assert logprobs_differ(old, given, completions) > 4 * BF16_ERROR


async def sync(way: str, trainer: Any, engine: Any, seed: int, export: Path) -> None:
    """Sync the weights of a seed, as a delta onto those of the checkpoint where that is the way, and export them."""
    transport, mode = ("collective", SyncMode.delta) if way == "delta" else (way, SyncMode.full)
    synchronizer = await make_synchronizer(
        transport, trainer, [engine], export.parent, mode=mode, verify=Verify.never, tensor_parallel=2, bucket_mib=0.05
    )
    if mode is SyncMode.delta:
        await set_weights(trainer, 0)
        await synchronizer.sync(10 * seed)
    await set_weights(trainer, seed)
    report = await synchronizer.sync(10 * seed + 1)
    assert (report.changed_fraction is not None) == (mode is SyncMode.delta)
    await trainer.call(SENDER_EXTENSION, Sender.export, folder=export)
    await synchronizer.close()
    await synchronizer.abort()


def test_a_batch_ends_before_weights_change_and_a_buffer_is_read_before_it_is_filled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[str] = []

    def module(device: torch.device) -> Any:
        stream = SimpleNamespace(synchronize=lambda: waits.append(f"copy on {device.type}"))
        return SimpleNamespace(synchronize=lambda: waits.append(str(device)), current_stream=lambda: stream)

    monkeypatch.setattr(torch, "get_device_module", module)
    for device in ("cpu", "cuda"):
        finish_batch(SimpleNamespace(device=device))
    for device in ("cpu", "meta"):
        bucket = {"flattened_tensor": torch.empty(2, dtype=torch.uint8, device=device), "metadata": ()}
        loader = DeltaLoader()
        loader._sum_over_ranks = list
        assert loader.from_ipc(lambda *_, **__: (True, "loaded"), None, bucket) == (True, "loaded")
    assert waits == ["cuda", "copy on meta"]


def test_padded_rows_read_a_slot_of_the_cache_once_its_memory_is_back() -> None:
    table = torch.full((3, 4), 9)
    pool = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    updater = SimpleNamespace(offload_tags={"kv_cache"}, scheduler=pool)
    for released, row in (({"kv_cache"}, 9), (set(), 0)):
        updater.offload_tags = released
        assert clear_padding("reply", updater) == "reply"
        assert table[:, 0].tolist() == [row, 9, 9]


@pytest.mark.parametrize(
    ("own", "failures", "reply"), [("loads", 0, "ok"), ("loads", 1, "another"), ("raises", 1, "own")]
)
def test_an_engine_replies_that_a_bucket_is_loaded_if_every_rank_has_it(own: str, failures: int, reply: str) -> None:
    def load(*_: Any, **__: Any) -> tuple[bool, str]:
        if own == "raises":
            raise ValueError("own")
        return True, "ok"

    loader = DeltaLoader()
    loader._sum_over_ranks = lambda counts: [failures]
    success, message = loader.from_collective(load, None, [])
    assert (success, reply in message) == (reply == "ok", True)
