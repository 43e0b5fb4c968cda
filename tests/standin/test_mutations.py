"""The stand-in device finds mistakes that a CPU cannot: each is made in a copy of the application."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 180  # after which ranks hang
COMPILING_SECONDS = 600
SCENARIOS = ["qwen3 float32", "qwen3 like cuda", "qwen3 alone"]
MISTAKES = {  # file, what it has, what it gets
    "old log-probabilities stay on the device": ("app/trainer/step.py", "logprobs.cpu().split(", "logprobs.split("),
    "a tensor of the batch on the host": (
        "app/trainer/microbatch.py",
        "weight_mask=tensor([sample.weight for sample in samples], torch.float32)",
        "weight_mask=torch.tensor([sample.weight for sample in samples])",
    ),
    "the layout of buckets on the host": (
        "app/model/packing.py",
        "position=to_device(position, device)",
        "position=position",
    ),
    "the counts of a delta on the host": (
        "app/weight_sync/delta.py",
        "local = torch.tensor(own, dtype=torch.int64, device=self._device)",
        "local = torch.tensor(own, dtype=torch.int64)",
    ),
    "numpy on the device's shard": (
        "app/weight_sync/snapshot.py",
        'replace = _replace_on_cpu if self.device.type == "cpu" else _replace',
        "replace = _replace_on_cpu",
    ),
    "an offload that does not wait for its copies": (
        "app/offload/trainer.py",
        "copy.copy_from_device()\n        self._synchronize()\n",
        "copy.copy_from_device()\n",
    ),
    "a capture that does not wait for its copies": ("app/trainer/host_state.py", "event.synchronize()", "pass"),
    "no set_device": (
        "app/trainer/rank.py",
        "self.accelerator.set_device(self.torch_device)",
        "pass",
    ),
    "float64 on the device": (
        "app/trainer/optimizer.py",
        ".cpu().double().square().sum()",
        ".double().square().sum().cpu()",
    ),
    "no backend for host tensors": (
        "app/trainer/rank.py",
        'backend = f"cpu:gloo,{self.device.torch_type}:{backend}"',
        "pass",
    ),
    "an abort that frees nothing first": ("app/trainer/rank.py", "self.profiler.abort()\n        gc.collect()", "pass"),
    "metrics read in every microbatch": (
        "app/trainer/reductions.py",
        "self._values.append(loss_sums.stack())",
        "self._values.append(loss_sums.stack().cpu())",
    ),
}


def played(folder: Path, seconds: float = SECONDS) -> Any:
    """The results of the scenarios with the application in this folder; a string if it fails or hangs."""
    out = folder / "results.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(folder / "tests" / "standin")])}
    command = [sys.executable, "-m", "tests.standin.stages", str(out), *SCENARIOS]
    # A process group of its own, so that ranks that hang end with it.
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    ) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "hangs"
    return json.loads(out.read_text()) if process.returncode == 0 else f"exit code {process.returncode}"


def copied(folder: Path) -> Path:
    for part in ("app", "tests", "conf"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("the stand-in device is compiled by g++, which is not installed")
    results = played(copied(tmp_path_factory.mktemp("correct")), COMPILING_SECONDS)
    assert set(results) == set(SCENARIOS)
    assert "failed" not in json.dumps(results)
    return results


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_mistake_the_results_are_the_same(correct: Any, tmp_path: Path) -> None:
    assert played(copied(tmp_path)) == correct


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_changes_the_results(name: str, correct: Any, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    file, old, new = MISTAKES[name]
    source = (folder / file).read_text()
    assert source.count(old) == 1
    (folder / file).write_text(source.replace(old, new))
    assert played(folder) != correct
