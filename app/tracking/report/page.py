"""`report.html`: a run, or several side by side, in one file that needs no network.

The page answers three questions first (`app.tracking.report.checks`), then shows the curves, where the time went, samples and
what ran. Text and tables are written here; charts are drawn by `page.js` from numbers inside the file, so
that they fit any width. Everything a run wrote is escaped or set as text: a completion cannot become markup.
"""

import json
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from app.tracking.number_format import count, duration, seconds
from app.tracking.report.charts import charts
from app.tracking.report.checks import checks, phase_medians, verdicts
from app.tracking.report.data import MISSING, RunData, find_runs, read_run

NAME = "report.html"
PAGE = Path(__file__).parent


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the page about these run folders to `out` and return it; several are compared. `ValueError` for none."""
    if not folders:
        raise ValueError("a report needs at least one run folder")
    runs = [read_run(folder) for folder in folders]
    names = _names(runs)
    page = Template((PAGE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(runs[0].label if len(runs) == 1 else f"{len(runs)} runs"),
        style=(PAGE / "style.css").read_text(encoding="utf-8"),
        script=(PAGE / "page.js").read_text(encoding="utf-8"),
        header=_header(runs),
        verdicts=_verdicts(runs[0]) if len(runs) == 1 else _comparison(runs, names),
        warnings=_warnings(runs, names),
        checks=_checks(runs[0]) if len(runs) == 1 else "",
        configuration=_changes(runs[0]) if len(runs) == 1 else _differences(runs, names),
        data=_embedded(runs, names),
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(page, encoding="utf-8")
    part.replace(out)
    return out


def report_below(folder: Path) -> Path:
    """The report of the run in `folder`, or of all runs below it side by side, as `folder/report.html` (`mode=report`).

    Raises `ValueError` where there is no run.
    """
    return write_report(find_runs(folder), folder / NAME)


def _embedded(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """The numbers and samples as JSON that no text in them can end."""
    content = {
        "charts": [chart.plain for chart in charts(runs)],
        "runs": [
            {
                "name": name,
                "steps": run.steps,
                "series": {key: [_short(value) for value in values] for key, values in run.series.items()},
                "phases": phase_medians(run),
                "samples": run.samples,
            }
            for run, name in zip(runs, names, strict=True)
        ],
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _header(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"<h1>{len(runs)} runs side by side</h1><p class='sub'>{escape(str(runs[0].folder.parent))}</p>"
    run = runs[0]
    status = str(run.summary.get("status", "unknown"))
    parts = [f"{run.summary.get('steps', 0)} steps", duration(run.summary.get("total/seconds", 0.0))]
    if tokens := run.summary.get("total/completion_tokens"):
        parts.append(f"{count(tokens)} completion tokens")
    title = f"<h1>{escape(run.label)} <span class='status {escape(status)}'>{escape(status)}</span></h1>"
    error = f"<p class='error'>{escape(str(run.summary['error']))}</p>" if run.summary.get("error") else ""
    return f"{title}<p class='sub'>{escape(' · '.join(parts))}<br><code>{escape(str(run.folder))}</code></p>{error}"


def _verdicts(run: RunData) -> str:
    cards = [
        f"<article class='verdict {one.tone.value}'><h2>{escape(one.question)}</h2>"
        f"<p class='word'>{escape(one.word)}</p><p>{escape(one.sentence)}</p></article>"
        for one in verdicts(run)
    ]
    return f"<section class='verdicts'>{''.join(cards)}</section>"


def _comparison(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """A row a run: how it ended and the numbers that people compare."""
    head = (
        "run",
        "status",
        "steps",
        "accuracy first",
        "last",
        "best",
        "step time",
        "tokens/s",
        "total",
        "learned?",
        "sane?",
    )
    rows = [
        [
            f"<span class='key' data-run='{index}'></span>{escape(name)}",
            escape(str(run.summary.get("status", "unknown"))),
            str(run.summary.get("steps", 0)),
            *(_percent(run.summary.get(f"eval/accuracy_{which}")) for which in ("first", "last", "best")),
            _middle(run.values("time/step"), seconds),
            _middle(run.values("throughput/completion_tokens_per_second"), count),
            duration(run.summary.get("total/seconds", 0.0)),
            *(f"<span class='dot {one.tone.value}'></span>{escape(one.word)}" for one in verdicts(run)[::2]),
        ]
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return f"<section><div class='scroll compare'>{_table(head, rows)}</div></section>"


def _checks(run: RunData) -> str:
    rows = [
        [
            f"<span class='dot {check.tone.value}'></span>{escape(check.name)}",
            escape(check.value),
            escape(check.meaning),
        ]
        for check in checks(run)
    ]
    return _table(("check", "value", "what it says"), rows) if rows else ""


def _warnings(runs: Sequence[RunData], names: Sequence[str]) -> str:
    items = []
    for run, name in zip(runs, names, strict=True):
        for warning in run.warnings:
            step = f"step {warning.get('step', 0)}"
            where = f"{step} · {escape(name)}" if len(runs) > 1 else step
            text = str(warning["text"]).removeprefix(f"{step}: ")
            items.append(f"<li><span class='step'>{where}</span> {escape(text)}</li>")
    return f"<ul class='warnings'>{''.join(items)}</ul>" if items else "<p class='none'>No warnings.</p>"


def _changes(run: RunData) -> str:
    """What was typed, and every setting that is not the schema's default."""
    typed = "".join(f"<code>{escape(item)}</code> " for item in run.overrides) or "<em>nothing: the defaults</em>"
    given = {item.lstrip("+").split("=", 1)[0] for item in run.overrides}
    rows = [
        [f"<code>{escape(key)}</code>{' <b>typed</b>' if key in given else ''}", _value(value), _value(default)]
        for key, (default, value) in run.changed.items()
    ]
    table = _table(("setting", "this run", "default"), rows) if rows else ""
    return f"<p>On the command line: {typed}</p><div class='scroll'>{table}</div>"


def _differences(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """The settings in which the runs differ."""
    keys = sorted({key for run in runs for key in run.config})
    differing = [key for key in keys if len({str(run.config.get(key, MISSING)) for run in runs}) > 1]
    rows = [
        [f"<code>{escape(key)}</code>", *(_value(run.config.get(key, MISSING)) for run in runs)] for key in differing
    ]
    if not rows:
        return "<p class='none'>The runs have the same configuration.</p>"
    return f"<div class='scroll'>{_table(('setting', *map(escape, names)), rows)}</div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are markup already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _names(runs: Sequence[RunData]) -> list[str]:
    """Short names that tell the runs apart: the folder's name, or with its parents' where that is not enough."""
    for parts in range(1, 6):
        names = ["/".join(run.folder.resolve().parts[-parts:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return names


def _value(value: Any) -> str:
    return escape("null" if value is None else str(value).lower() if isinstance(value, bool) else str(value))


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"


def _middle(values: list[float], form: Any) -> str:
    return form(sorted(values)[len(values) // 2]) if values else MISSING
