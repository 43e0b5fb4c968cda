"""The same run by TRL's GRPOTrainer and by this application in both placements: held-out accuracy over steps and time.

    python -m tests.bench.to_accuracy --peer PYTHON --out FILE [--only SIDE…] [--seeds N…] [--steps N]
    python -m tests.bench.to_accuracy --out FILE --picture FOLDER

SmolLM2-135M-Instruct learns sums, `experiment=cpu1_smollm2`: the same rows in the same order, reward, AdamW, learning
rate, group size, clip, sampling and microbatches of 8 sequences, float32, no KL. Greedy answers to 100 held-out rows
are judged every five steps. Seconds count from the start of the command, the evaluations left out; fully_async goes on
generating while it evaluates, so there they are counted.

PYTHON is the interpreter of an environment with TRL; tests/bench/trl_grpo.py shows how to create one. Each run is
written to FILE when it ends. The same command goes on with the runs that FILE does not have, and repeats those that
began on a busy machine. `--picture` draws FILE as FOLDER/to_accuracy.svg and FOLDER/to_accuracy_dark.svg.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from app.config import RunConfig
from app.reward.math import equal
from app.start.inputs import CheckStage, RunInputs
from app.trainer.optimizer import BETAS
from tests.bench.machine import Options, busy, conditions, machine
from tests.compose import composed
from tests.real_models import real_model

SIDES = ("trl", "colocate", "fully_async")
TARGET = 0.6
LIMIT_S = 3 * 3600.0
ROWS = 8  # of TRL's microbatch
Run = dict[str, Any]
TRL_ON_A_CPU = {  # arguments of GRPOConfig: float32, the rows in their order, nothing kept
    **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "shuffle_dataset": False},
    **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True},
}

WIDTH, HEIGHT = 420, 260  # of each of the two charts, in pixels
MARGIN = 44
NAMES = {"trl": "TRL 1.16", "colocate": "colocate", "fully_async": "fully_async"}
THEMES = {  # text, grid, a color for each side
    "": ("#1f2328", "#d1d9e0", ("#9a6700", "#0969da", "#1a7f37")),
    "_dark": ("#f0f6fc", "#3d444d", ("#d29922", "#4493f8", "#3fb950")),
}


def overrides(placement: str, seed: int, steps: int) -> list[str]:
    sizes = composed("experiment=cpu1_smollm2").rollout
    return [
        "experiment=cpu1_smollm2",
        f"model.path={real_model('smollm2')}",
        f"placement={placement}",
        f"seed={seed}",
        f"steps={steps}",
        "device.dtype=float32",
        f"trainer.tokens_per_microbatch={ROWS * (sizes.max_prompt_tokens + sizes.max_completion_tokens)}",
        "checkpoint.keep=0",
        "checkpoint.export=false",
    ]


def trl_config(config: RunConfig) -> dict[str, Any]:
    """The arguments of GRPOConfig that are this configuration."""
    algorithm, trainer, rollout = config.algorithm, config.trainer, config.rollout
    return {
        "loss_type": "grpo",
        "num_generations": algorithm.group_size,
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "max_completion_length": rollout.max_completion_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": algorithm.trajectories_per_step // ROWS,
        "max_steps": config.steps,
        "seed": config.seed,
        "learning_rate": trainer.peak_lr,
        "lr_scheduler_type": trainer.schedule.value,
        "warmup_steps": trainer.warmup_steps,
        "weight_decay": trainer.weight_decay,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": trainer.max_grad_norm,
        **TRL_ON_A_CPU,
    }


def trl(python: str, seed: int, steps: int, folder: Path) -> Run:
    config = composed(*overrides("colocate", seed, steps))
    inputs = RunInputs(config, CheckStage.start)
    prompts = inputs.prompts

    def rows(some: Iterable[Any]) -> list[dict[str, Any]]:
        texts = [(each, f"{config.data.prefix}{each.question}{config.data.suffix}") for each in some]
        return [
            {"messages": [{"role": "user", "content": text}], "ids": each.token_ids.tolist(), "answer": each.answer}
            for each, text in texts
        ]

    task = {
        "model": str(inputs.model_path),
        "train": rows(prompts.train.take(steps * config.algorithm.prompts_per_step)),
        "evals": rows(chain(*prompts.evals.values())),
        "judge": [sys.executable, "-m", "tests.bench.to_accuracy", "--judge"],
        "eval_every": config.eval.every,
        "config": trl_config(config),
    }
    (folder / "task.json").write_text(json.dumps(task))
    command = [python, str(Path(__file__).with_name("trl_learn.py")), str(folder / "task.json")]
    began = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"curve": curve(found["evaluations"], began, left_out=True), **found["versions"]}


def ours(placement: str, seed: int, steps: int, folder: Path) -> Run:
    command = [sys.executable, "-m", "app", *overrides(placement, seed, steps), f"hydra.run.dir={folder / 'run'}"]
    began = time.time()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=LIMIT_S)

    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracy = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    timeline = json.loads((folder / "run" / "timeline.json").read_text())
    zero = timeline["otherData"]["zero_unix_seconds"]
    evaluations = [
        {
            "step": event["args"]["step"],
            "accuracy": accuracy[event["args"]["step"]],
            "began": zero + event["ts"] / 1e6,
            "seconds": event["dur"] / 1e6,
        }
        for event in timeline["traceEvents"]
        if event["ph"] == "X" and event["name"] == "evaluate"
    ]
    return {"curve": curve(evaluations, began, left_out=placement == "colocate"), **machine()}


def curve(evaluations: Sequence[dict[str, float]], began: float, *, left_out: bool) -> list[list[float]]:
    """Return [step, seconds until its weights were trained, accuracy] of each evaluation."""
    points, before = [], 0.0
    for each in sorted(evaluations, key=lambda each: each["step"]):
        points.append([each["step"], round(each["began"] - began - before, 1), each["accuracy"]])
        before += each["seconds"] if left_out else 0.0
    return points


def summary(runs: dict[str, Run]) -> dict[str, Any]:
    """Seconds to the target are those of the first evaluation that reaches it; null in a run that does not."""
    found: dict[str, Any] = {}
    for side in SIDES:
        curves = [run["curve"] for run in runs.values() if run["side"] == side]
        reached = [next((seconds for _, seconds, accuracy in each if accuracy >= TARGET), None) for each in curves]
        if curves:
            found[side] = {"last": [each[-1][2] for each in curves], "seconds_to_target": reached}
    before = [run["before"] for run in runs.values()]
    return {"what": "to_accuracy", "target": TARGET, **found, "runs": runs, "busy": busy(before), "machine": machine()}


def picture(runs: Sequence[Run], theme: str) -> str:
    """Draw accuracy over steps on the left and over minutes on the right: thin lines of runs, thick ones of means."""
    text, grid, colors = THEMES[theme]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{text}">'
    ]
    for left, column, unit, name in ((0, 0, 1, "steps"), (WIDTH, 1, 60, "minutes")):
        most = max(point[column] for run in runs for point in run["curve"]) / unit

        def at(x: float, y: float, left: int = left, most: float = most) -> str:
            across = left + MARGIN + x / most * (WIDTH - 1.5 * MARGIN)
            return f"{across:.1f},{HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN):.1f}"

        for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            (x, y), end = at(0, share).split(","), at(most, share).split(",")[0]
            parts.append(f'<path d="M{x},{y}H{end}" stroke="{grid}"/>')
            parts.append(f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{share:.0%}</text>')
        for tick in range(0, int(most) + 1, 5):
            x, y = at(tick, 0).split(",")
            parts.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="{left + WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{name}</text>')

        for side, color in zip(SIDES, colors, strict=True):
            curves = [run["curve"] for run in runs if run["side"] == side]
            means = [
                [statistics.fmean(column) for column in zip(*points, strict=True)]
                for points in zip(*curves, strict=True)
            ]
            for points, style in ((each, 'opacity="0.35"') for each in curves):
                line = " ".join(at(each[column] / unit, each[2]) for each in points)
                parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" {style}/>')
            line = " ".join(at(each[column] / unit, each[2]) for each in means)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="3"/>')
    for number, (side, color) in enumerate(zip(SIDES, colors, strict=True)):
        parts.append(f'<text x="{MARGIN + 130 * number}" y="20" fill="{color}">{NAMES[side]}</text>')
    return "\n".join([*parts, "</svg>\n"])


def judge() -> None:
    """Answer each line of answers and texts with their rewards, those of `reward=math`."""
    for line in sys.stdin:
        answers, texts = json.loads(line)
        rewards = [float(equal(answer, text)) for answer, text in zip(answers, texts, strict=True)]
        sys.stdout.write(json.dumps(rewards) + "\n")
        sys.stdout.flush()


def main() -> None:
    if sys.argv[1:] == ["--judge"]:
        judge()
        return
    options = Options(__doc__)
    options.add_argument("--peer", help="Python interpreter of an environment with TRL")
    options.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE")
    options.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="N")
    options.add_argument("--steps", type=int, default=composed("experiment=cpu1_smollm2").steps)
    options.add_argument("--picture", type=Path, metavar="FOLDER")
    given, _ = options.parse()
    runs: dict[str, Run] = json.loads(given.out.read_text())["runs"] if given.out and given.out.exists() else {}
    if given.picture:
        for theme in THEMES:
            (given.picture / f"to_accuracy{theme}.svg").write_text(picture(list(runs.values()), theme))
        return

    for seed in given.seeds:
        for side in given.only:
            name = f"{side} seed {seed}"
            if name in runs and runs[name]["steps"] == given.steps and not busy([runs[name]["before"]]):
                continue
            before = conditions()
            with tempfile.TemporaryDirectory() as folder:
                measured = (
                    trl(given.peer, seed, given.steps, Path(folder))
                    if side == "trl"
                    else ours(side, seed, given.steps, Path(folder))
                )
            runs[name] = {"side": side, "seed": seed, "steps": given.steps, **measured, "before": before}
            print(name, runs[name]["curve"], file=sys.stderr)  # progress: a run takes a quarter of an hour
            if given.out:
                given.out.write_text(json.dumps(summary(runs), indent=1) + "\n")
    print(json.dumps(summary(runs)))


if __name__ == "__main__":
    main()
