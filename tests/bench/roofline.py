"""What a step costs at the peak rates of an H100 and of an A3 die, by part. Arithmetic: no card measured it.

    python -m tests.bench.roofline --out tests/bench/results/roofline.json

FLOPs are those of `ModelFlops` and what is computed again, kernels and bytes those of `layer_counts`, recomputation and
decoding those of `mode=plan`, for full-length trajectories. A part takes as long as the resource that it needs longest;
FSDP2's collectives run beside them. Not counted: copies inside of FSDP2, prefills, the host, FLOPs of the delta rule.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.config.device import DeviceKind
from app.config.trainer import Checkpointing
from app.device import device_of
from app.mode.plan.duration import HOST_GB_PER_S, decode_reads, step_seconds
from app.mode.plan.memory import plan_memory, with_memory_settings
from app.mode.plan.trainer_memory import FLOAT32
from app.model.architecture import KNOWN, Architecture
from app.trainer.throughput import FORWARD_AND_BACKWARD, Cost, ModelFlops
from tests.bench.layer_counts import EAGER, HEAD, TOKENS, WAYS, Layers, fla_launches, parts_of
from tests.bench.machine import Options, publish
from tests.compose import composed

CASES = {
    "4B, H100": "experiment=cuda4_colocate_4b",
    "9B, H100": "experiment=cuda4_colocate_9b",
    "4B, A3 die": "experiment=npu4_colocate_4b",
    "9B, A3 die": "experiment=npu4_colocate_9b",
    "card_run_h100.json": "experiment=cuda1_colocate_4b algorithm.prompts_per_step=8 "
    "rollout.max_completion_tokens=1024 rollout.max_prompt_tokens=44",  # the length of its prompts
    "card_run_h200.json": "model=qwen35_9b device=cuda placement=colocate placement.devices=1 "
    "rollout.tensor_parallel=1 algorithm.prompts_per_step=8 rollout.max_completion_tokens=1024 "
    "rollout.max_prompt_tokens=6 trainer.tokens_per_microbatch=8192 trainer.optimizer=sgd device.memory_gib=139.8",
}
MEMORY_GB_PER_S = {"card_run_h200.json": 4800.0}  # of cards other than the device's; NVIDIA's H200 datasheet
# One way: half of NVLink's 900 (NVIDIA's H100 datasheet); a die's half of an Ascend 910C's 392 (arXiv 2506.12708).
LINK_GB_PER_S = {DeviceKind.cuda: 450.0, DeviceKind.npu: 196.0}
PARTS = LINEAR, OTHER, PRODUCTS, ATTENTION = "linear attention", "other kernels", "products", "attention"
ROWS = [f"{again}{each}" for each in reversed(PARTS) for again in ("", "recomputed ")]
ROWS += [f"{HEAD}: {each}" for each in (PRODUCTS, OTHER)]
KERNELS = {"mm": PRODUCTS, "addmm": PRODUCTS, "addmm_": PRODUCTS, "convolution": LINEAR, "delta rule": LINEAR}
KERNELS |= {"attention_forward": ATTENTION, "attention_backward": ATTENTION}
# Of the parts, how many the backward pass of a layer computes again.
RECOMPUTED = {Checkpointing.none: 0, Checkpointing.matmuls: 2, Checkpointing.attention: 3, Checkpointing.all: 4}
FLASH_PASSES = 3.5  # forward passes of attention in a forward and a backward: five products there, two here
HEAD_PASSES = 4  # of the LM head: its backward pass computes the logits again
UPDATE_ACCESSES = 10  # float32 of a parameter: scale a gradient, take its norm; AdamW reads four and writes three
Amounts = Mapping[str, float]  # FLOPs of "compute", bytes of "memory", bytes over the "link"; or the same a second


def part(rates: Amounts, amounts: Amounts) -> dict[str, Any]:
    seconds = {resource: amount / rates[resource] for resource, amount in amounts.items()}
    bound = max(seconds, key=lambda resource: seconds[resource])
    return {**amounts, "seconds": seconds[bound], "bound": bound}


def forward_cost(name: str) -> Cost:
    """FLOPs of a forward pass of all layers and the head."""
    once = ModelFlops.of(Layers(name, DeviceKind.cuda, {}).policy(EAGER)).forward
    periods = parts_of(name)["full attention"]  # of a layer with full attention and those before it
    return Cost(periods * once.per_token, once.per_completion_token, periods * once.per_token_squared)


def collective_bytes(model: Architecture, ranks: int, item: int) -> float:
    """Bytes that a rank receives in a microbatch: each layer twice and the ends of the model once, and gradients."""
    gathered = item * (2 * model.parameters - model.root_parameters)
    return (gathered + FLOAT32 * model.parameters) * (ranks - 1) / ranks


def kernels_of(name: str, counts: Any, what: Checkpointing, tokens: int, sampled: int) -> tuple[Counter[str], int]:
    """Part → bytes of a microbatch's kernels, and how many kernels it has."""
    moved: Counter[str] = Counter()
    launched = 0.0
    for place, number in parts_of(name).items():
        chunks = sampled / TOKENS if place == HEAD else 1
        for phase, found in counts[place].items():
            again = phase == "recomputation"
            prefix = f"{HEAD}: " if place == HEAD else "recomputed " * again
            for kernel, size in found.get("sizes", {}).items():
                group = KERNELS.get(kernel, OTHER)
                if not again or group in PARTS[: RECOMPUTED[what]]:
                    moved[prefix + group] += round(number * size * (sampled if place == HEAD else tokens) / TOKENS)
                    launched += number * chunks * found["names"][kernel]
    return moved, round(launched)


