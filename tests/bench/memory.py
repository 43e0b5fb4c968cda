"""Memory of one forward and backward over 2,048 tokens by vocabulary, with and without chunks of the head.

    python -m tests.bench.memory [--rounds N] [--out FILE] [--add]

A random Qwen3 of one layer, 128 wide, in float32, so that the head dominates; one sequence, every token trained.
`chunked` is the trainer's policy model, `full` the same model with all logits at once, log_softmax and gather, the
common way to use transformers' models. Each cell is a process of its own: peak resident size during the pass minus the
size before it. The vocabularies are those of Qwen3 and Qwen3.5. `--add` adds rounds to those in FILE.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.machine import Options, busy, conditions, machine, peak_rss_mib, publish, reset_peak, rss_mib, spread

VOCABULARIES = (151_936, 248_320)
TOKENS = 2048
WAYS = ("chunked", "full")
HIDDEN = 128
SHAPES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def measure(way: str, path: Path) -> float:
    """Return the MiB that a pass adds. A short pass before it has allocated the gradients."""
    import torch

    from app.model.load import load
    from app.model.packing import Packing

    torch.set_num_threads(2)
    policy = load(path, mesh=None, device="cpu")
    vocabulary = policy.config.vocab_size

    def run(tokens: int) -> None:
        ids = torch.randint(0, vocabulary, (tokens,))
        inputs = {
            "input_ids": ids[None],
            "position_ids": torch.arange(tokens)[None],
            "packing": Packing.of([0, tokens]),
            "logit_positions": torch.arange(tokens - 1),
            "targets": ids[1:],
        }
        if way == "chunked":
            logprobs, _ = policy(**inputs, temperature=1.0)
        else:
            hidden = hidden_states(policy, inputs)
            logits = policy.causal_lm.lm_head(hidden)
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None]).squeeze(1)
        logprobs.mean().backward()

    run(2)
    before = rss_mib()
    reset_peak()
    run(TOKENS)
    return peak_rss_mib() - before


def hidden_states(policy: Any, inputs: dict[str, Any]) -> Any:
    """Return the hidden states of all tokens but the last, [T - 1, D]."""
    decoder = policy.causal_lm.get_decoder()
    out = decoder(**{name: inputs[name] for name in ("input_ids", "position_ids", "packing")}, use_cache=False)
    return out.last_hidden_state[0, :-1]


def in_subprocess(way: str, path: Path) -> int:
    command = [sys.executable, "-m", "tests.bench.memory", "--way", way, "--model", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(float(done.stdout.splitlines()[-1]))


def one_round(folder: Path) -> dict[str, Any]:
    """Return the load before the round, and the MiB of each cell."""
    from tests.bench.random_model import save_qwen3

    before = conditions()
    cells: dict[str, int] = {}
    for vocabulary in VOCABULARIES:
        path = save_qwen3(folder / str(vocabulary), **SHAPES, vocab_size=vocabulary)
        for way in WAYS:
            cells[f"{way} {vocabulary} {TOKENS}"] = in_subprocess(way, path)
    return {"before": before, "mib": cells}


def table(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spread of each cell."""
    return [
        {
            "vocabulary": vocabulary,
            "tokens": TOKENS,
            **{
                f"{way}_mib": spread((each["mib"][f"{way} {vocabulary} {TOKENS}"] for each in rounds), 0)
                for way in WAYS
            },
        }
        for vocabulary in VOCABULARIES
    ]


def main() -> None:
    options = Options(__doc__, adds=True)
    options.add_argument("--way", choices=WAYS, help="measure only this one, in this process")
    options.add_argument("--model", type=Path)
    given, earlier = options.parse()
    if given.way:
        print(measure(given.way, given.model))
        return

    rounds = earlier.get("rounds", [])
    with tempfile.TemporaryDirectory() as folder:
        rounds += [one_round(Path(folder)) for _ in range(given.rounds)]
    result = {
        "what": "memory",
        "hidden": HIDDEN,
        "table": table(rounds),
        "rounds": rounds,
        "busy": busy(each["before"] for each in rounds),
        "machine": machine("torch", "transformers"),
    }
    publish(result, given.out)


if __name__ == "__main__":
    main()
