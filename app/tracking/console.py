"""The screen of a run: a header, a line a step, evaluations, and a progress bar that stays at the bottom.

On a terminal it is drawn with rich, in colour; elsewhere (a file, CI, a pipe) the same lines come plain, without the
bar. Warnings do not pass through here: they are log records, and `app.tracking.logs` puts them on the screen.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as RichTask
from rich.text import Text

from app.config import RunConfig
from app.tracking.number_format import count, duration, seconds

PHASES = (("generate", "cyan"), ("train", "magenta"), ("sync", "yellow"))
BAR_CELLS = 12


class RunConsole:
    """Draws on `stream` (stdout by default). Not thread-safe: the driver owns it."""

    def __init__(self, config: RunConfig, folder: Path, stream: TextIO | None = None) -> None:
        self._config, self._folder = config, folder
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._fancy = self._console.is_terminal
        self._first_accuracy: float | None = None
        self._progress: Progress | None = None
        self._header()

    def status(self, text: str) -> None:
        """What the run is busy with before and between steps ("starting the engine")."""
        if self._progress is not None:
            self._progress.update(self._task, status=text)
        elif not self._fancy:
            self._print(Text(f"{text} …", "dim"))

    def resume(self, step: int, first_accuracy: float | None = None) -> None:
        """The run goes on after `step`; `first_accuracy` is that of its very first evaluation, where it had one."""
        self._first_accuracy = first_accuracy
        self._print(Text(f"goes on after step {step}", "bold"))
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
            self._progress.reset(self._task, completed=step, total=self._config.steps, start=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for one step; what was not measured is left out."""
        line = step_line(step, self._config.steps, metrics, bar=self._fancy)
        if self._fancy:  # a narrow terminal shows the line's beginning rather than two lines
            line.truncate(self._console.width, overflow="ellipsis")
        self._print(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, status="")

    def log_eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """One line for an evaluation, with the change since the first one."""
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

    def end(self, status: str, totals: Mapping[str, float], error: str | None, files: Mapping[str, Path]) -> None:
        """Take the bar away and say how it ended and where its files are."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._print(end_line(status, totals))
        if error:
            self._print(Text(f"  {error}", "red"))
        for name, path in files.items():
            self._print(Text(f"  {name:<9}", "dim").append(str(path), ""))

    def _header(self) -> None:
        config = self._config
        algorithm, placement = config.algorithm, config.placement
        title = Text("\n").append(config.model.name, "bold cyan")
        for part in (algorithm.name, placement.kind.value, config.device.kind.value):
            title.append(" · ", "dim").append(part, "bold")
        ranks, engines = placement.trainer_ranks, config.engines
        self._print(title)
        self._print(
            Text(
                f"{config.steps} steps of {algorithm.prompts_per_step} prompts × {algorithm.group_size} completions, "
                f"{_plural(algorithm.updates_per_step, 'update')} each · "
                f"{_plural(ranks, 'trainer rank')}, {_plural(engines, 'engine')}",
                "dim",
            )
        )
        self._print(Text(f"{self._folder}\n", "dim"))
        if self._fancy:
            self._progress = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
                MofNCompleteColumn(),
                TextColumn("·"),
                TimeElapsedColumn(),
                _Remaining(),
                TextColumn("{task.fields[doing]}", style="dim", markup=False),
                console=self._console,
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("run", total=config.steps, status="starting")
            self._progress.start()

    def _print(self, text: Text) -> None:
        self._console.print(text)


class _Remaining(TextColumn):
    """ETA from the mean time of the steps done since the run (or its resumption) began."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: RichTask) -> Text:
        left = task.time_remaining
        return Text("" if left is None or not task.completed else f"· {duration(left)} left", "cyan")


def step_line(step: int, steps: int, metrics: Mapping[str, float], *, bar: bool) -> Text:
    """` step 12/60   reward 0.512   accuracy 51.2%   1.23k tok/s   1.02 s  ━━━━━━━  generate 0.61 s  train 0.33 s`."""
    line = Text(f" step {step:>{len(str(steps))}}/{steps}", "bold")
    if (reward := metrics.get("reward/mean")) is not None:
        line.append("   reward ", "dim").append(f"{reward:6.3f}", "bold green" if reward > 0 else "bold")
    if (accuracy := metrics.get("reward/accuracy")) is not None:
        line.append("   accuracy ", "dim").append(f"{accuracy:6.1%}")
    if (rate := metrics.get("throughput/completion_tokens_per_second")) is not None:
        line.append(f"   {count(rate):>7}").append(" tok/s", "dim")
    if (taken := metrics.get("time/step")) is not None:
        line.append(f"   {seconds(taken):>7}  ").append_text(breakdown(metrics, bar=bar))
    return line


def breakdown(metrics: Mapping[str, float], *, bar: bool) -> Text:
    """Where the time went: a bar of coloured cells where there is colour, and the seconds of each phase."""
    parts = [(name, colour, metrics[f"time/{name}"]) for name, colour in PHASES if f"time/{name}" in metrics]
    text = _cells(parts, max(sum(value for _, _, value in parts), metrics["time/step"], 1e-9)) if bar else Text()
    for name, colour, value in parts:
        text.append(f"  {name} ", colour).append(f"{seconds(value):>6}")
    return text


def _cells(parts: list[tuple[str, str, float]], whole: float) -> Text:
    """`BAR_CELLS` cells in the phases' proportions; what no phase took is grey."""
    text, edge, used = Text(), 0.0, 0
    for _, colour, value in parts:
        edge += value
        cells = round(BAR_CELLS * edge / whole) - used
        used += cells
        text.append("━" * cells, colour)
    return text.append("━" * (BAR_CELLS - used), "bright_black")


def end_line(status: str, totals: Mapping[str, float]) -> Text:
    """`finished: 60 steps in 1 min 42 s, eval accuracy 31.0% → 93.5%, 98.3k completion tokens`."""
    colour = {"finished": "bold green", "interrupted": "bold yellow"}.get(status, "bold red")
    text = Text("\n").append(status, colour)
    text.append(f": {_plural(int(totals.get('steps', 0)), 'step')} in {duration(totals.get('total/seconds', 0.0))}")
    if "eval/accuracy_last" in totals:
        text.append(f", eval accuracy {totals['eval/accuracy_first']:.1%} → {totals['eval/accuracy_last']:.1%}")
        text.append(f" (best {totals['eval/accuracy_best']:.1%})", "dim")
    if tokens := totals.get("total/completion_tokens"):
        text.append(f", {count(tokens)} completion tokens")
    return text


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
