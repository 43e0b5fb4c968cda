"""The metrics of the run at `http://<driver>:<tracking.port>/metrics`, for Prometheus to scrape.

Each is a gauge with the label `run`: `reward/mean` is `posttrain_reward_mean`, and seconds have them in their name, so
that `time/step` is `posttrain_time_step_seconds`. `posttrain_step` is the step that they are of.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from app.tracking.dashboards import DashboardOptions

PREFIX = "posttrain"
log = logging.getLogger("app.run")


class Prometheus:
    """A server of gauges, which ends with the run."""

    def __init__(self, options: DashboardOptions) -> None:
        from prometheus_client import CollectorRegistry, start_http_server  # the extra `prometheus`

        self._run = options.run_name
        self._registry = CollectorRegistry()  # of this run alone, without the metrics of the interpreter
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = start_http_server(options.config["tracking"]["port"], registry=self._registry)
        log.info("prometheus: metrics of %s at port %d, path /metrics", self._run, self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"step": float(step), **metrics}.items():
            self._gauge(name).set(value)

    def alert(self, step: int, title: str, text: str) -> None:
        self._gauge(f"alarms/{title}").inc()

    def close(self, status: str) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, metric: str) -> Any:
        """Return the gauge of a metric; metrics of the same name for Prometheus share one."""
        from prometheus_client import Gauge

        name = prometheus_name(metric)
        if name not in self._gauges:
            gauge = Gauge(name, f"{metric} of metrics.jsonl", ["run"], registry=self._registry)
            self._gauges[name] = gauge.labels(run=self._run)
        return self._gauges[name]


def prometheus_name(metric: str) -> str:
    """Return the name of a metric under Prometheus's conventions.

    >>> prometheus_name("time/step"), prometheus_name("reward/pass@4"), prometheus_name("train/lr")
    ('posttrain_time_step_seconds', 'posttrain_reward_pass_4', 'posttrain_train_lr')
    """
    name = re.sub(r"[^a-zA-Z0-9]+", "_", f"{PREFIX}_{metric}").strip("_")
    counts = metric.endswith(("_max", "_count"))
    return f"{name}_seconds" if metric.startswith("time/") and not counts else name
