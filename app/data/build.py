"""Build all prompts of a run: rows → template → token ids → training stream and evaluation sets.

Invariants:
- No prompt is longer than `max_prompt_tokens`. Longer prompts are dropped and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.config.data import DataConfig
from app.data import rows, template
from app.data.cursor import PromptCursor
from app.data.fields import Row
from app.errors import ConfigError
from app.types import Prompt


@dataclass(frozen=True, slots=True)
class PromptData:
    """All prompts of a run."""

    train: PromptCursor
    evals: dict[str, list[Prompt]]  # by evaluation set; ids are "<set>/<row>@eval"
    dropped: int  # prompts above the length limit, over all sets
    total: int  # prompts before that
    warnings: list[str]  # for the run to record


def build(config: DataConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int) -> PromptData:
    """Load, template and tokenize all rows.

    Args:
        config: Settings of `data=`.
        tokenizer: Any Hugging Face tokenizer.
        seed: Seed of the generated problems and of the shuffling.
        max_prompt_tokens: Longest accepted prompt, template included.

    Raises:
        ConfigError: If data cannot be read or templated, or all prompts of a set are too long.
    """
    loaded = rows.load(config, seed=seed)
    all_train = _prompts(loaded.train, config, tokenizer, set_name=None)
    train = _within_limit(all_train, "the training set", max_prompt_tokens)
    total = len(all_train)
    accepted = len(train)

    evals: dict[str, list[Prompt]] = {}
    for name, eval_rows in loaded.evals.items():
        prompts = _prompts(eval_rows, config, tokenizer, set_name=name)
        evals[name] = _within_limit(prompts, f"evaluation set {name}", max_prompt_tokens)
        total += len(prompts)
        accepted += len(evals[name])

    cursor = PromptCursor(train, seed=seed, shuffle=config.shuffle)
    return PromptData(cursor, evals, total - accepted, total, loaded.warnings)


def _prompts(members: Sequence[Row], config: DataConfig, tokenizer: Any, *, set_name: str | None) -> list[Prompt]:
    encoded = template.encode([row.question for row in members], config, tokenizer)

    prompts = []
    for row, token_ids in zip(members, encoded, strict=True):
        if not len(token_ids):
            raise ConfigError(
                f"data.question={config.question} is not accepted: give text that the model's tokenizer can encode; "
                f"row {row.index + 1} of {row.source} has no tokens."
            )
        # The cursor appends the epoch to the id of a training prompt.
        prompt_id = f"{row.source}/{row.index}" if set_name is None else f"{set_name}/{row.index}@eval"
        prompts.append(
            Prompt(
                id=prompt_id,
                token_ids=token_ids,
                answer=row.answer,
                source=row.source,
                question=row.question,
                row=row.columns,
            )
        )
    return prompts


def _within_limit(prompts: Sequence[Prompt], set_label: str, max_prompt_tokens: int) -> list[Prompt]:
    accepted = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not accepted:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ConfigError(
            f"rollout.max_prompt_tokens={max_prompt_tokens} is not accepted: give at least {shortest}, the length of "
            f"the shortest prompt of {set_label}; all its prompts are too long."
        )
    return accepted
