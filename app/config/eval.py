"""Settings of `eval`."""

from dataclasses import dataclass

from app.config.setting import setting
from app.errors import expect


@dataclass
class EvalConfig:
    """Evaluation during training and in `mode=eval`."""

    every: int = setting(0, "Steps between evaluations; 0 evaluates only after the last one.", at_least=0)
    before_train: bool = setting(True, "Evaluate the initial policy before the first step.")
    samples: int = setting(1, "Completions per prompt.", at_least=1)
    temperature: float = setting(0.0, "Sampling temperature of evaluations; 0 is greedy.", at_least=0)
    top_p: float = setting(1.0, "Nucleus sampling threshold of evaluations.", above=0, at_most=1)
    top_k: int | None = setting(None, "Sample from this many of the likeliest tokens; null is all.", at_least=1)

    def validate(self) -> None:
        accepted = "1 with eval.temperature=0, since greedy samples are all the same"
        expect(self.samples == 1 or self.temperature > 0, "eval.samples", self.samples, accepted)
