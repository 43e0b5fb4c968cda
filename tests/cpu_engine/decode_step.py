"""The torch operators of one decode step: `python -m tests.cpu_engine.decode_step MODEL`, with an engine's environment.

Runs SGLang's model in this process. Writes the operators of a step with Qwen3 as one function, and again with SGLang's
modules (a model with a hook is not plain), and the largest difference of the logits.
"""

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.device.cpu import DEVICE
from app.device.torchvision_shim import define_operators

REQUESTS, PROMPT_TOKENS = 8, 16


class Counted(TorchDispatchMode):
    """Counts the operators that are called, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(operator.overloadpacket)] += 1
        return operator(*args, **(kwargs or {}))


def load(model: str) -> Any:
    """Return SGLang's runner of a model, as its own benchmark starts one."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    flags = {**DEVICE.engine_flags, "model-path": model, "dtype": "float32", "max-total-tokens": 4096}
    values = {name: value for name, value in flags.items() if value not in (None, False)}
    words = [word for name, value in values.items() for word in (f"--{name}", "" if value is True else str(value))]
    arguments = prepare_server_args([word for word in words if word])
    arguments.resolve_once()
    rank = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    one_batch.publish(arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    return runner


def decode(runner: Any) -> tuple[Counter[str], Tensor]:
    """Run a prefill and two steps; return the second step's operators and logits."""
    from sglang.benchmark import one_batch

    runner.clear()
    prompts = [[4 + (request + token) % 50 for token in range(PROMPT_TOKENS)] for request in range(REQUESTS)]
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(REQUESTS, PROMPT_TOKENS, prompts)
    tokens, _, batch = runner.extend(requests)
    tokens, _ = runner.decode(tokens, batch)
    with Counted() as counted:
        _, logits = runner.decode(tokens, batch)
    return counted.calls, logits


def main(model: str) -> None:
    from app.cpu_engine import qwen3_model

    runner = load(model)
    whole, logits = decode(runner)

    module = runner.torch_runner.model.model
    module.register_forward_hook(lambda *_: None)
    qwen3_model._plain.clear()
    modules, expected = decode(runner)

    difference = (logits - expected).abs().max().item()
    counts = {"layers": len(module.layers), "whole": whole, "modules": modules, "difference": difference}
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    define_operators()
    torch.set_grad_enabled(False)
    main(sys.argv[1])
