"""`report.html`: one run, or several side by side, in a single file that works offline.

The page answers three questions (`app.tracking.report.checks`), then shows curves, time, samples and configuration.
Text and tables are rendered here; `page.js` draws the charts with uPlot, which is in the file too, from the JSON in the
file. All text of a run is escaped, so that a completion cannot become markup.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import median_high
from string import Template

from app.errors import yaml_text
from app.tracking.number_format import MISSING, count, duration, evaluation_rows, plural, seconds, set_metrics
from app.tracking.report.charts import charts
from app.tracking.report.checks import Tone, health_checks, rule_checks, rules_check
from app.tracking.report.comparison import SEED_TITLE, Comparison, compare, run_table, seed_table
from app.tracking.report.data import RunData, curves, read_run
from app.tracking.run_folder.summary import Status
from app.utils.files import replace_file

NAME = "report.html"
ASSETS = Path(__file__).parent / "assets"
DOT = "<span class='dot {}'></span>"
DETAILS = ("step time", "tok/s", "learned", "healthy")  # of a run, beside the columns of `run_table`


def write_report(folder: Path, out: Path) -> Path:
    """Write the report of one run, and return `out`."""
    return write_page(compare([read_run(folder)]), out)


def unhealthy(folder: Path) -> dict[str, str]:
    """Return what the report has on a run's health, for the last lines on the screen; nothing if it is healthy."""
    check = rules_check(read_run(folder))
    return {"health": f"{check.answer}. {check.explanation}"} if check.tone is Tone.warning else {}


def write_page(comparison: Comparison, out: Path) -> Path:
    """Write a report about one run, or about several side by side, and return `out`. Its folder is created."""
    runs, names = comparison.runs, comparison.names
    single = runs[0] if len(runs) == 1 else None
    assets = {path.name: path.read_text(encoding="utf-8") for path in ASSETS.iterdir()}

    page = Template(assets["page.html"]).substitute(
        title=escape(single.label if single else f"{len(runs)} runs"),
        style=assets["uplot.min.css"] + assets["style.css"],
        uplot=assets["uplot.min.js"],
        script=assets["page.js"],
        header=_header(runs),
        answers=_answers(single) if single else _comparison(comparison),
        warnings=_warnings(runs, names),
        checks=_checks(single) if single else "",
        configuration=_changes(single) if single else _differences(runs, names),
        data=_embedded(runs, names),
        created=time.strftime("%Y-%m-%d %H:%M"),
    )

    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, page)
    return out


