"""Settings of `checkpoint`."""

from dataclasses import dataclass

from app.config.setting import SECONDS, setting


@dataclass
class CheckpointConfig:
    """Checkpoints of the last, the best and earlier steps, and the exported model."""

    every: int = setting(0, "Steps between checkpoints; 0 saves only the last step and the best one.", at_least=0)
    keep: int = setting(2, "Newest checkpoints kept, beside one being written; 0 writes no checkpoint.", at_least=0)
    keep_best: bool = setting(True, "Also save and keep the checkpoint with the highest eval/accuracy.")
    grace_s: float = setting(
        25.0, "Time for a last checkpoint after a signal or a failure, beside two microbatches.", above=0, noun=SECONDS
    )
    export: bool = setting(True, "At the end of the run, also write the model as a Hugging Face directory, export/.")
