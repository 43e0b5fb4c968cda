"""TensorBoard event files in `tracking/tensorboard/`. `tensorboard --logdir outputs` shows all runs."""

import json
from collections.abc import Mapping
from textwrap import indent

from app.tracking.dashboards import DashboardOptions


class TensorBoard:
    """A writer of event files. A resumed run adds a file that makes TensorBoard discard the later steps."""

    def __init__(self, options: DashboardOptions) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package `tensorboard`

        purge_step = None if options.resumed_at is None else options.resumed_at + 1
        self._writer = SummaryWriter(str(options.folder), purge_step=purge_step, flush_secs=30)
        if options.resumed_at is None:
            self._writer.add_text("configuration", indent(json.dumps(options.config, indent=2), "    "), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def alert(self, step: int, title: str, text: str) -> None:
        self._writer.add_text(f"alarms/{title}", text, step)

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()
