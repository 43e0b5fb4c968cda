"""A control of distillation runs, as an objective of one's own."""

from torch import Tensor

from app.algorithm.objective import TokenBatch


def fixed_negative(batch: TokenBatch, ratio: Tensor) -> Tensor:
    """Push down the less likely half of the tokens by one constant, without a teacher (arXiv 2608.31046)."""
    unlikely = batch.logprobs.detach() < batch.logprobs.detach().median()
    return -ratio * unlikely
