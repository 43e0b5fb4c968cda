"""The whole application against TRL's GRPOTrainer.

    python -m tests.bench.end_to_end --peer PYTHON [--out FILE]

Both run the same workload on the same two cores, in turns: a random Qwen3 (6 layers, 256 wide, vocabulary of 64, so
that a completion ends by chance after 64 tokens on average, at 256 at the latest), 16 prompts of 16 tokens per step,
groups of 8, a trivial reward, one AdamW update per step, float32. PYTHON is the interpreter of an environment with TRL;
tests/bench/trl_grpo.py shows how to create one. The first two steps of each run are not counted. Memory is the peak of
the proportional set size summed over all processes of a run. Prints one JSON line.
"""

import argparse
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app.types import Trajectory
from tests.bench.machine import machine, pss_by_process
from tests.bench.trl_baseline import VOCABULARY, save_baseline_model

PROMPTS_PER_STEP, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 16, 8, 16, 256
WARM_UP = 2  # steps
SAMPLE_SECONDS = 3.0  # sampling a dozen processes takes 0.1 s
DEADLINE_SECONDS = 1800  # for one run
MARK = "POSTTRAIN_BENCH_RUN"


def reward(trajectories: list[Trajectory]) -> list[float]:
    """The same reward as in trl_grpo.py."""
    return [int(each.completion.token_ids.sum()) % 7 / 7 for each in trajectories]


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float  # median step
    tokens_per_second: float  # completion tokens over seconds, of all counted steps
    peak_mib: float
    processes: dict[str, int]  # MiB at the peak, by kind of process
    detail: dict[str, float]


def save_prompts(file: Path, count: int) -> Path:
    generator = random.Random(0)
    rows = [" ".join(f"w{generator.randrange(2, VOCABULARY)}" for _ in range(PROMPT_TOKENS)) for _ in range(count)]
    file.write_text("".join(json.dumps({"question": row, "answer": "0"}) + "\n" for row in rows))
    return file


def trl(python: str, model: Path, prompts: Path, steps: int) -> Measured:
    command = [python, str(Path(__file__).with_name("trl_grpo.py")), "--model", str(model), "--prompts", str(prompts)]
    shape = {"steps": steps, "prompts-per-step": PROMPTS_PER_STEP, "group-size": GROUP_SIZE, "max-tokens": MAX_TOKENS}
    command += [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    output, memory = run_and_sample_memory(command)
    result = json.loads(output.splitlines()[-1])
    return measured(result["seconds"], result["completion_tokens"], memory, lambda: {})


def ours(placement: str, model: Path, prompts: Path, steps: int, folder: Path) -> Measured:
    run = folder / f"run-{secrets.token_hex(4)}"
    overrides = {
        "placement": placement,
        "model.path": model,
        "data.path": prompts,
        "reward._target_": "tests.bench.end_to_end.reward",
        "steps": steps,
        "algorithm.prompts_per_step": PROMPTS_PER_STEP,
        "algorithm.group_size": GROUP_SIZE,
        "rollout.max_prompt_tokens": PROMPT_TOKENS,
        "rollout.max_completion_tokens": MAX_TOKENS,
        "trainer.lr": 1e-5,
        "trainer.tokens_per_microbatch": 2048,
        "eval.every": 0,
        "eval.before_train": "false",
        "data.eval_fraction": 1e-9,  # one row
        "hydra.run.dir": run,
    }
    _, memory = run_and_sample_memory(
        [sys.executable, "-m", "app", *(f"{key}={value}" for key, value in overrides.items())]
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "time/step" in line]
    tokens = [line["tokens/completion"] for line in lines]

    def detail() -> dict[str, float]:
        names = ("time/generate", "time/train", "time/sync", "mismatch/abs_difference", "staleness/mean")
        return {name: round(statistics.median(line[name] for line in lines[WARM_UP:]), 7) for name in names}

    return measured([line["time/step"] for line in lines], tokens, memory, detail)


def measured(
    seconds: list[float], tokens: list[float], memory: "Memory", detail: Callable[[], dict[str, float]]
) -> Measured:
    counted = seconds[WARM_UP:]
    speed = sum(tokens[WARM_UP:]) / sum(counted)
    return Measured(statistics.median(counted), speed, memory.peak_mib, memory.by_kind, detail())


class Memory:
    """Samples the memory of a process and its descendants in a thread."""

    def __init__(self, pid: int, mark: str):
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


def compare(python: str, placement: str, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    model = save_baseline_model(folder / "model")
    prompts = save_prompts(folder / "prompts.jsonl", PROMPTS_PER_STEP * (steps + 4))
    results: dict[str, list[Measured]] = {"trl": [], "ours": []}
    loads = []
    for _ in range(rounds):
        loads.append(round(os.getloadavg()[0], 1))
        for side, measure in (
            ("trl", lambda: trl(python, model, prompts, steps)),
            ("ours", lambda: ours(placement, model, prompts, steps, folder)),
        ):
            results[side].append(measure())
            print(side, results[side][-1], file=sys.stderr)  # progress: a round takes minutes
    both = list(zip(results["ours"], results["trl"], strict=True))
    return {
        "what": "end_to_end",
        "placement": placement,
        "tokens_per_second_over_trl": median([a.tokens_per_second / b.tokens_per_second for a, b in both], 2),
        "memory_over_trl": median([a.peak_mib / b.peak_mib for a, b in both], 3),
        "targets": {"tokens_per_second_over_trl": 4.0, "memory_over_trl": 0.5},
        **{
            side: {
                "seconds_per_step": median([each.seconds for each in rows], 2),
                "completion_tokens_per_second": median([each.tokens_per_second for each in rows], 0),
                "peak_pss_mib": median([each.peak_mib for each in rows], 0),
                "pss_mib_at_the_peak": rows[-1].processes,
                **rows[-1].detail,
            }
            for side, rows in results.items()
        },
        "steps": steps,
        "rounds": rounds,
        "load_average_before_each_round": loads,  # this benchmark's own work included
        "machine": machine(),
    }


def median(values: list[float], digits: int) -> float:
    return round(statistics.median(values), digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="Python interpreter of an environment with TRL")
    parser.add_argument("--placement", default="colocate")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = json.dumps(
            compare(arguments.peer, arguments.placement, arguments.rounds, arguments.steps, Path(folder))
        )
    print(result)
    if arguments.out:
        arguments.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
