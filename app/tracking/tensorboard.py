"""TensorBoard event files under `tracking/tensorboard/`: `tensorboard --logdir outputs` shows every run."""

import json
from collections.abc import Mapping

from app.tracking.dashboard import DashboardOptions


class TensorBoard:
    """A resumed run writes a further event file, whose start tells TensorBoard to forget the later steps."""

    def __init__(self, start: DashboardOptions) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package `tensorboard`

        purge = None if start.resumed_at is None else start.resumed_at + 1
        self._writer = SummaryWriter(str(start.folder), purge_step=purge, flush_secs=30)
        if start.resumed_at is None:
            self._writer.add_text("configuration", _block(json.dumps(start.config, indent=2)), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def alert(self, step: int, title: str, text: str) -> None:
        self._writer.add_text(f"alarms/{title}", text, step)

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


def _block(text: str) -> str:
    """Markdown that keeps the text as it stands."""
    return "\n".join(f"    {line}" for line in text.splitlines())
