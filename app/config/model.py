"""Settings of `model=`."""

from dataclasses import dataclass, field
from pathlib import Path

from app.config.setting import setting
from app.errors import expect

HF_PRESET = "hf"  # the preset for any model, and its name while there is no path
TINY_MODELS = Path(__file__).parents[1] / "model" / "tiny"  # a directory per model that is part of the application
# Presets with a toy's sizes, and the models that they train.
TINY_PRESETS = {"tiny": "tiny", "tiny_qwen35": "tiny_qwen35", "tiny_tools": "tiny_tools", "tiny_lora": "tiny"}
ALL_LINEAR = "all"  # as a target of LoRA
LORA_RATE = 10  # times the learning rate of full fine-tuning


@dataclass
class LoraConfig:
    """Low-rank adapters, trained in place of the model's own weights and served by the engines beside them."""

    rank: int = setting(0, "Rank of the adapters; 0 trains all weights of the model.", at_least=0, at_most=512)
    alpha: float = setting(32.0, "An adapter adds alpha / rank times the product of its two matrices.", above=0)
    targets: list[str] = setting(
        [ALL_LINEAR],
        "Linear layers with an adapter, such as q_proj; all: of the decoder, but no decays of linear attention.",
    )
    path: str | None = setting(
        None,
        "PEFT adapter that training continues, with its rank, alpha and targets; mode=export merges it instead.",
        noun="a directory with adapter_config.json",
    )

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def validate(self) -> None:
        alone = ALL_LINEAR not in self.targets or len(self.targets) == 1
        expect(bool(self.targets) and alone, "model.lora.targets", self.targets, "[all], or names of linear layers")


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = setting("custom", "Name of the preset, or of the model with model=hf, shown in the report.")
    path: str | None = setting(
        TINY_PRESETS["tiny"],
        "Hugging Face model directory or hub id; or tiny, tiny_qwen35 or tiny_tools, the models of these presets, "
        "which also accept exports of their own runs.",
        noun="a Hugging Face model directory or hub id",
    )
    revision: str | None = setting(None, "Commit, tag or branch of a hub model; null is its default branch.")
    trust_remote_code: bool = setting(False, "Run model code that ships with the checkpoint.")
    chat_template: str | None = setting(
        None,
        "Chat template in place of the model's own: for prompts of data.template=chat, conversations and exports.",
        noun="a file with a Jinja template",
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def local(self) -> Path:
        """Where the model's directory is, unless `path` is a hub id."""
        path = str(self.path)
        return TINY_MODELS / path if path in TINY_PRESETS.values() else Path(path).expanduser()

    def validate(self) -> None:
        self.lora.validate()

        path = self.path or ""
        is_directory = self.local.is_dir()
        local = path.startswith((".", "/", "~"))
        accepted = "an existing Hugging Face model directory or a hub id"
        expect(path != "" and (is_directory or not local), "model.path", self.path, accepted)
        known = self.revision is None or not is_directory
        expect(known, "model.revision", self.revision, "null, or a hub id as model.path")
        template = self.chat_template
        is_file = template is None or Path(template).expanduser().is_file()
        expect(is_file, "model.chat_template", template, "an existing file with a Jinja template, or null")
