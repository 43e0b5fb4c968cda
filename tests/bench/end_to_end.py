"""The whole application against TRL's GRPOTrainer.

    python -m tests.bench.end_to_end --peer PYTHON [--rounds N] [--out FILE [--add]]
    python -m tests.bench.end_to_end --peer PYTHON --tune [--out FILE]

Both run the same workload on the same two cores, in turns: a random Qwen3 (6 layers, 256 wide, vocabulary of 64, so
that a completion ends by chance after 64 tokens on average, at 256 at the latest), 16 prompts of 16 tokens per step,
groups of 8, a trivial reward, one AdamW update per step, float32. TRL trains the completions of a step in microbatches
of 8 rows of up to 272 positions (gradient accumulation), which is our budget of 2,048 tokens within 7 %. It generates
all 128 at once with transformers: on a CPU it has no vLLM. PYTHON is the interpreter of an environment with TRL;
tests/bench/trl_grpo.py shows how to create one.

`--tune` runs TRL alone with other settings, once each, to show which serves it best. The first step of each run is not
counted. Memory is the peak of the proportional set size summed over all processes of a run. Ratios are medians of the
rounds' ratios. `--add` adds rounds to those in FILE. Prints one JSON line.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from app.types import Trajectory
from tests.bench.machine import busy, conditions, machine, pss_by_process, spread
from tests.bench.trl_baseline import VOCABULARY, save_baseline_model

PROMPTS_PER_STEP, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 16, 8, 16, 256
WARM_UP = 1  # steps
MICROBATCH_TOKENS = 2048  # ours
TRL_SETTINGS = {  # --tune; the rounds use the first, our budget of positions
    **{f"microbatch of {rows}": ["--microbatch", str(rows)] for rows in (8, 16, 32, 128)},
    "microbatch of 8, bfloat16": ["--microbatch", "8", "--dtype", "bfloat16"],
}
SAMPLE_SECONDS = 3.0  # sampling a dozen processes takes 0.1 s
DEADLINE_SECONDS = 1800  # for one run
SIDES = ("trl", "ours")
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


def save_prompts(file: Path, count: int) -> Path:
    generator = random.Random(0)
    rows = [" ".join(f"w{generator.randrange(2, VOCABULARY)}" for _ in range(PROMPT_TOKENS)) for _ in range(count)]
    file.write_text("".join(json.dumps({"question": row, "answer": "0"}) + "\n" for row in rows))
    return file


def trl(python: str, model: Path, prompts: Path, steps: int, settings: Sequence[str]) -> Measured:
    command = [python, str(Path(__file__).with_name("trl_grpo.py")), "--model", str(model), "--prompts", str(prompts)]
    shape = {"steps": steps, "prompts-per-step": PROMPTS_PER_STEP, "group-size": GROUP_SIZE, "max-tokens": MAX_TOKENS}
    command += [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    output, memory = run_and_sample_memory([*command, *settings])

    result = json.loads(output.splitlines()[-1])
    detail = {"settings": " ".join(settings), "threads": result["threads"], **result["versions"]}
    return measured(result["seconds"], result["generation_seconds"], result["completion_tokens"], memory, detail)


def ours(model: Path, prompts: Path, steps: int, folder: Path) -> Measured:
    run = folder / f"run-{secrets.token_hex(4)}"
    overrides = {
        "placement": "colocate",
        "model.path": model,
        "data.path": prompts,
        "reward._target_": "tests.bench.end_to_end.reward",
        "steps": steps,
        "algorithm.prompts_per_step": PROMPTS_PER_STEP,
        "algorithm.group_size": GROUP_SIZE,
        "rollout.max_prompt_tokens": PROMPT_TOKENS,
        "rollout.max_completion_tokens": MAX_TOKENS,
        "trainer.lr": 1e-5,
        "trainer.tokens_per_microbatch": MICROBATCH_TOKENS,
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
    names = ("time/train", "time/sync", "mismatch/abs_difference", "staleness/mean")
    detail = {name: round(statistics.median(line[name] for line in lines[WARM_UP:]), 7) for name in names}
    seconds, generate, tokens = (
        [line[name] for line in lines] for name in ("time/step", "time/generate", "tokens/completion")
    )
    return measured(seconds, generate, tokens, memory, detail)


def measured(
    seconds: list[float], generate: list[float], tokens: list[float], memory: "Memory", detail: dict[str, Any]
) -> Measured:
    """Summarize a run; the lists have an entry per step."""
    counted = seconds[WARM_UP:]
    return Measured(
        seconds_per_step=round(statistics.median(counted), 2),
        generate_seconds=round(statistics.median(generate[WARM_UP:]), 2),
        tokens_per_second=round(sum(tokens[WARM_UP:]) / sum(counted), 1),
        peak_pss_mib=round(memory.peak_mib),
        pss_mib_at_the_peak=memory.by_kind,
        detail=detail,
    )


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


class Workload:
    """The model and the prompts of all runs, in a temporary folder."""

    def __init__(self, python: str, steps: int, folder: Path):
        self.python = python
        self.steps = steps
        self.folder = folder
        self.model = save_baseline_model(folder / "model")
        self.prompts = save_prompts(folder / "prompts.jsonl", PROMPTS_PER_STEP * (steps + 4))

    def measure(self, side: str, settings: Sequence[str] = ()) -> dict[str, Any]:
        before = conditions()
        if side == "trl":
            result = trl(self.python, self.model, self.prompts, self.steps, settings)
        else:
            result = ours(self.model, self.prompts, self.steps, self.folder)
        print(side, result, file=sys.stderr)  # progress: a round takes minutes
        return {**asdict(result), "before": before}

    def tune(self) -> dict[str, Any]:
        runs = {name: self.measure("trl", settings) for name, settings in TRL_SETTINGS.items()}
        return {
            "what": "end_to_end_tuning",
            "runs": runs,
            "steps": self.steps,
            "busy": busy(run["before"] for run in runs.values()),
            "machine": machine(),
        }

    def compare(self, rounds: int, earlier: list[dict[str, Any]]) -> dict[str, Any]:
        settings = next(iter(TRL_SETTINGS.values()))
        new = [{"trl": self.measure("trl", settings), "ours": self.measure("ours")} for _ in range(rounds)]
        return summary([*earlier, *new], self.steps)


def summary(rounds: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    def ratio(name: str) -> dict[str, float]:
        return spread((each["ours"][name] / each["trl"][name] for each in rounds), 2)

    names = ("seconds_per_step", "generate_seconds", "tokens_per_second", "peak_pss_mib")
    return {
        "what": "end_to_end",
        "placement": "colocate",
        "ours_over_trl": {name: ratio(name) for name in names},
        "targets": {"tokens_per_second": 4.0, "peak_pss_mib": 0.5},
        **{side: {name: spread((each[side][name] for each in rounds), 2) for name in names} for side in SIDES},
        "steps": steps,
        "rounds": rounds,
        "busy": busy(each[side]["before"] for each in rounds for side in SIDES),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="Python interpreter of an environment with TRL")
    parser.add_argument("--tune", action="store_true", help="run TRL alone, with several settings")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of each run; the first is not counted")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="keep the rounds that are in the file of --out")
    arguments = parser.parse_args()

    earlier = json.loads(arguments.out.read_text())["rounds"] if arguments.add else []
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(arguments.peer, arguments.steps, Path(folder))
        result = json.dumps(workload.tune() if arguments.tune else workload.compare(arguments.rounds, earlier))
    print(result)
    if arguments.out:
        arguments.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
