"""The whole application on a real pretrained model, in both placements and dtypes, against TRL's GRPOTrainer.

    python -m tests.bench.real_models --peer PYTHON [--model FOLDER] [--rounds N] [--only SIDE…] [--out FILE [--add]]

All run the same workload on the same two cores, in turns: 8 sums of two-digit numbers per step in the model's chat
template, groups of 8, completions of up to 32 tokens, a trivial reward, one AdamW update per step; TRL in microbatches
of 8 rows, which served it best, ours in microbatches of as many positions. In bfloat16 TRL computes with autocast, ours
with bfloat16 copies of its float32 weights. The sides with `lora`, measured when named, train adapters of rank 16 on
all linear layers, TRL those of PEFT. FOLDER is SmolLM2-135M-Instruct unless named (`tests.real_models`). PYTHON is the
interpreter of an environment with TRL; tests/bench/trl_grpo.py shows how to create one.

A step lasts from its start to the start of the next one, on both sides. Memory is the peak of the proportional set size
summed over all processes of a run. `--add` adds to FILE. Prints one JSON line.
"""

import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from app.types import Trajectory
from tests.bench.machine import Options, busy, conditions, machine, pss_by_process, spread
from tests.real_models import real_model

SIDES = ("trl float32", "trl bfloat16", "colocate float32", "colocate bfloat16", "fully_async float32")
LORA_SIDES = ("trl float32 lora", "colocate float32 lora")
LORA_RANK = 16
NAMES = ("seconds_per_step", "generate_seconds", "tokens_per_second", "peak_pss_mib")
PROMPTS_PER_STEP, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 8, 8, 64, 32
TRL_ROWS, OUR_TOKENS = 8, 640  # of a microbatch
WARM_UP = 1  # steps that are not counted
ASYNC_WARM_UP = 4  # the same of fully_async, which first fills its buffer
ASYNC_COOL_DOWN = 3  # its last steps, not counted: what they train on was generated in the steps before
SAMPLE_SECONDS = 3.0  # sampling a dozen processes takes 0.1 s
DEADLINE_SECONDS = 1800  # for one run
MARK = "POSTTRAIN_BENCH_RUN"


def reward(trajectories: list[Trajectory]) -> list[float]:
    """The same reward as in trl_grpo.py."""
    return [int(each.completion.token_ids.sum()) % 7 / 7 for each in trajectories]


@dataclass(frozen=True, slots=True)
class Measured:
    seconds_per_step: float  # median
    generate_seconds: float  # median
    tokens_per_second: float  # completion tokens over seconds, of all counted steps
    peak_pss_mib: float
    pss_mib_at_the_peak: dict[str, int]  # by kind of process
    detail: dict[str, Any]


def save_sums(file: Path, count: int) -> Path:
    """Save sums of two-digit numbers, one a line."""
    generator = random.Random(0)
    with file.open("w") as out:
        for _ in range(count):
            a, b = generator.randrange(10, 100), generator.randrange(10, 100)
            row = {"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}
            out.write(json.dumps(row) + "\n")
    return file


def trl(python: str, model: Path, prompts: Path, steps: int, settings: Sequence[str]) -> Measured:
    command = [python, str(Path(__file__).with_name("trl_grpo.py")), "--model", str(model), "--prompts", str(prompts)]
    sizes = {
        "steps": steps,
        "prompts-per-step": PROMPTS_PER_STEP,
        "group-size": GROUP_SIZE,
        "max-tokens": MAX_TOKENS,
        "microbatch": TRL_ROWS,
    }
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    output, memory = run_and_sample_memory([*command, *settings])

    result = json.loads(output.splitlines()[-1])
    detail = {"settings": " ".join(settings), "threads": result["threads"], **result["versions"]}
    return measured(result["seconds"], result["generation_seconds"], result["completion_tokens"], memory, detail)


def ours(
    model: Path, prompts: Path, steps: int, folder: Path, placement: str, settings: Mapping[str, object]
) -> Measured:
    run = folder / f"run-{secrets.token_hex(4)}"
    colocate = placement == "colocate"
    overrides = {
        "placement": placement,
        "model": "hf",
        "model.path": model,
        "data": "rows",
        "reward": "exact",
        "data.path": prompts,
        "reward._target_": "tests.bench.real_models.reward",
        # In colocate, the start of the last one is the end of the one before.
        "steps": steps + (1 if colocate else ASYNC_COOL_DOWN),
        "algorithm.prompts_per_step": PROMPTS_PER_STEP,
        "algorithm.group_size": GROUP_SIZE,
        "rollout.max_prompt_tokens": PROMPT_TOKENS,
        "rollout.max_completion_tokens": MAX_TOKENS,
        "trainer.lr": 1e-5,
        "trainer.tokens_per_microbatch": OUR_TOKENS,
        "trainer.activation_checkpointing": "none",  # as in TRL's
        "checkpoint.keep": 0,
        "checkpoint.export": "false",
        "eval.every": 0,
        "eval.before_train": "false",
        "data.eval_fraction": 1e-9,  # one row
        "hydra.run.dir": run,
        **settings,
    }
    _, memory = run_and_sample_memory(
        [sys.executable, "-m", "app", *(f"{key}={value}" for key, value in overrides.items())]
    )

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "time/step" in line][:steps]
    names = ("time/train", "time/sync", "mismatch/abs_difference", "staleness/mean")
    warm_up = WARM_UP if colocate else ASYNC_WARM_UP
    detail = {name: round(statistics.median(line[name] for line in lines[warm_up:]), 7) for name in names}
    generate, tokens, between = (
        [line[name] for line in lines] for name in ("time/generate", "tokens/completion", "time/step")
    )
    # In fully_async a step of the metrics lasts from one sync to the next.
    seconds = step_seconds(run) if colocate else between
    return measured(seconds, generate, tokens, memory, detail, warm_up)


