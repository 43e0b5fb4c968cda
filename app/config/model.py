"""Settings of `model=`."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from app.config.setting import setting
from app.errors import expect

HF_PRESET = "hf"  # the preset for any model, and its name while there is no path
TINY_PRESETS = ("tiny", "tiny_qwen35", "tiny_tools", "tiny_lora")  # names of the presets with a toy's sizes


class Family(Enum):
    """Architecture of the tiny model."""

    qwen3 = "qwen3"
    qwen35 = "qwen35"


class Skill(Enum):
    """What the tiny model can do after its warm-up."""

    sums = "sums"
    tools = "tools"


@dataclass
class TinyConfig:
    """The tiny model, created on first use where `model.path` is null."""

    family: Family = setting(
        Family.qwen3, "Architecture; in qwen35 layers with linear attention and with full attention alternate."
    )
    skill: Skill = setting(
        Skill.sums, "What the warm-up teaches: to add, or to ask a calculator (environment=calculator) now and then."
    )
    hidden: int = setting(64, "Hidden size; must be a multiple of model.tiny.heads.", at_least=1)
    layers: int = setting(2, "Number of layers.", at_least=1)
    heads: int = setting(4, "Number of attention heads; must be even.", at_least=2)
    cache: str | None = setting(None, "Folder for created models; null is the user's cache folder.")
    accuracy_low: float = setting(
        0.20, "Lower end of the held-out greedy accuracy at which the warm-up of sums stops.", above=0, below=1
    )
    accuracy_high: float = setting(
        0.45, "Upper end of the held-out greedy accuracy at which the warm-up of sums stops.", above=0, below=1
    )


ALL_LINEAR = "all"  # as a target of LoRA


@dataclass
class LoraConfig:
    """Low-rank adapters, trained in place of the model's own weights and served by the engines beside them."""

    rank: int = setting(0, "Rank of the adapters; 0 trains all weights of the model.", at_least=0, at_most=512)
    alpha: float = setting(32.0, "An adapter adds alpha / rank times the product of its two matrices.", above=0)
    targets: list[str] = setting(
        [ALL_LINEAR],
        "Names of the linear layers that get an adapter, such as q_proj; all is every one of the decoder's, except the "
        "decays of linear attention.",
    )

    @property
    def enabled(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank

    def validate(self) -> None:
        """Raise `ConfigError` for targets that name nothing."""
        alone = ALL_LINEAR not in self.targets or len(self.targets) == 1
        expect(bool(self.targets) and alone, "model.lora.targets", self.targets, "[all], or names of linear layers")


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = setting(
        "custom",
        "Name of the preset, or with model=hf of the model, shown in the console, the plan and the report.",
    )
    path: str | None = setting(
        None,
        "Hugging Face model directory or hub id; null creates the tiny model, whose presets accept exports of their "
        "own runs only: any other model takes model=hf.",
        noun="a Hugging Face model directory or hub id",
    )
    revision: str | None = setting(None, "Commit, tag or branch of a hub model; null is its default branch.")
    trust_remote_code: bool = setting(False, "Run model code that ships with the checkpoint.")
    chat_template: str | None = setting(
        None,
        "File with a Jinja chat template in place of the model's own: for prompts of data.template=chat, for "
        "conversations and evaluations, and in exports.",
        noun="a file with a Jinja template",
    )
    tiny: TinyConfig = field(default_factory=TinyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def validate(self) -> None:
        """Raise `ConfigError` for a missing directory or an impossible tiny model."""
        self.lora.validate()
        tiny = self.tiny
        expect(
            tiny.accuracy_low < tiny.accuracy_high,
            "model.tiny.accuracy_low",
            tiny.accuracy_low,
            f"a number between 0 and model.tiny.accuracy_high={tiny.accuracy_high}",
        )
        expect(tiny.heads % 2 == 0, "model.tiny.heads", tiny.heads, "an even number of at least 2")
        expect(
            tiny.hidden % tiny.heads == 0,
            "model.tiny.hidden",
            tiny.hidden,
            f"a multiple of model.tiny.heads={tiny.heads}",
        )

        path = self.path
        named = path is not None or self.name != HF_PRESET
        expect(
            named, "model.path", path, "a Hugging Face model directory or a hub id: model=hf has no model of its own"
        )
        if path is not None and path.startswith((".", "/", "~")):
            is_directory = Path(path).expanduser().is_dir()
            expect(is_directory, "model.path", path, "an existing directory of the Hugging Face form, or a hub id")

        if self.chat_template is not None:
            is_file = Path(self.chat_template).expanduser().is_file()
            expect(
                is_file, "model.chat_template", self.chat_template, "an existing file with a Jinja template, or null"
            )

        on_hub = path is not None and not Path(path).expanduser().is_dir()
        expect(self.revision is None or on_hub, "model.revision", self.revision, "null, or a hub id as model.path")
