"""The console of a run: a header, one line per step and evaluation, and a progress bar at the bottom.

Terminals get colors and the bar (rich); files, pipes and CI get the same lines as plain text, notebooks in color.
Warnings are log records, which `app.start.output_folder` prints.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TextIO

from rich import progress
from rich.console import Console
from rich.text import Text

from app.config import Mode, RunConfig
from app.config.checkpoint import CheckpointConfig
from app.tracking.number_format import aligned, count, duration, evaluation_rows, plural, seconds

SHOWN = (  # name, metric, format
    ("reward", "reward/mean", "{:6.3f}"),
    ("accuracy", "reward/accuracy", "{:6.1%}"),
    ("cross-entropy", "loss/ce", "{:6.3f}"),
)
PHASES = (("generate", "cyan"), ("train", "magenta"), ("sync", "yellow"))
MEDIAN_STEPS = 20
ESTIMATE_STEPS = 10
ESTIMATE_S = 120.0


class Terminal(Console):
    """A console whose reader may go (`| head`): the run goes on, and its records are in its folder."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunConsole:
    """Prints a run to `stream` (default: stdout). Not thread-safe."""

    def __init__(self, config: RunConfig, folder: Path, stream: TextIO | None = None) -> None:
        self._config = config
        self._folder = folder
        stream = stream or sys.stdout
        self._console = Terminal(file=stream, highlight=False, soft_wrap=True)
        # FORCE_COLOR, which notebooks set, makes rich see a terminal. Colors are fine there, a bar that moves is not.
        self._terminal = self._console.is_terminal and stream.isatty()
        self._started = time.monotonic()
        self._first_accuracy: float | None = None
        self._progress: progress.Progress | None = None
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._unannounced_s = 0.0  # of steps since the last line with an estimate
        self._header()

    def status(self, text: str) -> None:
        """Show the current activity between steps ("starting Ray"), with the time since the start of the run."""
        if self._progress is not None:
            self._progress.update(self._task, status=text)
        elif not self._terminal or self._config.mode is Mode.eval:
            elapsed = duration(time.monotonic() - self._started)
            self._console.print(Text(f"{elapsed:>12}  {text}", "dim"))

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def resume(self, step: int, first_accuracy: float | None = None) -> None:
        """Continue after `step`; `first_accuracy` is from the run's first evaluation, if there was one."""
        self._first_accuracy = first_accuracy
        self._console.print(Text(f"resumed after step {step}", "bold"))
        if self._progress is not None:
            self._progress.reset(self._task, completed=step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        line = step_line(step, self._config.steps, metrics).append(self._time_left(step, metrics), "dim")
        if self._terminal:
            line.truncate(self._console.width, overflow="ellipsis")
        self._console.print(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, status="")

    def _time_left(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return an estimate for every tenth plain line, or every two minutes of steps; else, or at the end, nothing.

        It is the median of the last steps times the steps that are left. Evaluations and checkpoints come on top.
        """
        self._step_seconds.append(metrics.get("time/step", 0.0))
        self._unannounced_s += self._step_seconds[-1]
        left = self._config.steps - step
        due = step % ESTIMATE_STEPS == 0 or self._unannounced_s >= ESTIMATE_S
        if self._terminal or not due or left <= 0:
            return ""

        self._unannounced_s = 0.0
        return f"   about {duration(left * median(self._step_seconds))} left"

    def log_eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Print an evaluation.

        In training: the accuracy of each set and, of a single set, the change since the first evaluation.
        In `mode=eval`: a table of the sets.
        """
        if self._config.mode is Mode.eval:
            for row in aligned(evaluation_rows(results)):
                self._console.print(Text(row))
            return

        line = Text(f" eval {step:>{len(str(self._config.steps))}}/{self._config.steps}", "bold green")
        for name, metrics in results.items():
            accuracy = metrics["accuracy"]
            label = "accuracy" if len(results) == 1 else name
            line.append(f"   {label} ", "dim").append(f"{accuracy:6.1%}", "bold")
            if error := metrics.get("accuracy_stderr"):
                line.append(f" ± {error:.1%}", "dim")

        if len(results) == 1:
            if self._first_accuracy is None:
                self._first_accuracy = accuracy
            else:
                line.append(f"   {100 * (accuracy - self._first_accuracy):+.1f} points since the first", "dim")

        self._console.print(line)

    def end(self, status: str, totals: Mapping[str, float], files: Mapping[str, Path | str]) -> None:
        """Remove the progress bar; print the status, the totals, the files and what to do with them. Not the error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

        self._console.print(end_line(status, totals, evaluation=self._config.mode is Mode.eval))
        for name, path in files.items():
            self._console.print(Text(f"  {name:<9}", "dim").append(str(path), ""))

    def _header(self) -> None:
        config = self._config
        how = "evaluation" if config.mode is Mode.eval else f"{config.trained_by} · {config.placement.kind.value}"
        self._console.print(
            Text("\n").append(config.model.name, "bold cyan").append(f" · {how} · {config.device.kind.value}")
        )
        lines = [work_of(config), str(self._folder)]
        if config.mode is Mode.train and (formula := config.reward.formula):
            measured = "" if config.algorithm.reward_coefficient else ", measured only"
            lines.append(f"reward: {formula}{measured}")
        if config.mode.trains:
            lines.append(kept_of(config.checkpoint))
        self._console.print(Text("\n".join([*lines, ""]), "dim"))

        if self._terminal and config.mode is not Mode.eval:
            self._progress = progress.Progress(
                progress.SpinnerColumn(),
                progress.BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[status]}", style="dim", markup=False),
                console=self._console,
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("run", total=config.steps, status="starting")
            self._progress.start()


def work_of(config: RunConfig) -> str:
    """Return what the run does, and with how many workers, in one line."""
    engines = plural(config.engines, "engine")
    if config.mode is Mode.eval:
        sampling = f"temperature {config.eval.temperature:g}, top_p {config.eval.top_p:g}"
        if config.eval.top_k is not None:
            sampling += f", top_k {config.eval.top_k}"
        return f"{plural(config.eval.samples, 'completion')} per prompt, {sampling} · {engines}"

    algorithm = config.algorithm
    workers = f"{plural(config.placement.trainer_ranks, 'trainer rank')}, {engines}"
    if config.mode is Mode.sft:
        return f"{config.steps} steps of {plural(algorithm.prompts_per_step, 'demonstration')} · {workers}"
    return (
        f"{config.steps} steps of {algorithm.prompts_per_step} prompts × {algorithm.group_size} completions, "
        f"{plural(algorithm.updates_per_step, 'update')} each · {workers}"
    )


def kept_of(checkpoint: CheckpointConfig) -> str:
    """Return what a run will keep, and where in its folder, in one line."""
    kept = []
    if checkpoint.keep:
        steps = "the last step"
        if checkpoint.every:
            steps = f"every {plural(checkpoint.every, 'step')} and the last, the newest {checkpoint.keep} of them"
        kept.append(f"checkpoints/ ({steps}{'; the best evaluation' if checkpoint.keep_best else ''})")
    if checkpoint.export:
        kept.append("export/ (the trained model)")
    return f"keeps {' and '.join(kept)}" if kept else "keeps no model: checkpoint.keep=0, checkpoint.export=false"


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> Text:
    """Format a step: what was measured, and the seconds of each phase.

    Example:
        step 12/60   reward 0.512   accuracy 51.2%   1.23k tok/s   1.02 s    generate 0.61 s  train 0.33 s  sync 0.05 s
    """
    line = Text(f" step {step:>{len(str(steps))}}/{steps}", "bold")
    for name, metric, form in SHOWN:
        if (value := metrics.get(metric)) is not None:
            line.append(f"   {name} ", "dim").append(form.format(value), "bold")

    if (rate := metrics.get("throughput/completion_tokens_per_second")) is not None:
        line.append(f"   {count(rate):>7}").append(" tok/s", "dim")

    if "time/step" in metrics:
        line.append(f"   {seconds(metrics['time/step']):>7}  ")
        for phase, color in PHASES:
            if f"time/{phase}" in metrics:
                line.append(f"  {phase} ", color).append(f"{seconds(metrics[f'time/{phase}']):>6}")
    return line


def end_line(status: str, totals: Mapping[str, float], *, evaluation: bool = False) -> Text:
    """Format the outcome.

    Example:
        finished: 60 steps in 1 min 42 s, eval accuracy 31.0% → 93.5% (best 95.0%) of 200 prompts, 98.3k completion …

    Of an evaluation: `finished: evaluation in 42 s, accuracy 93.5% of 200 prompts`.
    """
    text = Text("\n").append(status, {"finished": "bold green", "interrupted": "bold yellow"}.get(status, "bold red"))
    elapsed = duration(totals.get("total/seconds", 0.0))
    prompts = totals.get("eval/prompts")
    of_prompts = "" if prompts is None else f" of {plural(int(prompts), 'prompt')}"
    last = totals.get("eval/accuracy_last")
    if evaluation:
        text.append(f": evaluation in {elapsed}")
        return text if last is None else text.append(f", accuracy {last:.1%}{of_prompts}")

    text.append(f": {plural(int(totals.get('steps', 0)), 'step')} in {elapsed}")
    if last is not None:
        # There is no checkpoint of a best before training.
        untrained = " before training" if totals["eval/accuracy_best_step"] == 0 else ""
        first, best = totals["eval/accuracy_first"], totals["eval/accuracy_best"]
        several = f"{first:.1%} → {last:.1%} (best {best:.1%}{untrained})"
        shown = f"{last:.1%}{untrained}" if totals["eval/evaluations"] == 1 else several
        text.append(f", eval accuracy {shown}").append(of_prompts, "dim")

    if tokens := totals.get("total/completion_tokens"):
        text.append(f", {count(tokens)} completion tokens")
    return text
