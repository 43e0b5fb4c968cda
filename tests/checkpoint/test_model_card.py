"""The model card of an export, as huggingface_hub reads it."""

import json
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
ROWS = (
    {"step": 0, "eval/accuracy": 0.25, "eval/prompts": 200},
    {"step": 1, "train/loss": 0.5},
    {"step": 20, "eval/accuracy": 0.5, "eval/easy/prompts": 100, "eval/hard/prompts": 50},
    {"step": 40, "eval/accuracy": 0.75, "eval/prompts": 200},
)


def card_of(folder: Path, *overrides: str, step: int = 20, adapter: bool = False, base_card: str = "") -> ModelCard:
    run, source = folder / "run", folder / "base"
    (run / CONFIG).mkdir(parents=True)
    source.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(composed(*overrides)), run / CONFIG / "config.yaml")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    if base_card:
        (source / "README.md").write_text(base_card)
    return ModelCard(model_card(run, source, step, adapter=adapter))


def facts(card: ModelCard) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def block(card: ModelCard) -> Sequence[str]:
    return card.text.partition("```python\n")[2].partition("```")[0].splitlines()


def test_a_card_says_how_the_model_was_trained(tmp_path: Path) -> None:
    card = card_of(tmp_path, "device=cuda", "model=qwen3_4b", "data=gsm8k", "algorithm=dapo", base_card=BASE_CARD)
    front = card.data.to_dict()
    assert (front["base_model"], front["datasets"]) == ("Qwen/Qwen3-4B", ["openai/gsm8k"])
    assert (front["license"], front["license_name"]) == ("other", "qwen")
    found = facts(card)
    assert (found["steps"], found["`algorithm.name`"], found["`reward.components.math`"]) == ("20", "dapo", "1.0")
    assert found["first evaluation"] == "25.0% after step 0 (n = 200)"
    assert found["last evaluation"] == "50.0% after step 20 (n = 150)"
