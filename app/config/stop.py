"""Settings of `stop`."""

from dataclasses import dataclass

from app.config.setting import setting


@dataclass
class StopConfig:
    """Early stop, by the accuracy of evaluations during training."""

    at_accuracy: float | None = setting(
        None, "End the run when an evaluation reaches this accuracy; null does not.", above=0, at_most=1
    )
    patience: int | None = setting(
        None, "End the run after this many evaluations in a row without a new best accuracy; null does not.", at_least=1
    )

    @property
    def given(self) -> dict[str, float]:
        values = {"stop.at_accuracy": self.at_accuracy, "stop.patience": self.patience}
        return {key: value for key, value in values.items() if value is not None}
