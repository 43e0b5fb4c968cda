"""The whole application on a real pretrained model, in both placements and dtypes, against TRL's GRPOTrainer.

    python -m tests.bench.real_models --peer PYTHON [--model FOLDER] [--rounds N] [--only SIDE…] [--out FILE [--add]]

All run the same workload on the same two cores, in turns: 8 sums of two-digit numbers per step in the model's chat
template, groups of 8, completions of up to 32 tokens, a trivial reward, one AdamW update per step; TRL in microbatches
of 8 rows, which served it best, ours in microbatches of as many positions. In bfloat16 TRL computes with autocast, ours
with bfloat16 copies of its float32 weights. The sides with `lora`, measured when named, train adapters of rank 16 on
all linear layers, TRL those of PEFT. FOLDER is SmolLM2-135M-Instruct unless named (`tests.real_models`). PYTHON is the
interpreter of an environment with TRL; tests/bench/trl_grpo.py shows how to create one.

Steps, memory, rounds and `--add` are those of tests/bench/end_to_end.py. Prints one JSON line.
"""

import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.end_to_end import ASYNC_WARM_UP, TRL_SETTINGS, WARM_UP, Shape, ours, trl
from tests.bench.machine import Options, busy, conditions, machine, spread
from tests.real_models import real_model

SUMS = Shape(prompts_per_step=8, group_size=8, prompt_tokens=64, max_tokens=32, microbatch_tokens=640)
SIDES = ("trl float32", "trl bfloat16", "colocate float32", "colocate bfloat16", "fully_async float32")
LORA_SIDES = ("trl float32 lora", "colocate float32 lora")
LORA_RANK = 16
NAMES = ("seconds_per_step", "generate_seconds", "tokens_per_second", "peak_pss_mib")


def save_sums(file: Path, count: int) -> Path:
    """Save sums of two-digit numbers, one a line."""
    generator = random.Random(0)
    with file.open("w") as out:
        for _ in range(count):
            a, b = generator.randrange(10, 100), generator.randrange(10, 100)
            row = {"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}
            out.write(json.dumps(row) + "\n")
    return file


def measure(side: str, python: str, model: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Run one side for `steps` steps after those that are not counted."""
    before = conditions()
    counted_from = ASYNC_WARM_UP if side.startswith("fully_async") else WARM_UP
    steps += counted_from
    prompts = save_sums(folder / "sums.jsonl", SUMS.prompts_per_step * (steps + 4))
    who, dtype, *lora = side.split()
    rank = LORA_RANK if lora else 0
    if who == "trl":
        options = ["--chat", "--dtype", dtype, "--lora-rank", str(rank)]
        found = trl(python, model, prompts, steps, [*TRL_SETTINGS, *options], SUMS)
    else:
        settings = {"data": "rows", "device.dtype": dtype, "model.lora.rank": rank}
        found = ours(model, prompts, steps, folder, who, shape=SUMS, settings=settings)
    print(side, found, file=sys.stderr)  # progress: a round takes minutes
    return {**asdict(found), "before": before}


def summary(rounds: list[dict[str, Any]], model: Path, steps: int) -> dict[str, Any]:
    """Return the medians of each side, and of our ratios to TRL in its better dtype, like with like in adapters."""
    sides = [side for side in (*SIDES, *LORA_SIDES) if all(side in each for each in rounds)]
    peers = {
        side: [peer for peer in sides if peer.startswith("trl") and (peer in LORA_SIDES) == (side in LORA_SIDES)]
        for side in sides
        if not side.startswith("trl")
    }

    def ratio(side: str, name: str) -> dict[str, float]:
        """To the peer's that computed faster in the same round."""
        best = (max((each[peer] for peer in peers[side]), key=lambda run: run["tokens_per_second"]) for each in rounds)
        return spread((each[side][name] / peer[name] for each, peer in zip(rounds, best, strict=True)), 2)

    return {
        "what": "real_models",
        "model": model.name,
        **{
            f"{name}_over_trls_better_dtype": {side: ratio(side, name) for side in peers if peers[side]}
            for name in ("tokens_per_second", "peak_pss_mib")
        },
        **{side: {name: spread((each[side][name] for each in rounds), 2) for name in NAMES} for side in sides},
        "steps": steps,
        "rounds": rounds,
        "busy": busy(run["before"] for each in rounds for run in each.values()),
        "machine": machine(),
    }


def main() -> None:
    options = Options(__doc__, adds=True)
    options.add_argument("--peer", required=True, help="Python interpreter of an environment with TRL")
    options.add_argument("--model", type=Path, help="Hugging Face directory with a chat template")
    options.add_argument("--steps", type=int, default=4, help="of each run, after those that are not counted")
    options.add_argument("--only", nargs="+", choices=(*SIDES, *LORA_SIDES), default=SIDES, metavar="SIDE")
    chosen, earlier = options.parse()

    model = chosen.model or real_model("smollm2")
    rounds = earlier.get("rounds", [])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(chosen.rounds):
            rounds.append({side: measure(side, chosen.peer, model, chosen.steps, Path(folder)) for side in chosen.only})
            found = summary(rounds, model, chosen.steps)
            if chosen.out:
                chosen.out.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
