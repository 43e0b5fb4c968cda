"""Settings of `eval`."""

from dataclasses import dataclass

from app.errors import expect


@dataclass
class EvalConfig:
    every: int = 0  # steps; 0: only before (if set) and after
    before_train: bool = True
    samples: int = 1  # completions per prompt
    temperature: float = 0.0  # greedy
    top_p: float = 1.0


def validate(config: EvalConfig) -> None:
    expect(config.every >= 0, "eval.every", config.every, "a whole number of at least 0")
    expect(config.samples >= 1, "eval.samples", config.samples, "a whole number of at least 1")
    expect(config.temperature >= 0, "eval.temperature", config.temperature, "a number of at least 0")
    expect(0 < config.top_p <= 1, "eval.top_p", config.top_p, "a number above 0 and up to 1")
    expect(
        config.samples == 1 or config.temperature > 0,
        "eval.samples",
        config.samples,
        "1 with eval.temperature=0, since greedy samples are all the same",
    )
