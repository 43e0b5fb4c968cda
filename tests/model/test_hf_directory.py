"""Locating models, and the one-sentence error for each defect of a directory."""

import json
from pathlib import Path

import pytest

from app.config.model import LoraConfig, ModelConfig
from app.mode.preflight import problems
from app.model.hf_directory import GENERAL, identity, load_tokenizer, locate, require_window
from app.model.hf_import import transformers
from tests.compose import composed
from tests.model.support import save_qwen3
from tests.refusals import refused

OLD = "a" * 40
NEW = "b" * 40


def test_a_local_directory_is_returned_unchanged(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    assert locate(ModelConfig(path=str(path))) == path


@pytest.mark.parametrize(
    ("removed", "message"),
    [("config.json", "no config.json"), ("tokenizer.json", "with a tokenizer"), ("model.safetensors", "has none")],
)
def test_an_incomplete_directory_is_refused(removed: str, message: str, tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    (path / removed).unlink()
    with refused("model.path", path, message):
        locate(ModelConfig(path=str(path)))


def test_a_directory_whose_config_names_no_class_is_rejected_before_an_engine_starts(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config))
    with refused("model.path", path, "architectures"):
        locate(ModelConfig(path=str(path)))
    assert "architectures" in problems(composed("model=hf", f"model.path={path}", "data=arithmetic"))["model"]


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", "a/b/c"])
def test_a_missing_directory_is_rejected_without_querying_the_hub(path: str) -> None:
    with refused("model.path", path, "a directory"):
        locate(ModelConfig(path=path))


def test_a_hub_model_that_cannot_be_downloaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("model.path", "nobody/nothing", "hub cannot be reached"):
        locate(ModelConfig(path="nobody/nothing"))


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


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)])
def test_a_hub_model_is_that_of_its_revision(revision: str | None, commit: str, hub_cache: Path) -> None:
    path = locate(ModelConfig(path="owner/name", revision=revision))
    assert path == hub_cache / commit
    assert identity(path, LoraConfig())["source"].endswith(f"/snapshots/{commit}")  # what a checkpoint records


def test_an_unknown_revision_is_named(hub_cache: Path) -> None:
    with refused("model.path", "owner/name with model.revision=v2"):
        locate(ModelConfig(path="owner/name", revision="v2"))


def test_a_local_directory_has_no_revision(tmp_path: Path) -> None:
    for path in ("tiny", str(tmp_path)):
        with refused("model.revision", "v1", "null", "model.path"):
            ModelConfig(path=path, revision="v1").validate()


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")]
)
def test_a_broken_tokenizer_is_refused(file: str, content: str, tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    (path / file).write_text(content)
    with refused("model.path", path, "tokenizer"):
        load_tokenizer(path)


def test_the_general_tokenizer_class_equals_the_choice_of_transformers(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    assert json.loads((path / "tokenizer_config.json").read_text())["tokenizer_class"] == GENERAL
    ours, theirs = load_tokenizer(path), transformers().AutoTokenizer.from_pretrained(path)
    assert type(ours) is type(theirs)
    assert repr(ours) == repr(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours("1+2=") == theirs("1+2=")


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
