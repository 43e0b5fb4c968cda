"""`mode=export`: write a checkpoint of a run as a Hugging Face directory."""

from pathlib import Path

from app.checkpoint.export import export_run
from app.config import RunConfig
from app.errors import say
from app.mode import ModeResult


def run(config: RunConfig, folder: Path) -> ModeResult:
    """Export the run in `folder`, or the checkpoint of `resume=`, and print where to."""
    say(str(export_run(config, folder)))
    return ModeResult()
