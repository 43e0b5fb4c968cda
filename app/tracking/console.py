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

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from app.config import Mode, RunConfig
from app.config.checkpoint import CheckpointConfig
from app.tracking.number_format import aligned, count, duration, evaluation_rows, plural, seconds

PHASES = (("generate", "cyan"), ("train", "magenta"), ("sync", "yellow"))
BAR_CELLS = 12
ELAPSED_WIDTH = 12  # of "12 min 34 s"
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
        self._progress: Progress | None = None
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._unannounced_s = 0.0  # of steps since the last line with an estimate
        self._header()

    def status(self, text: str) -> None:
        """Show the current activity between steps ("starting Ray"), with the time since the start of the run."""
        if self._progress is not None:
            self._progress.update(self._task, status=text)
        elif not self._terminal or self._config.mode is Mode.eval:
            elapsed = duration(time.monotonic() - self._started)
            self._print(Text(f"{elapsed:>{ELAPSED_WIDTH}}  {text}", "dim"))

    def note(self, text: str) -> None:
        """Print something to know about the run."""
        self._print(Text(text))

    def resume(self, step: int, first_accuracy: float | None = None) -> None:
        """Continue after `step`; `first_accuracy` is from the run's first evaluation, if there was one."""
        self._first_accuracy = first_accuracy
        self._print(Text(f"resumed after step {step}", "bold"))
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
            self._progress.reset(self._task, completed=step, total=self._config.steps, start=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of a step that were measured, in one line."""
        line = step_line(step, self._config.steps, metrics, bar=self._terminal)
        line.append(self._time_left(step, metrics.get("time/step", 0.0)), "dim")
        if self._terminal:
            line.truncate(self._console.width, overflow="ellipsis")
        self._print(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, status="")

    def _time_left(self, step: int, step_s: float) -> str:
        """Return an estimate for every tenth plain line, or every two minutes of steps; else, or at the end, nothing.

        It is the median of the last steps times the steps that are left. Evaluations and checkpoints come on top.
        """
        self._step_seconds.append(step_s)
        self._unannounced_s += step_s
        left = self._config.steps - step
        due = step % ESTIMATE_STEPS == 0 or self._unannounced_s >= ESTIMATE_S
        if self._terminal or not due or left <= 0:
            return ""

        self._unannounced_s = 0.0
        return f"   about {duration(left * median(self._step_seconds))} left"

    def log_eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Print an evaluation.

        In training: the accuracy of each set in one line and, for a single set, the change since the first evaluation.
        In `mode=eval`: a table of the sets.
        """
        if self._config.mode is Mode.eval:
            for row in aligned(evaluation_rows(results)):
                self._print(Text(row))
            return

        line = Text(f" eval {step:>{len(str(self._config.steps))}}/{self._config.steps}", "bold green")
        for name, metrics in results.items():
            accuracy = metrics.get("accuracy")
            label = "accuracy" if len(results) == 1 else name
            if accuracy is not None:
                line.append(f"   {label} ", "dim").append(f"{accuracy:6.1%}", "bold")

        if len(results) == 1 and accuracy is not None:
            if self._first_accuracy is None:
                self._first_accuracy = accuracy
            else:
                line.append(f"   {100 * (accuracy - self._first_accuracy):+.1f} points since the first", "dim")

        self._print(line)

    def end(self, status: str, totals: Mapping[str, float], files: Mapping[str, Path | str]) -> None:
        """Remove the progress bar; print the status, the totals, the files and what to do with them. Not the error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

        self._print(end_line(status, totals, evaluation=self._config.mode is Mode.eval))
        for name, path in files.items():
            self._print(Text(f"  {name:<9}", "dim").append(str(path), ""))

    def _header(self) -> None:
        config = self._config
        title = Text("\n").append(config.model.name, "bold cyan")
        choices = [config.trained_by, config.placement.kind.value, config.device.kind.value]
        if config.mode is Mode.eval:
            choices = ["evaluation", config.device.kind.value]
        for choice in choices:
            title.append(" · ", "dim").append(choice, "bold")
        self._print(title)
        self._print(Text(work_of(config), "dim"))
        self._print(Text(str(self._folder), "dim"))
        if config.mode is Mode.train and (formula := config.reward.formula):
            measured = "" if config.algorithm.reward_coefficient else ", measured only"
            self._print(Text(f"reward: {formula}{measured}", "dim"))
        if config.mode.trains:
            self._print(Text(kept_of(config.checkpoint), "dim"))
        self._print(Text())

        if self._terminal and config.mode is not Mode.eval:
            self._progress = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
                MofNCompleteColumn(),
                TextColumn("·"),
                TimeElapsedColumn(),
                TextColumn("·"),
                TimeRemainingColumn(),
                TextColumn("left"),
                TextColumn("{task.fields[status]}", style="dim", markup=False),
                console=self._console,
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("run", total=config.steps, status="starting")
            self._progress.start()

    def _print(self, text: Text) -> None:
        self._console.print(text)


def work_of(config: RunConfig) -> str:
    """Return what the run does, and with how many workers, in one line."""
    engines = plural(config.engines, "engine")
    if config.mode is Mode.eval:
        sampling = f"temperature {config.eval.temperature:g}, top_p {config.eval.top_p:g}"
        if config.eval.top_k is not None:
            sampling += f", top_k {config.eval.top_k}"
        return f"{plural(config.eval.samples, 'completion')} per prompt, {sampling} · {engines}"

    algorithm = config.algorithm
    ranks = plural(config.placement.trainer_ranks, "trainer rank")
    if config.mode is Mode.sft:
        rows = f"{config.steps} steps of {plural(algorithm.prompts_per_step, 'demonstration')}"
        return f"{rows} · {ranks}, {engines}"
    steps = (
        f"{config.steps} steps of {algorithm.prompts_per_step} prompts × {algorithm.group_size} completions, "
        f"{plural(algorithm.updates_per_step, 'update')} each"
    )
    return f"{steps} · {ranks}, {engines}"


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
    if not kept:
        return "keeps no model: checkpoint.keep=0, checkpoint.export=false"
    return f"keeps {' and '.join(kept)}"


def step_line(step: int, steps: int, metrics: Mapping[str, float], *, bar: bool) -> Text:
    """Format a step.

    Example:
        step 12/60   reward 0.512   accuracy 51.2%   1.23k tok/s   1.02 s  ━━━━━━━  generate 0.61 s  train 0.33 s
    """
    line = Text(f" step {step:>{len(str(steps))}}/{steps}", "bold")

    reward = metrics.get("reward/mean")
    if reward is not None:
        line.append("   reward ", "dim").append(f"{reward:6.3f}", "bold green" if reward > 0 else "bold")

    accuracy = metrics.get("reward/accuracy")
    if accuracy is not None:
        line.append("   accuracy ", "dim").append(f"{accuracy:6.1%}")

    imitation = metrics.get("loss/ce")
    if imitation is not None:
        line.append("   cross-entropy ", "dim").append(f"{imitation:6.3f}", "bold")

    rate = metrics.get("throughput/completion_tokens_per_second")
    if rate is not None:
        line.append(f"   {count(rate):>7}").append(" tok/s", "dim")

    if "time/step" in metrics:
        line.append(f"   {seconds(metrics['time/step']):>7}  ").append_text(breakdown(metrics, bar=bar))
    return line


def breakdown(metrics: Mapping[str, float], *, bar: bool) -> Text:
    """Format the seconds of each phase, after a bar of colored cells if `bar`."""
    phases = [(name, color, metrics[f"time/{name}"]) for name, color in PHASES if f"time/{name}" in metrics]
    total = max(sum(value for _, _, value in phases), metrics["time/step"], 1e-9)

    text = _cells(phases, total) if bar else Text()
    for name, color, value in phases:
        text.append(f"  {name} ", color).append(f"{seconds(value):>6}")
    return text


def _cells(phases: list[tuple[str, str, float]], total: float) -> Text:
    """Divide `BAR_CELLS` cells in proportion to the phases; time outside of the phases is gray."""
    text = Text()
    end = 0.0
    used = 0
    for _, color, value in phases:
        end += value
        cells = round(BAR_CELLS * end / total) - used
        used += cells
        text.append("━" * cells, color)
    return text.append("━" * (BAR_CELLS - used), "bright_black")


def end_line(status: str, totals: Mapping[str, float], *, evaluation: bool = False) -> Text:
    """Format the outcome.

    Example:
        finished: 60 steps in 1 min 42 s, eval accuracy 31.0% → 93.5% (best 95.0%) of 200 prompts, 98.3k completion …

    Of an evaluation: `finished: evaluation in 42 s, accuracy 93.5% of 200 prompts`.
    """
    color = {"finished": "bold green", "interrupted": "bold yellow"}.get(status, "bold red")
    text = Text("\n").append(status, color)
    if evaluation:
        text.append(f": evaluation in {duration(totals.get('total/seconds', 0.0))}")
        last = totals.get("eval/accuracy_last")
        return text if last is None else text.append(f", accuracy {last:.1%}{_of_prompts(totals)}")

    text.append(f": {plural(int(totals.get('steps', 0)), 'step')} in {duration(totals.get('total/seconds', 0.0))}")

    if "eval/accuracy_last" in totals:
        text.append(f", eval accuracy {_accuracies(totals)}").append(_of_prompts(totals), "dim")

    tokens = totals.get("total/completion_tokens")
    if tokens:
        text.append(f", {count(tokens)} completion tokens")
    return text


def _accuracies(totals: Mapping[str, float]) -> str:
    """Return "31.0% → 93.5% (best 95.0%)", or one number. There is no checkpoint of a best before training."""
    last = f"{totals['eval/accuracy_last']:.1%}"
    untrained = " before training" if totals["eval/accuracy_best_step"] == 0 else ""
    if totals["eval/evaluations"] == 1:
        return last + untrained
    return f"{totals['eval/accuracy_first']:.1%} → {last} (best {totals['eval/accuracy_best']:.1%}{untrained})"


def _of_prompts(totals: Mapping[str, float]) -> str:
    prompts = totals.get("eval/prompts")
    return "" if prompts is None else f" of {plural(int(prompts), 'prompt')}"
