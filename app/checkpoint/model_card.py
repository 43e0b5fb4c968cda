"""The model card of an export, `README.md`, which hubs show.

Invariants:
- It replaces the base model's card, of which the license remains.
- Local paths do not appear: exports are published.
"""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.config.command_line import DISTRIBUTION
from app.config.model import ModelConfig
from app.data.records.sources import is_remote
from app.model.hf_directory import is_path
from app.tracking.run_folder import CONFIG, metrics_file
from app.tracking.run_folder.summary import EVALUATED

NAME = "README.md"
LICENSE = re.compile(r"^(license|license_name|license_link): *\"?([\w./:-]+)\"?$", re.MULTILINE)
LOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "{name}"  # this directory, or its id on a hub
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)"""
LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

path = "{name}"  # this directory, or its id on a hub
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}", dtype="auto"), path)"""


def model_card(run: Path, source: Path, step: int, *, adapter: bool = False) -> str:
    """Return the card of the model after `step`, as far as the run's folder says how it was trained.

    Args:
        run: Folder of the run.
        source: Directory of the base model.
        step: The exported one.
        adapter: The card is of the adapter alone.
    """
    from huggingface_hub import ModelCardData

    from app.tracking.report.data import read_config

    config, _ = read_config(run / CONFIG)
    base, data = config.get("model.path"), config.get("data.path")
    hub_base = base if base and not is_path(base) and not ModelConfig(path=base).local.exists() else None
    hub_data = data if isinstance(data, str) and is_remote(data) and not Path(data).exists() else None
    base_name = hub_base or (Path(base).name if base else config.get("model.name", source.name))
    algorithm = config.get("algorithm.name", "RL")

    base_card = (source / NAME).read_text(encoding="utf-8") if (source / NAME).is_file() else ""
    front = ModelCardData(
        base_model=hub_base,
        datasets=[hub_data] if hub_data else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[algorithm, "reinforcement-learning", *(["lora"] if adapter else [])],
        **dict(LICENSE.findall(base_card.partition("\n---")[0])),
    )
    facts = {"base model": base_name, "steps": step, **_settings(config), **_evaluations(run, step)}
    facts["trained with"] = f"{DISTRIBUTION} {version(DISTRIBUTION)}"

    name = f"{base_name.rpartition('/')[2]}-{algorithm}"
    load = (LOAD_ADAPTER if adapter else LOAD).format(base=base_name, name=name)
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return f"---\n{front.to_yaml()}\n---\n\n# {name}\n\n| | |\n|---|---|\n{rows}\n\n```python\n{load}\n```\n"


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    shown = ["algorithm.name", "algorithm.prompts_per_step", "algorithm.group_size", "data.name", "trainer.lr"]
    if config.get("model.lora.rank"):
        shown += ["model.lora.rank", "model.lora.alpha"]
    return {f"`{key}`": config[key] for key in shown if key in config}


def _evaluations(run: Path, step: int) -> dict[str, str]:
    """The first and the last evaluation up to the step."""
    rows = metrics_file.read(run / metrics_file.NAME)
    found = [row for row in rows if row["step"] <= step and row.get("eval/accuracy") is not None]
    facts = {}
    for when, row in zip(("first", "last"), found[:1] + found[1:][-1:], strict=False):
        prompts = sum(value for name, value in row.items() if EVALUATED.fullmatch(name) and value)
        facts[f"{when} evaluation"] = f"{row['eval/accuracy']:.1%} after step {row['step']} (n = {prompts:,.0f})"
    return facts
