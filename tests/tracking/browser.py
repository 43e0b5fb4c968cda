"""A report in a headless Chromium; `python -m tests.tracking.browser <run>/report.html docs` makes its pictures."""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --window-size=1200,815 "
    "--virtual-time-budget=20000"
)
# A copy of the page gets this script. It opens what is closed, waits for every chart, and notes what it sees.
PROBE = """
<script>
document.querySelectorAll("details").forEach((each) => { each.open = true; });
const waiting = setInterval(() => {
  if (figures.some((figure) => !figure.plot)) return;
  clearInterval(waiting);

  const charts = figures.map((figure) => {
    const canvas = figure.node.querySelector("canvas"), colors = new Set();
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4)
      if (data[i + 3] === 255) colors.add(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`);

    const measured = figure.plot.data.slice(1).map((values) => values.filter((v) => v !== null && v !== undefined));
    return {
      title: figure.title, metrics: figure.chart.metrics, width: canvas.clientWidth,
      points: measured.map((values) => values.length),
      drawn: figure.plot.series.slice(1).some((series, i) => colors.has(series.stroke(figure.plot, i + 1))),
    };
  });
  const seen = {
    charts,
    cards: document.querySelectorAll(".sample").length,
    where: document.getElementById("sample-where").textContent,
    overflow: document.documentElement.scrollWidth > innerWidth,
    page: getComputedStyle(document.body).backgroundColor,
  };
  document.body.prepend(Object.assign(document.createElement("pre"), { id: "probe", innerText: JSON.stringify(seen) }));
}, 100);
</script>
"""


@dataclass(frozen=True)
class Visit:
    """What a page was in the browser."""

    seen: dict[str, Any]  # of `PROBE`
    console: list[str]  # every line that the page wrote to the console, errors of its scripts included


def visit(page: Path, folder: Path, *, dark: bool) -> Visit:
    """Open a copy of the page in a new profile, both in `folder`."""
    copy = folder / "probed.html"
    copy.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    done = _chromium(str(copy), folder, "--dump-dom", dark=dark)
    found = done.stdout.partition('<pre id="probe">')[2].partition("</pre>")[0]
    return Visit(
        json.loads(unescape(found)) if found else {}, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    )


def picture(page: Path, out: Path, folder: Path, *, dark: bool) -> None:
    """Save a picture of the top of the page."""
    _chromium(str(page.absolute()), folder, f"--screenshot={out}", dark=dark)


def _chromium(page: str, folder: Path, do: str, *, dark: bool) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [CHROMIUM, *FLAGS.split(), scheme, profile, do, f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


if __name__ == "__main__":
    for name, dark in (("report.png", False), ("report_dark.png", True)):
        with tempfile.TemporaryDirectory() as folder:
            picture(Path(sys.argv[1]), Path(sys.argv[2]).absolute() / name, Path(folder), dark=dark)
