"""The model card of an export, as huggingface_hub reads it."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard
from omegaconf import OmegaConf

from app.checkpoint.export import model_card
from app.tracking.run_folder import CONFIG
from tests.compose import composed

BASE_CARD = """---
license: other
license_name: qwen
license_link: https://example.org/LICENSE
tags: [chat]
---
# The base
"""


def card_of(folder: Path, *overrides: str, step: int = 20, adapter: bool = False, base_card: str = "") -> ModelCard:
    run, source = folder / "run", folder / "base"
    (run / CONFIG).mkdir(parents=True)
    source.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(composed(*overrides)), run / CONFIG / "config.yaml")
    if base_card:
        (source / "README.md").write_text(base_card)
    return ModelCard(model_card(run, source, step, adapter=adapter))


def block(card: ModelCard) -> Sequence[str]:
    return card.text.partition("```python\n")[2].partition("```")[0].splitlines()


def test_a_card_says_how_the_model_was_trained(tmp_path: Path) -> None:
    card = card_of(tmp_path, "device=cuda", "model=qwen3_4b", "data=gsm8k", "algorithm=dapo", base_card=BASE_CARD)
    front = card.data.to_dict()
    assert (front["base_model"], front["datasets"]) == ("Qwen/Qwen3-4B", ["openai/gsm8k"])
    assert (front["license"], front["license_name"]) == ("other", "qwen")
    assert "\nQwen3-4B after 20 steps of dapo, by hydra-posttrain " in card.text.replace("Qwen/", "")


def test_the_card_of_an_adapter_is_loaded_onto_its_base(tmp_path: Path) -> None:
    card = card_of(tmp_path, "device=cuda", "model=qwen3_4b_lora", step=0, adapter=True)
    assert (card.data.get("library_name"), card.data.get("base_model")) == ("peft", "Qwen/Qwen3-4B")
    assert "lora" in card.data["tags"]
    compile("\n".join(block(card)), "card", "exec")
    assert 'from_pretrained("Qwen/Qwen3-4B"' in block(card)[-1]


def test_a_card_names_no_local_path_and_needs_no_readable_card_of_the_base(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    overrides = ("model=hf", f"model.path={base}", f"data.path={rows}")
    card = card_of(tmp_path, *overrides, base_card="---\nlicense: [mit\n---\n")
    assert str(tmp_path) not in str(card)
    assert "\nbase after 20 steps" in card.text
    assert card.data.get("base_model") is None
    assert card.data.get("datasets") is None
    assert card.data.get("license") is None
    tiny = card_of(tmp_path / "tiny", "model=tiny_qwen35")  # a name of the application, on no hub
    assert ("\ntiny_qwen35 after" in tiny.text, tiny.data.get("base_model")) == (True, None)
