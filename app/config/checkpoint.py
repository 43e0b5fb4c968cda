"""Settings of `checkpoint`."""

from dataclasses import dataclass

from app.config.setting import SECONDS, setting


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = setting(0, "Steps between checkpoints; 0 writes none.", at_least=0)
    keep: int = setting(
        2, "Newest checkpoints kept; the disk holds one more while a checkpoint is being written.", at_least=1
    )
    grace_s: float = setting(25.0, "Time for a last checkpoint after SIGINT or SIGTERM.", above=0, noun=SECONDS)
    export: bool = setting(False, "Also write a Hugging Face directory, export/, at the end of the run.")
