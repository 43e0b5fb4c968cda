"""Pictures of a report in a headless Chromium: `python -m tests.tracking.browser <run>/report.html docs`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --window-size=1200,815 "
    "--virtual-time-budget=20000"
)


def picture(page: Path, out: Path, folder: Path, *, dark: bool) -> None:
    """Save a picture of the top of the page."""
    assert CHROMIUM is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    options = [*FLAGS.split(), scheme, f"--user-data-dir={folder / 'profile'}", f"--screenshot={out}"]
    command = [CHROMIUM, *options, f"file://{page.absolute()}"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)


if __name__ == "__main__":
    for name, dark in (("report.png", False), ("report_dark.png", True)):
        with tempfile.TemporaryDirectory() as folder:
            picture(Path(sys.argv[1]), Path(sys.argv[2]).absolute() / name, Path(folder), dark=dark)
