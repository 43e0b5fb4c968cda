import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

from app.config import RunConfig
from app.tracking.console import RunConsole
from tests.tracking.records import metrics


def test_a_step_is_one_plain_line_without_a_terminal() -> None:
    stream = io.StringIO()
    RunConsole(RunConfig(steps=60), Path("out/run"), stream).step(3, metrics(3))
    line = stream.getvalue().splitlines()[-1]
    expected = "step 3/60 reward 0.300 accuracy 30.0% 1.23k tok/s 1.00 s generate 0.60 s train 0.30 s sync 0.05 s"
    assert " ".join(line.split()) == expected


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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "finished").exists()
