"""Learning runs of the application, one after the other.

    python -m tests.bench.learning [NAME …] [--out FILE]

Each run is `python -m app` with the overrides below. `--out FILE` replaces these runs in the file and keeps its others.
`presets` is short for the four presets in both placements, `objectives` for each objective at three updates a step and
at staleness 4, `real` for SmolLM2-135M-Instruct (`learning_real.json`, a quarter of an hour each), `gsm8k` for two
hours with `train.jsonl` and `test.jsonl` of https://github.com/openai/grade-school-math in the folder POSTTRAIN_GSM8K.
A run that fails is named at the end, and the exit code is 1. One that began on a busy machine has no times.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.bench.machine import busy, conditions, machine
from tests.real_models import real_model

LIMIT_S = 4 * 3600.0
ASYNC = "placement=fully_async"
PRESETS: dict[str, str] = {
    f"{algorithm} {placement}": f"algorithm={algorithm} model=tiny placement={placement}"
    for algorithm in ("grpo", "dapo", "dr_grpo", "gspo")
    for placement in ("colocate", "fully_async")  # fully_async's default staleness is 2
}
# Words that stand for a folder at the start of a setting's value.
FOLDERS: dict[str, Callable[[], Path]] = {
    "SMOLLM2": lambda: real_model("smollm2"),
    "QWEN25": lambda: real_model("qwen25"),
    "GSM8K": lambda: Path(os.environ["POSTTRAIN_GSM8K"]),
}
PARTIAL = "placement=colocate placement.max_staleness=1"  # partial rollouts
LORA = "model.lora.rank=16 trainer.lr=2e-4"
REAL: dict[str, str] = {
    f"smollm2 {name} seed {seed}": f"experiment=cpu1_smollm2 model.path=SMOLLM2 {overrides} seed={seed}"
    for name, overrides in {
        "colocate full": "placement=colocate",
        "colocate lora": f"placement=colocate {LORA}",
        "fully_async full": ASYNC,
        "fully_async lora": f"{ASYNC} {LORA}",
        "partial full": PARTIAL,
        "partial long": f"{PARTIAL} steps=30 stop.at_accuracy=0.99",
    }.items()
    for seed in (0, 1, 2)
}
GSM8K: dict[str, str] = {
    "qwen25 gsm8k lora": "model=hf model.path=QWEN25 model.lora.rank=16 trainer.lr=1e-4 placement=colocate "
    "data=gsm8k data.path=GSM8K/train.jsonl data.eval_sets.test.path=GSM8K/test.jsonl data.eval_sets.test.rows=100 "
    "'data.suffix=\" Reason briefly, in two or three short sentences, and put the final number in \\boxed{}.\"' "
    "algorithm.prompts_per_step=4 algorithm.group_size=8 rollout.temperature=0.7 rollout.max_prompt_tokens=256 "
    "rollout.max_completion_tokens=256 trainer.tokens_per_microbatch=2048 trainer.activation_checkpointing=none "
    "steps=20 eval.every=20"
}
# Where an objective acts: on data that several updates, or several syncs, have left behind.
THREE_UPDATES = "algorithm.prompts_per_step=15 algorithm.updates_per_step=3"
STALE = f"{ASYNC} placement.max_staleness=4 placement.in_flight=retract steps=150"  # staler data teach less per step
KPOP = "grpo algorithm.correction=kpop"
OBJECTIVES: dict[str, str] = {
    f"{name} {where}": f"algorithm={preset} {overrides}"
    for name, preset in {
        **{"ppo": "grpo", "cispo": "cispo", "dppo": "dppo", "sapo": "sapo"},
        **{"rloo": "rloo", "maxrl": "maxrl", "kpop": KPOP},
    }.items()
    for where, overrides in {"3 updates": THREE_UPDATES, "staleness 4": STALE}.items()
}
RUNS: dict[str, str] = {
    **PRESETS,
    **OBJECTIVES,
    **REAL,
    **GSM8K,
    **{f"grpo seed {seed}": f"seed={seed}" for seed in (1, 2)},
    **{f"partial seed {seed}": f"{PARTIAL} seed={seed}" for seed in (0, 1, 2)},
    "async 0 drain": f"{ASYNC} placement.max_staleness=0 placement.in_flight=drain",
    **{
        f"async {bound} {how}": f"{ASYNC} placement.max_staleness={bound} placement.in_flight={how} steps={steps}"
        for bound, steps in ((1, 60), (4, 150))  # staler data teach less per step
        for how in ("drain", "retract", "in_place")
    },
    "verify always": "weight_sync.verify=always",
}
SHORT = {"presets": PRESETS, "real": REAL, "gsm8k": GSM8K, "objectives": OBJECTIVES}


def run(overrides: str, folder: Path) -> dict[str, Any]:
    """Return the result of one run. Raises `CalledProcessError` if it fails, with the end of its stderr as a note."""
    before = conditions()
    nothing_kept = ["checkpoint.keep=0", "checkpoint.export=false"]
    given = (with_folder(each) for each in shlex.split(overrides))
    command = [sys.executable, "-m", "app", *given, *nothing_kept, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    try:
        done.check_returncode()
    except subprocess.CalledProcessError as error:
        error.add_note(done.stderr[-1000:])
        raise
    return outcome(overrides, folder, before)


def with_folder(override: str) -> str:
    """An override with the path of the folder that its value begins with."""
    key, _, value = override.partition("=")
    name, slash, rest = value.partition("/")
    return f"{key}={FOLDERS[name]()}{slash}{rest}" if name in FOLDERS else override


def outcome(overrides: str, folder: Path, before: dict[str, float]) -> dict[str, Any]:
    """Return the result of the run in `folder`. `before` are the machine's conditions before it."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    steady = steps[3:]
    times = {
        "median_step_seconds": round(statistics.median(line["time/step"] for line in steps), 3),
        "completion_tokens_per_second": round(
            sum(line["tokens/completion"] for line in steady) / sum(line["time/step"] for line in steady)
        ),
        "run_seconds": round(summary["total/seconds"]),
        "before": before,
    }
    return {
        "overrides": overrides,
        "first": summary["eval/accuracy_first"],
        "accuracies": {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line},
        "last": summary["eval/accuracy_last"],
        "rewards": [round(line["reward/mean"], 3) for line in steps],  # of the samples of each step
        "steps": summary["steps"],
        "updates_per_step": OmegaConf.load(folder / "config" / "config.yaml").algorithm.updates_per_step,
        "clip_low_fraction": round(statistics.fmean(line["clip/low_fraction"] for line in steps), 5),
        "clip_high_fraction": round(statistics.fmean(line["clip/high_fraction"] for line in steps), 5),
        "largest_staleness": max(line["staleness/max"] for line in steps),
        **({} if busy([before]) else times),
        "machine": machine(),
    }


