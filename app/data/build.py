"""From the configuration to prompts: rows → template → token ids → the training stream and the evaluation sets.

Always holds: no prompt is longer than `max_prompt_tokens`; what was left out for that is counted and said once.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.config.data import DataConfig
from app.data import rows, template
from app.data.cursor import PromptCursor
from app.data.row import Row
from app.errors import ConfigError
from app.types import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptData:
    """All prompts of a run."""

    train: PromptCursor
    evals: dict[str, list[Prompt]]  # by evaluation set; ids are "<set>/<row>@eval"
    left_out: int  # prompts longer than allowed, of all sets together


def build(config: DataConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int) -> PromptData:
    """Load, template and tokenize everything; `tokenizer` is any Hugging Face tokenizer. Raises `ConfigError`."""
    loaded = rows.load(config, seed=seed)
    train = _prompts(loaded.train, config, tokenizer, set_name=None)
    fitting = _fitting(train, "the training set", max_prompt_tokens)
    evals, total, kept = {}, len(train), len(fitting)
    for name, members in loaded.evals.items():
        prompts = _prompts(members, config, tokenizer, set_name=name)
        evals[name] = _fitting(prompts, f"evaluation set {name}", max_prompt_tokens)
        total, kept = total + len(prompts), kept + len(evals[name])
    left_out = total - kept
    if left_out:
        log.warning(
            "%d of %d prompts are longer than rollout.max_prompt_tokens=%d and were left out",
            left_out,
            total,
            max_prompt_tokens,
        )
    return PromptData(PromptCursor(fitting, seed=seed, shuffle=config.shuffle), evals, left_out)


def _prompts(members: Sequence[Row], config: DataConfig, tokenizer: Any, *, set_name: str | None) -> list[Prompt]:
    encoded = template.encode([row.question for row in members], config, tokenizer)
    prompts = []
    for row, token_ids in zip(members, encoded, strict=True):
        if not len(token_ids):
            raise ConfigError(
                f"data.question={config.question} is not accepted: give text that the model's tokenizer knows; "
                f"row {row.index + 1} of {row.source} has no token."
            )
        # a training prompt gets its epoch from the cursor
        prompt_id = f"{row.source}/{row.index}" if set_name is None else f"{set_name}/{row.index}@eval"
        prompts.append(Prompt(id=prompt_id, token_ids=token_ids, answer=row.answer, source=row.source))
    return prompts


def _fitting(prompts: Sequence[Prompt], what: str, max_prompt_tokens: int) -> list[Prompt]:
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not fitting:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ConfigError(
            f"rollout.max_prompt_tokens={max_prompt_tokens} is not accepted: give at least {shortest}, the length of "
            f"the shortest prompt of {what}; all its prompts are longer than allowed."
        )
    return fitting
