"""Build all prompts of a run: rows → template → token ids → training stream and evaluation sets.

Invariants:
- No prompt is longer than `max_prompt_tokens`. Longer prompts are dropped and counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.config.data import DataConfig
from app.data import rows, template
from app.data.counts import RowCounts, count, weights_of
from app.data.cursor import PromptCursor
from app.data.fields import Row
from app.data.rows import DataRows
from app.errors import ConfigError
from app.types import Prompt


@dataclass(frozen=True, slots=True)
class PromptData:
    """All prompts of a run."""

    train: PromptCursor
    evals: dict[str, list[Prompt]]  # by evaluation set; ids are "<set>/<row>@eval"
    counts: RowCounts  # of the prompts that are used
    dropped: int  # prompts above the length limit, over all sets
    total: int  # prompts before that
    warnings: list[str]  # for the run to record


def build(
    config: DataConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int, loaded: DataRows | None = None
) -> PromptData:
    """Load, template and tokenize all rows.

    Args:
        config: Settings of `data=`.
        tokenizer: Any Hugging Face tokenizer.
        seed: Seed of the shuffling.
        max_prompt_tokens: Longest accepted prompt, template included.
        loaded: The rows, if they are loaded already.

    Raises:
        ConfigError: If data cannot be read or templated, or all prompts of a set are too long.
    """
    loaded = loaded or rows.load(config)
    weights = weights_of(config)
    all_train = _prompts(loaded.train, config, tokenizer, set_name=None)
    train = _within_limit(all_train, "the training set", max_prompt_tokens)
    _require_all_sets(train, weights, max_prompt_tokens)
    total = len(all_train)

    evals: dict[str, list[Prompt]] = {}
    for name, eval_rows in loaded.evals.items():
        prompts = _prompts(eval_rows, config, tokenizer, set_name=name)
        evals[name] = _within_limit(prompts, f"evaluation set {name}", max_prompt_tokens)
        total += len(prompts)

    cursor = PromptCursor(train, seed=seed, shuffle=config.shuffle, weights=weights)
    counts = count(train, evals, loaded, weights)
    return PromptData(cursor, evals, counts, total - counts.total, total, loaded.warnings)


def _prompts(members: Sequence[Row], config: DataConfig, tokenizer: Any, *, set_name: str | None) -> list[Prompt]:
    encoded = template.encode(members, config, tokenizer)

    prompts = []
    for row, token_ids in zip(members, encoded, strict=True):
        if not len(token_ids):
            accepted = "text that the model's tokenizer can encode"
            why = f"row {row.index + 1} of {row.source} has no tokens"
            raise ConfigError("data.question", config.question, accepted, why)
        prompts.append(
            Prompt(
                id=_id(row, set_name, config),
                token_ids=token_ids,
                answer=row.answer,
                source=row.source,
                question=row.question,
                row=row.columns,
                messages=template.conversation(row, config),
            )
        )
    return prompts


def _id(row: Row, set_name: str | None, config: DataConfig) -> str:
    """Return the id of a row's prompt. The cursor appends the epoch to that of a training prompt."""
    if set_name is None:
        return f"{row.source}/{row.index}"

    # Held-out rows of several training sets may have the same index.
    source = f"{row.source}/" if row.source in config.train_sets else ""
    return f"{set_name}/{source}{row.index}@eval"


def _require_all_sets(train: Sequence[Prompt], weights: Mapping[str, float], max_prompt_tokens: int) -> None:
    """Raise `ConfigError` if a training set has no prompt left within the length limit."""
    left = {prompt.source for prompt in train}
    for name in weights:
        if name not in left:
            accepted = f"more, or leave out data.train_sets.{name}, whose prompts are all too long"
            raise ConfigError("rollout.max_prompt_tokens", max_prompt_tokens, accepted)


def _within_limit(prompts: Sequence[Prompt], set_label: str, max_prompt_tokens: int) -> list[Prompt]:
    accepted = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not accepted:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        least = f"at least {shortest}, the length of the shortest prompt of {set_label}"
        raise ConfigError("rollout.max_prompt_tokens", max_prompt_tokens, least, "all its prompts are too long")
    return accepted
