"""Plain transformers training loops for one GRPO step: the baselines of trainer.py.

`plain` is the best that padded batches allow: trajectories sorted by length, padded per microbatch, as many rows as
fit the budget of positions, logits of completion tokens only, causal attention without a mask (padding is on the
right, so no real token sees it), AdamW in one kernel. `naive` pads all trajectories to the longest of the step, passes
the mask and computes all logits: the shortest loop to write.

Both compute the loss of the application: the mean over trajectories of the mean over completion tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.config.trainer import TrainerConfig
from app.device.torchvision_shim import transformers
from app.trainer.optimizer import BETAS
from app.types import ScoredGroup, Trajectory

CLIP = 0.2


class PlainTrainer:
    """A transformers model with AdamW, trained on padded microbatches.

    Args:
        path: A complete Hugging Face directory.
        budget: Positions of a microbatch, padding included.
        naive: Whether to pad to the longest trajectory of the step, and to compute all logits.
    """

    def __init__(self, path: Path, *, budget: int, naive: bool) -> None:
        self.model = transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.budget = budget
        self.naive = naive
        self.config = TrainerConfig()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.config.lr,
            betas=BETAS,
            weight_decay=self.config.weight_decay,
            fused=not naive,
        )

    def step(self, groups: Sequence[ScoredGroup]) -> float:
        """Train one step. Returns the gradient norm before clipping."""
        self.accumulate(groups)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def accumulate(self, groups: Sequence[ScoredGroup]) -> None:
        """Add the gradients of the step, one microbatch after the other."""
        trajectories = [each for scored in groups for each in scored.group.trajectories]
        advantages = torch.tensor(np.concatenate([scored.advantages for scored in groups]))
        lengths = [each.tokens for each in trajectories]

        for rows in microbatches(lengths, self.budget, naive=self.naive):
            width = max(lengths) if self.naive else max(lengths[row] for row in rows)
            ids, attention_mask, completion_mask = pad([trajectories[row] for row in rows], width)
            losses = self._losses(ids, attention_mask, completion_mask, advantages[rows])
            (losses.sum() / len(trajectories)).backward()

    def _losses(self, ids: Tensor, attention_mask: Tensor, completion_mask: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of each row [B]; ids and masks are [B, L], advantages [B]."""
        trained = completion_mask[:, 1:]
        forward = self._all_logprobs if self.naive else self._completion_logprobs
        logprobs = forward(ids, attention_mask, trained)  # [N]

        row = trained.nonzero()[:, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        objective = torch.minimum(ratio * advantages[row], clipped * advantages[row])
        sums = torch.zeros(len(ids)).index_add(0, row, objective)
        return -sums / trained.sum(1)

    def _completion_logprobs(self, ids: Tensor, attention_mask: Tensor, trained: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = self.model.lm_head(hidden[trained])
        return -torch.nn.functional.cross_entropy(logits, ids[:, 1:][trained], reduction="none")

    def _all_logprobs(self, ids: Tensor, attention_mask: Tensor, trained: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return logprobs[trained]


def microbatches(lengths: Sequence[int], budget: int, *, naive: bool) -> list[list[int]]:
    """Return the rows of each microbatch, as many as fit `budget` padded positions; one where none does.

    Sorted from long to short, the first row of a microbatch is its longest. `naive` keeps the order and pads all rows
    to the longest of `lengths`.
    """
    order = list(range(len(lengths)))
    widths = [max(lengths)] * len(lengths)
    if not naive:
        order.sort(key=lambda row: -lengths[row])
        widths = list(lengths)

    batches: list[list[int]] = []
    for row in order:
        if batches and (len(batches[-1]) + 1) * widths[batches[-1][0]] <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def pad(trajectories: Sequence[Trajectory], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, attention mask and completion mask, each [B, width], padded on the right."""
    ids = torch.zeros(len(trajectories), width, dtype=torch.int64)
    attention_mask = torch.zeros(len(trajectories), width, dtype=torch.bool)
    completion_mask = torch.zeros(len(trajectories), width, dtype=torch.bool)

    for row, each in enumerate(trajectories):
        ids[row, : each.tokens] = torch.as_tensor(np.concatenate([each.prompt.token_ids, each.completion.token_ids]))
        attention_mask[row, : each.tokens] = True
        completion_mask[row, len(each.prompt.token_ids) : each.tokens] = True
    return ids, attention_mask, completion_mask
