"""SGLang's own resolution of the flags of every preset, on a platform that only describes devices."""

import json
import os
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.config import RunConfig
from app.config.device import DeviceKind
from app.config.placement import PlacementKind
from app.device import device_of
from app.rollout.engine.server_args import engine_flags, model_flags, render_flags
from tests.bench.random_model import QWEN3_4B
from tests.compose import composed

CONF = Path(__file__).parents[2] / "conf"
LAYOUTS = (1, 4, 8)  # devices of a run
TINY = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
# What SGLang chose, for the record.
SHOWN = (
    "attention_backend sampling_backend linear_attn_backend mamba_radix_cache_strategy page_size "
    "chunked_prefill_size max_prefill_tokens max_running_requests mem_fraction_static disable_radix_cache "
    "disable_custom_all_reduce flashinfer_allreduce_fusion_backend speculative_algorithm speculative_num_draft_tokens "
    "speculative_use_rejection_sampling enable_draft_weights_cpu_backup disable_overlap_schedule"
)
OWN_HEAD_DRAFTS = ("rollout.speculative=mtp",)
LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


@dataclass(frozen=True)
class Case:
    overrides: tuple[str, ...]
    devices: int  # of the run
    eagle3: bool = False  # with a draft for Qwen3-4B

    @property
    def name(self) -> str:
        return " ".join(self.overrides) + " with an EAGLE3 draft" * self.eagle3


def cases(device: DeviceKind) -> list[Case]:
    """Every experiment of a device, and every model preset in both placements on as many devices as it can have.

    On CUDA every experiment with drafts, too.
    """
    found = [
        Case((f"experiment={path.stem}",), composed(f"experiment={path.stem}").device_count)
        for path in sorted(CONF.glob(f"experiment/{device.name}*.yaml"))
    ]
    for case in [*found] if device is DeviceKind.cuda else ():  # nobody has resolved them on NPUs
        drafts = OWN_HEAD_DRAFTS if case.overrides[0].endswith("9b") else ()
        if not composed(*case.overrides).rollout.drafts:
            found.append(replace(case, overrides=(*case.overrides, *drafts), eagle3=not drafts))
    for path in sorted(CONF.glob("model/*.yaml")):
        model = (f"model={path.stem}", *(("model.path=Qwen/Qwen3-1.7B",) if path.stem == "hf" else ()))
        for placement in PlacementKind:
            overrides = (f"device={device.name}", f"placement={placement.name}", *model)
            found += (Case((*overrides, *layout), devices) for layout, devices in _layouts(overrides, placement))
    return found


def _layouts(overrides: tuple[str, ...], placement: PlacementKind) -> Iterator[tuple[tuple[str, ...], int]]:
    """The preset's own layout, and those of one, four and eight devices, with engines as wide as the preset's."""
    preset = composed(*overrides)
    yield (), preset.device_count
    for devices in LAYOUTS:
        if placement is PlacementKind.colocate:
            layout: tuple[str, ...] = (f"placement.devices={devices}",)
            engines = devices
        else:
            engines = devices // 2
            layout = (f"placement.trainer_devices={devices - engines}", f"placement.rollout_devices={engines}")
        if engines and devices != preset.device_count:
            yield (*layout, f"rollout.tensor_parallel={min(engines, preset.rollout.tensor_parallel)}"), devices


def write_models(folder: Path) -> dict[str, Path]:
    """Write a `config.json` for each kind of model that presets name; a server's arguments need no weights."""
    from transformers import LlamaConfig, Qwen3_5Config, Qwen3_5TextConfig, Qwen3Config

    linear = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, **LINEAR_HEADS}
    draft = LlamaConfig(**dict(QWEN3_4B) | {"num_hidden_layers": 1, "draft_vocab_size": 32000})
    kinds = {
        "qwen3": (Qwen3Config(**QWEN3_4B), "Qwen3ForCausalLM"),
        "qwen35": (Qwen3_5Config(), "Qwen3_5ForConditionalGeneration"),
        "tiny": (Qwen3Config(**TINY, **TINY_HEADS), "Qwen3ForCausalLM"),
        "tiny_qwen35": (Qwen3_5TextConfig(**TINY, **TINY_HEADS, **linear), "Qwen3_5ForCausalLM"),
        "eagle3": (draft, "LlamaForCausalLMEagle3"),
    }
    models = {}
    for name, (config, architecture) in kinds.items():
        config.architectures, config.dtype = [architecture], "bfloat16"
        config.save_pretrained(folder / name)
        models[name] = folder / name
    return models


def model_of(config: RunConfig) -> str:
    name = config.model.name
    if name.startswith("tiny"):
        return "tiny_qwen35" if name == "tiny_qwen35" else "tiny"
    return "qwen35" if name.startswith("qwen35") else "qwen3"


def resolve_all(device: DeviceKind, pretend: Any) -> dict[str, Any]:
    """Resolve the arguments of every case, each in a fork of this process. `pretend(devices)` describes them."""
    from sglang.srt.server_args import prepare_server_args  # noqa: F401  imported once, before the forks

    found, errors = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        for case in cases(device):
            result = _forked(lambda case=case: _resolved(case, models, pretend))
            found[case.name] = {"devices": case.devices, **result}
            problem = result.get("error") or result.get("overridden")
            if problem:
                errors[case.name] = problem
    assert not errors, json.dumps(errors, indent=1)
    return found


def _resolved(case: Case, models: dict[str, Path], pretend: Any) -> dict[str, Any]:
    from sglang.srt.server_args import prepare_server_args

    config = composed(*case.overrides, *([f"rollout.speculative={models['eagle3']}"] if case.eagle3 else []))
    flags = engine_flags(config, device_of(config.device.kind))
    flags |= model_flags(str(models[model_of(config)]), flags)
    given = {"host": "127.0.0.1", "port": 31234, **flags}
    pretend(case.devices)
    arguments = prepare_server_args([*render_flags(given), "--api-key=key"])
    arguments.resolve_once()
    arguments.check_server_args()
    resolved = arguments.resolved_dict()
    overridden = {
        name: {"given": value, "resolved": str(resolved.get(name.replace("-", "_"), "no such argument"))}
        for name, value in flags.items()
        if value is not None and not _kept(value, resolved.get(name.replace("-", "_")))
    }
    return {"overridden": overridden, **{name: _plain(resolved.get(name)) for name in SHOWN.split()}}


def _kept(given: object, resolved: object) -> bool:
    """Whether SGLang uses the value that we gave. Of several choices it makes a set."""
    if isinstance(resolved, (set, list, tuple)):
        return {str(each) for each in resolved} == {str(given)}
    return resolved == given or str(resolved) == str(given) or (given is False and resolved is None)


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _forked(work: Any) -> dict[str, Any]:
    """What `work` returns, computed in a child: resolution changes variables and globals of its process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            result = work()
        except BaseException:
            result = {"error": traceback.format_exc(limit=-4)}
        with os.fdopen(writer, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process died"}
