"""Settings of `model=`."""

from dataclasses import dataclass, field
from enum import Enum

from app.errors import expect


class Family(Enum):
    qwen3 = "qwen3"
    qwen35 = "qwen35"  # every second layer has linear attention, the others full attention


@dataclass
class TinyConfig:
    """The tiny model that is made on first use; read only where `model.path` is null."""

    family: Family = Family.qwen3
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    cache: str | None = None  # folder; null: the user's cache folder
    accuracy_low: float = 0.20  # warm-up ends when the held-out greedy accuracy is within these
    accuracy_high: float = 0.45


@dataclass
class ModelConfig:
    name: str = "tiny"
    path: str | None = None  # a Hugging Face directory or hub id; null makes the tiny model
    trust_remote_code: bool = False
    tiny: TinyConfig = field(default_factory=TinyConfig)


def validate(config: ModelConfig) -> None:
    tiny = config.tiny
    expect(
        0 < tiny.accuracy_low < tiny.accuracy_high < 1,
        "model.tiny.accuracy_low",
        tiny.accuracy_low,
        f"a number between 0 and model.tiny.accuracy_high={tiny.accuracy_high}",
    )
    expect(tiny.heads >= 2 and tiny.heads % 2 == 0, "model.tiny.heads", tiny.heads, "an even number of at least 2")
    expect(
        tiny.hidden % tiny.heads == 0, "model.tiny.hidden", tiny.hidden, f"a multiple of model.tiny.heads={tiny.heads}"
    )
    expect(tiny.layers >= 1, "model.tiny.layers", tiny.layers, "a whole number of at least 1")
