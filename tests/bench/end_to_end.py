"""The whole application, in both placements, against TRL's GRPOTrainer.

    python -m tests.bench.end_to_end --peer PYTHON [--rounds N] [--tune] [--out FILE [--add]]

Both run the same workload on the same two cores, in turns: a random Qwen3 (6 layers, 256 wide, vocabulary of 64, so
that a completion ends by chance after 64 tokens on average, at 256 at the latest), 16 prompts of 16 tokens per step,
groups of 8, a trivial reward, one AdamW update per step, float32. TRL trains in microbatches of 8 rows of up to 272
positions, which is our budget of 2,048 tokens within 7 %, and generates all 128 completions at once with transformers.
PYTHON is the interpreter of an environment with TRL; tests/bench/trl_grpo.py shows how to create one.

`--tune` then runs TRL with other settings, once each. A step lasts from its start to the start of the next one, on both
sides. Memory is the peak of the proportional set size summed over all processes of a run. `--add` adds to FILE.
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
from types import MappingProxyType
from typing import Any

import psutil

from app.types import Trajectory
from tests.bench.machine import Options, busy, conditions, machine, pss_by_process, spread
from tests.bench.random_model import VOCABULARY, save_baseline_model

WARM_UP = 1  # steps that are not counted
TRL_SETTINGS = ("--microbatch", "8")  # rows; of the rounds
TUNED_SETTINGS = {  # of --tune
    "microbatch of 128": ("--microbatch", "128"),
    "microbatch of 32": ("--microbatch", "32"),
    "microbatch of 8, bfloat16": ("--microbatch", "8", "--dtype", "bfloat16"),
    "microbatch of 16": ("--microbatch", "16"),
}
SAMPLE_SECONDS = 3.0  # sampling a dozen processes takes 0.1 s
DEADLINE_SECONDS = 1800  # for one run
ASYNC_WARM_UP = 4  # the same of fully_async, which first fills its buffer
ASYNC_COOL_DOWN = 3  # its last steps, not counted: what they train on was generated in the steps before
SIDES = ("trl", "ours", "ours_async")
MARK = "POSTTRAIN_BENCH_RUN"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a workload."""

    prompts_per_step: int
    group_size: int
    prompt_tokens: int  # at most
    max_tokens: int  # of a completion
    microbatch_tokens: int  # ours


RANDOM = Shape(prompts_per_step=16, group_size=8, prompt_tokens=16, max_tokens=256, microbatch_tokens=2048)


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
    rows = [
        " ".join(f"w{generator.randrange(2, VOCABULARY)}" for _ in range(RANDOM.prompt_tokens)) for _ in range(count)
    ]
    file.write_text("".join(json.dumps({"question": row, "answer": "0"}) + "\n" for row in rows))
    return file


def trl(
    python: str, model: Path, prompts: Path, steps: int, settings: Sequence[str], shape: Shape = RANDOM
) -> Measured:
    command = [python, str(Path(__file__).with_name("trl_grpo.py")), "--model", str(model), "--prompts", str(prompts)]
    sizes = {
        "steps": steps,
        "prompts-per-step": shape.prompts_per_step,
        "group-size": shape.group_size,
        "max-tokens": shape.max_tokens,
    }
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    output, memory = run_and_sample_memory([*command, *settings])

    result = json.loads(output.splitlines()[-1])
    detail = {"settings": " ".join(settings), "threads": result["threads"], **result["versions"]}
    return measured(result["seconds"], result["generation_seconds"], result["completion_tokens"], memory, detail)


def ours(
    model: Path,
    prompts: Path,
    steps: int,
    folder: Path,
    placement: str,
    *,
    shape: Shape = RANDOM,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> Measured:
    run = folder / f"run-{secrets.token_hex(4)}"
    colocate = placement == "colocate"
    overrides = {
        "placement": placement,
        "model": "hf",
        "model.path": model,
        "data": "arithmetic",
        "reward": "exact",
        "data.path": prompts,
        "reward._target_": "tests.bench.end_to_end.reward",
        # In colocate, the start of the last one is the end of the one before.
        "steps": steps + (1 if colocate else ASYNC_COOL_DOWN),
        "algorithm.prompts_per_step": shape.prompts_per_step,
        "algorithm.group_size": shape.group_size,
        "rollout.max_prompt_tokens": shape.prompt_tokens,
        "rollout.max_completion_tokens": shape.max_tokens,
        "trainer.lr": 1e-5,
        "trainer.tokens_per_microbatch": shape.microbatch_tokens,
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


class Workload:
    """The model and the prompts of all runs, in a temporary folder."""

    def __init__(self, python: str, steps: int, folder: Path) -> None:
        self.python = python
        self.steps = WARM_UP + steps
        self.folder = folder
        self.model = save_baseline_model(folder / "model")
        self.prompts = save_prompts(
            folder / "prompts.jsonl", RANDOM.prompts_per_step * (self.steps + ASYNC_WARM_UP + 4)
        )

    def measure(self, side: str, settings: Sequence[str] = ()) -> dict[str, Any]:
        before = conditions()
        if side == "trl":
            result = trl(self.python, self.model, self.prompts, self.steps, settings)
        elif side == "ours":
            result = ours(self.model, self.prompts, self.steps, self.folder, "colocate")
        else:
            steps = self.steps - WARM_UP + ASYNC_WARM_UP
            result = ours(self.model, self.prompts, steps, self.folder, "fully_async")
        print(side, result, file=sys.stderr)  # progress: a round takes minutes
        return {**asdict(result), "before": before}

    def round(self) -> dict[str, Any]:
        return {"trl": self.measure("trl", TRL_SETTINGS), **{side: self.measure(side) for side in SIDES[1:]}}


def summary(rounds: list[dict[str, Any]], tuning: dict[str, Any], steps: int) -> dict[str, Any]:
    def ratio(side: str, name: str) -> dict[str, float]:
        return spread((each[side][name] / each["trl"][name] for each in rounds), 2)

    names = ("seconds_per_step", "generate_seconds", "tokens_per_second", "peak_pss_mib")
    return {
        "what": "end_to_end",
        **{f"{side}_over_trl": {name: ratio(side, name) for name in names} for side in SIDES[1:]},
        "targets": {"ours tokens_per_second": 4.0, "ours_async tokens_per_second": 6.0, "ours peak_pss_mib": 0.5},
        **{side: {name: spread((each[side][name] for each in rounds), 2) for name in names} for side in SIDES},
        "steps": steps,
        "tuning": tuning,
        "rounds": rounds,
        "busy": busy(run["before"] for run in [*tuning.values(), *(each[side] for each in rounds for side in SIDES)]),
        "machine": machine(),
    }


def main() -> None:
    options = Options(__doc__, adds=True)
    options.add_argument("--peer", required=True, help="Python interpreter of an environment with TRL")
    options.add_argument("--tune", action="store_true", help="then run TRL with other settings")
    options.add_argument("--steps", type=int, default=4, help="of each run, after one that is not counted")
    given, earlier = options.parse()
    rounds, tuning = earlier.get("rounds", []), earlier.get("tuning", {})

    def result() -> dict[str, Any]:
        found = summary(rounds, tuning, given.steps)
        if given.out:
            given.out.write_text(json.dumps(found) + "\n")
        return found

    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(given.peer, given.steps, Path(folder))
        for _ in range(given.rounds):
            rounds.append(workload.round())
            result()
        for name, settings in TUNED_SETTINGS.items() if given.tune else ():
            tuning[name] = workload.measure("trl", settings)
            result()
    print(json.dumps(result()))


if __name__ == "__main__":
    main()
