"""What a run writes to the screen and to its driver's log."""

import io
import logging
import logging.config
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from app.config import RunConfig
from app.start.output_folder import driver_log
from app.tracking.console import RunConsole
from tests.folders import ROOT
from tests.tracking.records import metrics


def test_a_step_is_one_plain_line_without_a_terminal() -> None:
    stream = io.StringIO()
    RunConsole(RunConfig(steps=60), Path("out/run"), stream).step(3, metrics(3))
    line = stream.getvalue().splitlines()[-1]
    expected = "step 3/60 reward 0.300 accuracy 30.0% 1.23k tok/s 1.00 s generate 0.60 s train 0.30 s sync 0.05 s"
    assert " ".join(line.split()) == expected


def test_an_accuracy_has_its_standard_error_beside_it() -> None:
    stream = io.StringIO()
    console = RunConsole(RunConfig(steps=60), Path("out/run"), stream)
    for step, accuracy in ((0, 0.7), (60, 0.9)):
        console.log_eval(step, {"eval": {"accuracy": accuracy, "accuracy_stderr": 0.15}})
    line = " ".join(stream.getvalue().splitlines()[-1].split())
    assert line == "eval 60/60 accuracy 90.0% ± 15.0% +20.0 points since the first"


READER_GOES = """
from pathlib import Path
from app.config import RunConfig
from app.tracking.console import RunConsole

console = RunConsole(RunConfig(), Path("run"))
for step in range(1, 5000):
    console.step(step, {"time/step": 1.0})
Path("finished").touch()
"""


def test_a_run_goes_on_when_the_reader_of_its_output_ends(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(READER_GOES)
    command = f"{shlex.quote(sys.executable)} run.py | head -n 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "finished").exists()


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Path]:
    """The driver log of a run, with logging as Hydra configures it; the setup is undone afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logging.config.dictConfig(yaml.safe_load((ROOT / "conf/hydra/job_logging/rich.yaml").read_text()))
    with driver_log(tmp_path):
        yield tmp_path / "logs/driver.log"
    root.handlers, root.level = handlers, level


def test_warnings_go_to_stderr_and_the_file_and_other_records_to_the_file_only(
    configured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("app.some.part")
    log.info("quiet")
    log.warning("watch %s", "out")
    log.error("broken")
    assert capsys.readouterr().err == "warning: watch out\nerror: broken\n"
    assert [line.split(" ", 2)[2] for line in configured.read_text().splitlines()] == [
        "INFO app.some.part: quiet",
        "WARNING app.some.part: watch out",
        "ERROR app.some.part: broken",
    ]
