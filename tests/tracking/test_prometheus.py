"""`tracking=prometheus`, scraped over HTTP and read by the parser of `prometheus_client`."""

import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.tracking.dashboards import DashboardOptions, DashboardWorker, close_all
from tests.waiting import until


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels == {"run": "model/run 1"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_every_metric_is_a_gauge_of_the_run_until_the_run_ends(tmp_path: Path) -> None:
    warned = list[str]()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config, metrics = {"tracking": {"port": port}}, tmp_path / "metrics.jsonl"
    options = DashboardOptions(config, tmp_path, metrics, "p", "model/run 1", False, None, warned.append)
    worker = DashboardWorker("prometheus", options)
    worker.log(3, {"lr": 0.5, "reward/mean": 0.25, "time/step": 2.0, "reward/pass@4": 1.0, "loss": float("nan")})
    worker.log(4, {"reward/mean": 0.75})
    worker.alert(4, "stalled", "no tokens")
    expected = {
        "posttrain_step": 4.0,
        "posttrain_train_lr": 0.5,
        "posttrain_reward_mean": 0.75,
        "posttrain_time_step_seconds": 2.0,
        "posttrain_reward_pass_4": 1.0,
        "posttrain_alarms_stalled": 1.0,
    }

    def served() -> bool:
        try:
            return scraped(port) == expected
        except urllib.error.URLError:
            return False

    until(served, 30)
    close_all([worker], "finished", 30.0)
    assert warned == []
    with pytest.raises(urllib.error.URLError):
        scraped(port)
