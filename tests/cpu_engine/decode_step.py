"""Decode steps of SGLang's models: `python -m tests.cpu_engine.decode_step FOLDER`, with an engine's environment.

Makes a tiny model of each of `CASES` in FOLDER and runs SGLang's model of it in a process of its own, forked after
SGLang was imported. Prints a line of JSON for each: the largest difference of the logits between the model as one
function and SGLang's modules (a model with a hook is not plain), and whether the model counts as plain when something
is changed in it.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.device.cpu import DEVICE
from app.device.torchvision_shim import define_operators

REQUESTS, PROMPT_TOKENS = 8, 16
LAYERS = 3
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # architecture, dtype, settings of its configuration
    "llama with biases": ("Llama", "float32", {"attention_bias": True}),
    "llama with scaled rotary embeddings": ("Llama", "float32", {"rope_parameters": SCALED}),
    "qwen2, bfloat16": ("Qwen2", "bfloat16", {}),
    "qwen3": ("Qwen3", "float32", {"head_dim": 16}),
    "qwen3, bfloat16": ("Qwen3", "bfloat16", {"head_dim": 16}),
}


def save(folder: Path, architecture: str, dtype: str, settings: dict[str, Any]) -> None:
    """Save a tiny model whose weights, biases and norms are all random."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **settings,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 0.5, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def load(model: str, dtype: str) -> Any:
    """Return SGLang's runner of a model, as its own benchmark starts one."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, prepare_server_args

    flags = {
        **DEVICE.engine_flags,
        "mem-fraction-static": DEVICE.engine_fraction,
        "model-path": model,
        "dtype": dtype,
        "max-total-tokens": 4096,
        "skip-tokenizer-init": True,
    }
    values = {name: value for name, value in flags.items() if value not in (None, False)}
    words = [word for name, value in values.items() for word in (f"--{name}", "" if value is True else str(value))]
    arguments = prepare_server_args([word for word in words if word])
    arguments.resolve_once()
    rank = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    one_batch.publish(arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    with without_tokenizer(one_batch):
        runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    return runner


@contextlib.contextmanager
def without_tokenizer(module: Any) -> Iterator[None]:
    """Let SGLang's benchmark load a model that has no tokenizer."""
    before, module.get_tokenizer = module.get_tokenizer, lambda *_, **__: None
    yield
    module.get_tokenizer = before


def decode(runner: Any) -> Tensor:
    """Run a prefill and two steps; return the second step's logits."""
    from sglang.benchmark import one_batch

    runner.clear()
    prompts = [[4 + (request + token) % 50 for token in range(PROMPT_TOKENS)] for request in range(REQUESTS)]
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(REQUESTS, PROMPT_TOKENS, prompts)
    _, _, batch = runner.extend(requests)
    tokens = torch.arange(REQUESTS) + 7  # the same ones whatever was sampled
    runner.decode(tokens, batch)
    _, logits = runner.decode(tokens + 20, batch)
    return logits


def plain_when(module: Any) -> dict[str, bool]:
    """Return whether the model counts as plain as it is, and when something is changed in it."""
    from app.cpu_engine.dense_model import is_plain

    found = {"unchanged": is_plain(module)}
    layer = module.layers[-1]
    linear = layer.mlp.down_proj

    layer.mlp.down_proj = torch.nn.Sequential(linear)  # as an adapter wraps it
    found["adapter"] = is_plain(module)
    layer.mlp.down_proj = linear

    method, linear.quant_method = linear.quant_method, object()
    found["quantized"] = is_plain(module)
    linear.quant_method = method

    weight, linear.weight.data = linear.weight.data, linear.weight.data.half()
    found["another dtype"] = is_plain(module)
    linear.weight.data = weight

    hook = linear.register_forward_pre_hook(lambda *_: None)
    found["hook"] = is_plain(module)
    hook.remove()
    assert is_plain(module) == found["unchanged"]
    return found


def measure(folder: Path, case: str) -> dict[str, Any]:
    from app.cpu_engine import dense_model

    architecture, dtype, settings = CASES[case]
    save(folder / case, architecture, dtype, settings)
    runner = load(str(folder / case), dtype)
    torch.set_num_threads(1)
    logits = decode(runner)

    module = runner.torch_runner.model.model
    plain = plain_when(module)
    module.register_forward_hook(lambda *_: None)
    dense_model._plain.clear()
    expected = decode(runner)

    difference = (logits - expected).abs().max().item()
    size = expected.std().item()
    return {"case": case, "difference": difference, "size": size, "plain": plain}


def main(folder: Path) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("sglang.benchmark.one_batch")
    for case in CASES:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            sys.stdout.write(json.dumps(measure(folder, case)) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    define_operators()
    torch.set_grad_enabled(False)
    main(Path(sys.argv[1]))
