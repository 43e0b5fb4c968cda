"""The tokens of a microbatch, as the loss and its objectives see them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """N sampled tokens of S whole sequences, without prompts and observations."""

    logprobs: Tensor  # [N] current policy at the sampling temperature; carries the gradient
    old_logprobs: Tensor | None  # [N] trainer at the start of the step; None: current ones, detached (ratio 1)
    rollout_logprobs: Tensor  # [N] as reported by the engine
    reference_logprobs: Tensor | None  # [N] frozen reference; None without `algorithm.kl`
    entropy: Tensor  # [N] nats; carries a gradient if `entropy_coefficient` is above 0
    sequence: Tensor  # [N] int64, index in 0..S of the token's sequence
    advantages: Tensor  # [S]
    lengths: Tensor  # [S] sampled tokens per sequence; 0 is allowed
    trajectory_tokens: Tensor  # [S] sampled tokens of the sequence's trajectory; of a single sequence, its length
    weight_mask: Tensor  # [S] 0 for sequences without gradient (masked truncations, dummy passes), else 1