def step_seconds(run: Path) -> list[float]:
    """Return the wall-clock seconds between the starts of the steps of a run, one fewer than it has steps."""
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    starts = sorted(each["ts"] / 1e6 for each in events if each["ph"] == "X" and each["name"] == "generate")
    return [later - earlier for earlier, later in pairwise(starts)]


def measured(
    seconds: list[float],
    generate: list[float],
    tokens: list[float],
    memory: "Memory",
    detail: dict[str, Any],
    warm_up: int = WARM_UP,
) -> Measured:
    """Summarize a run; the lists have an entry per step, of which the first `warm_up` are not counted.

    Raises:
        ValueError: No completion was generated during a counted step, so its seconds are those of training alone.
    """
    counted = seconds[warm_up:]
    if not all(generate[warm_up:]):
        raise ValueError(f"a counted step without generation; seconds of generation per step: {generate}")
    return Measured(
        seconds_per_step=round(statistics.median(counted), 2),
        generate_seconds=round(statistics.median(generate[warm_up:]), 2),
        tokens_per_second=round(sum(tokens[warm_up:]) / sum(counted), 1),
        peak_pss_mib=round(memory.peak_mib),
        pss_mib_at_the_peak=memory.by_kind,
        detail=detail,
    )


class Memory:
    """Samples the memory of a process and its descendants in a thread."""

    def __init__(self, pid: int, mark: str) -> None:
        self.root = psutil.Process(pid)
        self.mark = mark.encode()
        self.peak_mib = 0.0
        self.by_kind: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            sizes = pss_by_process(self._processes())
            if sum(sizes.values()) > self.peak_mib:
                self.peak_mib = sum(sizes.values())
                self.by_kind = {kind: round(mib) for kind, mib in sorted(sizes.items(), key=lambda each: -each[1])}

    def _processes(self) -> list[psutil.Process]:
        """Return the descendants, and processes marked in their environment, whose parents may have ended."""
        try:
            processes = {process.pid: process for process in [self.root, *self.root.children(recursive=True)]}
        except psutil.NoSuchProcess:
            return []
        for process in psutil.process_iter():
            try:
                if process.pid not in processes and self.mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                    processes[process.pid] = process
            except OSError:
                continue
        return list(processes.values())


def run_and_sample_memory(command: list[str]) -> tuple[str, Memory]:
    mark = secrets.token_hex(8)
    environment = {**os.environ, MARK: mark}
    environment.pop("OMP_NUM_THREADS", None)  # each side chooses its own
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
    )
    memory = Memory(process.pid, mark)
    try:
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise RuntimeError(f"{' '.join(command)} did not end within {DEADLINE_SECONDS} s") from None
    finally:
        memory.stop()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}\n{errors}")
    return output, memory


def measure(side: str, python: str, model: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Run one side for `steps` steps after those that are not counted."""
    before = conditions()
    counted_from = ASYNC_WARM_UP if side.startswith("fully_async") else WARM_UP
    steps += counted_from
    prompts = save_sums(folder / "sums.jsonl", PROMPTS_PER_STEP * (steps + 4))
    who, dtype, *lora = side.split()
    rank = LORA_RANK if lora else 0
    if who == "trl":
        found = trl(python, model, prompts, steps, ["--dtype", dtype, "--lora-rank", str(rank)])
    else:
        found = ours(model, prompts, steps, folder, who, {"device.dtype": dtype, "model.lora.rank": rank})
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