def _embedded(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Return numbers and samples as JSON. `<` is escaped, so that no text can close the script element."""
    content = {
        "charts": [asdict(chart) for chart in charts([run for run in runs if not run.is_evaluation])],
        "runs": [
            {"name": name, **curves(run.rows), "samples": run.samples} for run, name in zip(runs, names, strict=True)
        ],
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _header(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"<h1>{len(runs)} runs side by side</h1><p class='sub'>{escape(str(runs[0].folder.parent))}</p>"

    (run,) = runs
    status = str(run.summary.get("status", "unknown"))
    what = "evaluation" if run.is_evaluation else plural(run.summary.get("steps", 0), "step")
    attempts = run.summary.get("attempts", 1)
    totals = [what, duration(run.summary.get("total/seconds", 0.0)) + f" in {attempts} attempts" * (attempts > 1)]
    for kind in ("training", "evaluation"):
        if f"data/{kind}_rows" in run.summary:
            totals.append(plural(run.summary[f"data/{kind}_rows"], f"{kind} row"))
    if tokens := run.summary.get("total/completion_tokens"):
        totals.append(f"{count(tokens)} completion tokens")
    if stopped := run.summary.get("stop/reason"):
        totals.append(f"stopped early: {stopped}")

    title = f"<h1>{escape(run.label)} <span class='status {escape(status)}'>{escape(status)}</span></h1>"
    error = f"<p class='error'>{escape(str(run.summary['error']))}</p>" if run.summary.get("error") else ""
    return f"{title}<p class='sub'>{escape(' · '.join(totals))}<br><code>{escape(str(run.folder))}</code></p>{error}"


def _answers(run: RunData) -> str:
    """Return a card for each of the three questions; of an evaluation, a table of its sets."""
    if run.is_evaluation and run.summary.get("status") != Status.failed.value:
        table = _table(_escaped(evaluation_rows(set_metrics(run.rows[-1] if run.rows else {}))))
        note = "<p class='none'>± is the standard error of the mean over the prompts.</p>"
        return f"<section><h2>Accuracy</h2><div class='scroll compare'>{table}</div>{note}</section>"

    cards = [
        f"<article class='answer {check.tone.value}'><h2>{escape(check.question)}</h2>"
        f"<p class='short'>{escape(check.answer)}</p><p>{escape(check.explanation)}</p></article>"
        for check in health_checks(run)
    ]
    return f"<section class='answers'>{''.join(cards)}</section>"


def _comparison(comparison: Comparison) -> str:
    """Return the table of the runs and, if a setting ran with several seeds, the one of means over the seeds."""
    head, *rows = _escaped(run_table(comparison).text)
    marked = [
        [f"<span class='key' data-run='{index}'></span>{name}", *cells, *_details(run)]
        for index, ((name, *cells), run) in enumerate(zip(rows, comparison.runs, strict=True))
    ]
    shown = f"<div class='scroll compare'>{_table([[*head, *DETAILS], *marked])}</div>"

    if seeds := seed_table(comparison):
        title = f"<h2 class='table-title'>{SEED_TITLE.capitalize()}</h2>"
        shown += f"{title}<div class='scroll compare'>{_table(_escaped(seeds.text))}</div>"
    shown += "".join(f"<p class='none'>{note}</p>" for note in comparison.notes)
    return f"<section>{shown}</section>"


def _details(run: RunData) -> list[str]:
    speeds = (("time/step", seconds), ("throughput/completion_tokens_per_second", count))
    medians = [form(median_high(values)) if (values := run.values(name)) else MISSING for name, form in speeds]
    learned, _, healthy = health_checks(run)
    return [*medians, *(f"{DOT.format(check.tone.value)}{escape(check.answer)}" for check in (learned, healthy))]


def _checks(run: RunData) -> str:
    rows = [
        [
            DOT.format(check.tone.value) + escape(check.question),
            "yes" if check.tone is Tone.warning else "no longer" if check.over else "no",
            *map(escape, (check.answer, check.explanation)),
        ]
        for check in rule_checks(run)
    ]
    return _table([["problem", "found", "value", "meaning"], *rows]) if rows else ""


def _warnings(runs: Sequence[RunData], names: Sequence[str]) -> str:
    items = []
    for run, name in zip(runs, names, strict=True):
        for warning in run.warnings:
            step = f"step {warning.get('step', 0)}"
            label = f"{step} · {escape(name)}" if len(runs) > 1 else step
            text = str(warning["text"]).removeprefix(f"{step}: ")
            items.append(f"<li><span class='step'>{label}</span> {escape(text)}</li>")

    return f"<ul class='warnings'>{''.join(items)}</ul>" if items else "<p class='none'>No warnings.</p>"


def _changes(run: RunData) -> str:
    """Return the command line, and every setting that it or a preset changed."""
    overrides = "".join(f"<code>{escape(item)}</code> " for item in run.overrides) or "<em>none</em>"
    overridden = {item.lstrip("+").split("=", 1)[0] for item in run.overrides}
    rows = []
    for key, (default, value) in run.changed.items():
        source = "command line" if key in overridden else "preset"
        values = (escape(yaml_text(each)) for each in (value, default))
        rows.append([f"<code>{escape(key)}</code>", *values, source])

    table = _table([["setting", "this run", "without presets", "set by"], *rows]) if rows else ""
    return f"<p>Command line overrides: {overrides}</p><div class='scroll'>{table}</div>"


def _differences(runs: Sequence[RunData], names: Sequence[str]) -> str:
    rows = []
    for key in sorted({key for run in runs for key in run.config}):
        values = [run.config.get(key, MISSING) for run in runs]
        if len(set(map(str, values))) > 1:
            rows.append([f"<code>{escape(key)}</code>", *(escape(yaml_text(value)) for value in values)])

    if not rows:
        return "<p class='none'>The runs have the same configuration.</p>"
    return f"<div class='scroll'>{_table([['setting', *map(escape, names)], *rows])}</div>"


def _escaped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in row] for row in rows]


def _table(rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
