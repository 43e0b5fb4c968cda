"""`ray job submit` onto a cluster of launch/ray_cluster.sh, for real."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.utils.net import reserve_port
from tests.launch.shell import ROOT, bash

pytest.importorskip("aiohttp_cors", reason="ray[default] brings Ray's job server")
RAY = Path(sys.executable).parent / "ray"
MARK = "POSTTRAIN_TEST_CLUSTER"


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a client of a cluster with a token. All its processes carry a mark, and are killed by it."""
    mark = secrets.token_hex(8)
    with reserve_port("127.0.0.1") as port, reserve_port("127.0.0.1") as dashboard:
        ports = {"PORT": str(port.getsockname()[1]), "DASHBOARD_PORT": str(dashboard.getsockname()[1])}
    environment = {
        "RAY_TMPDIR": str(tmp_path_factory.mktemp("r")),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "PYTHON": sys.executable,
        MARK: mark,
        **ports,
    }
    try:
        head = ["launch/ray_cluster.sh", "--dashboard", "--device", "cpu", "--devices", "4", "head"]
        started = bash(*head, **environment)
        assert started.returncode == 0, started.stderr
        yield {**os.environ, **environment, "RAY_ADDRESS": f"http://127.0.0.1:{ports['DASHBOARD_PORT']}"}
    finally:
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == mark:
                    process.kill()
            except psutil.Error:
                continue


@pytest.mark.slow
def test_a_submitted_job_trains_on_the_cluster(cluster: dict[str, str], tmp_path: Path) -> None:
    words = ["steps=2", "cluster.address=auto", f"hydra.run.dir={tmp_path / 'run'}", "checkpoint.keep=0"]
    submit = [str(RAY), "job", "submit", "--", "bash", str(ROOT / "launch" / "run.sh"), "--no-doctor", *words]
    done = subprocess.run(submit, env=cluster, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