def sheet(*overrides: str, memory_gb_per_s: float | None) -> dict[str, Any]:
    config = composed(*overrides)
    device, model = device_of(config.device.kind), KNOWN[str(config.model.path)]
    device = replace(device, memory_gb_per_s=memory_gb_per_s or device.memory_gb_per_s)
    what = with_memory_settings(config, device, model).trainer.activation_checkpointing
    engine = plan_memory(config, device, model).engine
    plan = step_seconds(config, device, model, engine)
    assert plan is not None
    steps, read = decode_reads(config, engine) or (0, 0)
    rates = {"compute": 1e12 * (device.peak_tflops or 0), "memory": 1e9 * (device.memory_gb_per_s or 0)}
    rates["link"] = 1e9 * LINK_GB_PER_S[device.kind]

    name, longest = str(config.model.path).rpartition("/")[2], config.rollout.max_tokens
    lengths = [longest] * (config.trainer.tokens_per_microbatch // longest)
    tokens, sampled = sum(lengths), len(lengths) * config.rollout.max_completion_tokens
    cost = forward_cost(name)
    products, attention = cost.per_token * tokens, cost.per_token_squared * longest * tokens
    flops = {PRODUCTS: FORWARD_AND_BACKWARD * products, ATTENTION: FLASH_PASSES * attention}
    flops |= {f"recomputed {PRODUCTS}": products, f"recomputed {ATTENTION}": attention}
    flops[f"{HEAD}: {PRODUCTS}"] = HEAD_PASSES * cost.per_completion_token * sampled

    totals: dict[str, float] = {}
    for way in WAYS[device.kind]:  # the trainer's own is the last
        counts = Layers(name, device.kind, fla_launches(device.kind)).count(way)
        moved, totals["kernels"] = kernels_of(name, counts, what, tokens, sampled)
        done = {each: {"compute": flops.get(each, 0.0) * (each in moved), "memory": moved[each]} for each in ROWS}
        parts = {each: part(rates, amounts) for each, amounts in done.items()}
        totals["if eager, s" if way == EAGER else "microbatch, s"] = sum(each["seconds"] for each in parts.values())
    totals["µs of each kernel"] = 1e6 * totals["microbatch, s"] / totals["kernels"]

    ranks, item = config.placement.trainer_ranks, config.device.dtype.bytes
    number = config.algorithm.trajectories_per_step / ranks / len(lengths)
    parts["collectives"] = part(rates, {"link": collective_bytes(model, ranks, item)})
    parts["update"] = part(rates, {"memory": UPDATE_ACCESSES * FLOAT32 * model.parameters / ranks})
    parts["decode step"] = part(rates, {"memory": read})
    parts["sync"] = part(rates, {"link": item * model.parameters * (ranks - 1) / ranks})
    train = number * max(totals["microbatch, s"], parts["collectives"]["seconds"])
    train += config.algorithm.updates_per_step * parts["update"]["seconds"]
    mfu = number * FORWARD_AND_BACKWARD * cost.of(lengths, sampled) / rates["compute"] / train
    totals |= {"train, s": train, "MFU": mfu, "generate, s": steps * parts["decode step"]["seconds"]}
    totals["host copies, s"] = 2 * 3 * FLOAT32 * model.parameters / ranks / (HOST_GB_PER_S * 1e9)  # AdamW's too
    planned = {"train, s": plan.train, "MFU": mfu * train / plan.train, "generate, s": plan.generate}
    found = {"tokens": tokens, "recomputation": what.name, "microbatches": number}
    return {**found, "parts": parts, "totals": totals, "plan": planned}


if __name__ == "__main__":
    given, _ = Options(__doc__).parse()
    sheets = {name: sheet(*text.split(), memory_gb_per_s=MEMORY_GB_PER_S.get(name)) for name, text in CASES.items()}
    publish({"what": "arithmetic", "cases": sheets}, given.out)
