"""Locating models, and the one-sentence error for each defect of a directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.config.model import LoraConfig, ModelConfig
from app.environment.rendering.tokenizer_file import TokenizerFile
from app.model.hf_directory import identity, load_tokenizer, locate, require_window
from tests.byte_level import write_tokenizer
from tests.compose import problems_of
from tests.model.support import save_qwen3
from tests.refusals import refused

OLD = "a" * 40
NEW = "b" * 40


def test_an_incomplete_directory_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    for number, name in enumerate(("config.json", "tokenizer.json", "model.safetensors", "config.json")):
        path = save_qwen3(tmp_path / str(number))
        assert locate(ModelConfig(path=str(path))) == path
        (path / name).unlink()
        if number == 3:
            (path / name).write_text("{}")  # names no class
        with refused("model.path", path):
            locate(ModelConfig(path=str(path)))
    assert "architectures" in problems_of("model=hf", f"model.path={path}", "data=arithmetic")["model"]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshots of owner/name in a hub cache without a network: `OLD`, tagged v1, and `NEW`, the default branch."""
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for ref, commit in {"v1": OLD, "main": NEW}.items():
        (repository / "refs" / ref).write_text(commit)
        save_qwen3(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository / "snapshots"


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD), ("v2", None)])
def test_a_hub_model_is_that_of_its_revision(revision: str | None, commit: str | None, hub_cache: Path) -> None:
    config = ModelConfig(path="owner/name", revision=revision)
    if commit is None:
        with refused("model.path", "owner/name with model.revision=v2"):
            locate(config)
        return
    path = locate(config)
    assert path == hub_cache / commit
    assert identity(path, LoraConfig())["source"].endswith(f"/snapshots/{commit}")  # what a checkpoint records


TEXT = "The sum of 1 and 2 is\n\n3 , née. It 's\n    def f(x): 中文"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"tokenizer_class": f"{each}TokenizerFast"} for each in ("Llama", "GPT2", "PreTrained")),
        *({"tokenizer_class": each} for each in ("LlamaTokenizer", "Qwen2Tokenizer", None)),
        *({each: True} for each in ("clean_up_tokenization_spaces", "add_bos_token", "add_eos_token")),
    ],
    ids=str,
)
def test_a_tokenizer_is_that_of_its_file_whatever_class_and_settings_are_declared(
    settings: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    path = write_tokenizer(tmp_path, model_type=model_type, **{"tokenizer_class": "LlamaTokenizerFast", **settings})
    loaded = load_tokenizer(path)
    ids = loaded(TEXT)["input_ids"]
    assert ids == TokenizerFile(path).encode(TEXT, add_special_tokens=True)
    assert ids == Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT).ids
    assert loaded.decode(ids) == TEXT


OWN = """
from transformers import PreTrainedTokenizer
class Own(PreTrainedTokenizer):
    vocab_size = 1
    def get_vocab(self): return {"a": 0}
    def _tokenize(self, text, **_): return text.split()
    def _convert_token_to_id(self, token): return 0
    def _convert_id_to_token(self, index): return "a"
"""


def test_code_that_encodes_another_way_than_the_file_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    (path / "own.py").write_text(OWN)
    with refused("model.path", path, "tokenizer.json"):
        load_tokenizer(path, trust_remote_code=True)
    assert load_tokenizer(path)("a")["input_ids"] == TokenizerFile(path).encode("a")


def test_a_tokenizer_without_an_end_token_takes_that_of_the_model(tmp_path: Path) -> None:
    loaded = load_tokenizer(write_tokenizer(tmp_path, tokenizer_class="GPT2Tokenizer", eos_token=None))
    assert loaded.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("change", "rejected"),
    [
        ({"sliding_window": 64, "use_sliding_window": True}, True),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 2}, False),
        ({"sliding_window": 128, "use_sliding_window": True}, False),
        ({"sliding_window": 64, "use_sliding_window": False}, False),
        ({"sliding_window": None}, False),
    ],
)
def test_a_sliding_window_shorter_than_the_sequences_is_rejected(
    change: dict[str, object], rejected: bool, tmp_path: Path
) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    config = json.loads((path / "config.json").read_text())
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config | change))
    if rejected:
        with refused("model.path", path, "64 tokens", "rollout.max_prompt_tokens"):
            require_window(path, tokens=100)
    else:
        require_window(path, tokens=100)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)])
def test_a_model_that_moved_is_the_same_and_one_with_other_files_is_not(lora: LoraConfig, tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    moved = shutil.copytree(path, tmp_path / "moved")

    def differing() -> set[str]:
        ours, theirs = identity(path, lora), identity(moved, lora)
        return {key for key in ours if ours[key] != theirs[key]}

    assert differing() == {"source"}
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert differing() == {"source", "tokenizer"}
    other = save_qwen3(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", moved)
    assert differing() == {"source", "tokenizer", "base" if lora.enabled else "weights"}
