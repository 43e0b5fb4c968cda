"""Speedup of the engine's batched CPU attention over SGLang's torch_native attention.

    python -m tests.bench.generation [--only MODEL] [--out FILE] [--add]

Two real SGLang servers with the same model, one with each attention backend, answer the same requests in turns on
otherwise idle cores. The temperature makes all tokens about equally likely, so completions end by chance: a long tail,
truncated at the limit. The ratio is of each round; the result has their median and spread. Prints one JSON line.
`--only` measures one model; `--add` adds it to those in FILE.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from app.rollout.engine.remote import RemoteEngine
from app.types import GroupRequest, Sampling
from tests.bench.machine import Options, busy, conditions, machine, print_result, spread

GROUP_SIZE = 8
PROMPT_TOKENS = 16
TEMPERATURE = 50.0  # nearly uniform sampling
BACKENDS = ("torch_native", "torch_batched")
TINY, WIDE = MODELS = ("tiny", "qwen3 of 6 layers, 256 wide")


def requests(name: str, groups: int, max_tokens: int, temperature: float) -> list[GroupRequest]:
    random = np.random.default_rng(0)
    sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=max_tokens)
    prompts = random.integers(4, 60, (groups, PROMPT_TOKENS)).astype(np.int32)
    return [GroupRequest(f"{name}/{index}", prompt, GROUP_SIZE, sampling, 0) for index, prompt in enumerate(prompts)]


async def tokens_per_second(engine: RemoteEngine, group_requests: list[GroupRequest]) -> float:
    started = time.perf_counter()
    groups = await asyncio.gather(*(engine.generate(request) for request in group_requests))
    tokens = sum(len(completion.token_ids) for group in groups for completion in group)
    return tokens / (time.perf_counter() - started)


async def measure(model: Path, rounds: int, max_tokens: int, folder: Path) -> dict[str, Any]:
    from tests.conftest import make_engine

    before = conditions()
    flags = {"max_total_tokens": 65536, "max_running_requests": 256}
    engines = {name: make_engine(model, folder, name=name, attention_backend=name, **flags) for name in BACKENDS}
    for engine in engines.values():
        await engine.start(600)
    results: dict[str, Any] = {"before": before}
    for concurrent in (32, 64, 128):
        speed: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for round_number in range(1 + rounds):
            group_requests = requests(f"{concurrent}/{round_number}", concurrent // GROUP_SIZE, max_tokens, TEMPERATURE)
            for name, engine in engines.items():
                measured = await tokens_per_second(engine, group_requests)
                # The first round warms up.
                if round_number:
                    speed[name].append(measured)
        ratios = [batched / native for native, batched in zip(*(speed[name] for name in BACKENDS), strict=True)]
        results[f"{concurrent} requests"] = {
            **{f"{name}_tokens_per_second": spread(values, 0) for name, values in speed.items()},
            "batched_over_native": spread(ratios, 2),
        }
    for engine in engines.values():
        await engine.stop()
    return results


async def all_models(given: argparse.Namespace, earlier: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measure each model, or the one that is asked for."""
    from app.config.model import ModelConfig
    from app.model.hf_directory import locate
    from tests.bench.random_model import save_baseline_model

    results = {name: result for name, result in earlier.items() if name in MODELS}
    for name in MODELS if given.only is None else [given.only]:
        path = locate(ModelConfig()) if name == TINY else save_baseline_model(folder / "baseline")
        results[name] = await measure(path, given.rounds, given.max_tokens, folder)
    return {
        "what": "generation",
        "max_tokens": given.max_tokens,
        "rounds": given.rounds,
        **results,
        "busy": busy(result["before"] for result in results.values()),
        "machine": machine(),
    }


def main() -> None:
    options = Options(__doc__, adds=True)
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--only", choices=MODELS)
    given, earlier = options.parse()
    print_result(lambda folder: all_models(given, earlier, folder), given.out)


if __name__ == "__main__":
    main()