def measure(names: Sequence[str], results: dict[str, dict[str, Any]], out: Path | None) -> list[str]:
    """Run each of `names`, fill in its result and write all to `out` after each. Return the names that failed."""
    failed = []
    for name in names:
        try:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = {"name": name, **run(RUNS[name], Path(folder) / "run")}
        except subprocess.CalledProcessError as error:
            failed.append(name)
            sys.stderr.write(f"{name} failed: {error}\n{''.join(error.__notes__)}\n")
            continue

        sys.stderr.write(f"{json.dumps(results[name])}\n")
        if out is not None:
            out.write_text(json.dumps(summary(results), indent=1) + "\n")
    return failed


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    before = [each["before"] for each in results.values() if "before" in each]
    return {"what": "learning", "runs": list(results.values()), "busy": busy(before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = [name for name in RUNS if name not in REAL | GSM8K]
    accepted = f"one or more of: {', '.join([*SHORT, *RUNS])}"
    parser.add_argument("names", nargs="*", default=quick, help=accepted)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    previous = json.loads(arguments.out.read_text())["runs"] if arguments.out and arguments.out.exists() else []
    results = {each["name"]: each for each in previous if each["name"] in RUNS}
    names = [each for name in arguments.names for each in SHORT.get(name, [name])]
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        parser.error(f"no such run: {', '.join(unknown)}")

    failed = measure(names, results, arguments.out)
    sys.stdout.write(json.dumps(summary(results)) + "\n")
    if failed:
        sys.exit(f"{len(failed)} of {len(names)} runs failed and are not in the result: {', '.join(failed)}")


if __name__ == "__main__":
    main()
