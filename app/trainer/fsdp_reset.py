"""Resets an FSDP2 model after a forward or backward pass that raised.

A failed pass leaves FSDP2 modules in the middle of it. The next forward would treat such a module as still in its
backward, and gradients that were not reduced yet would add to those of the next step. Neither raises an error; both
give wrong gradients.
"""

import torch
from torch.distributed.fsdp import FSDPModule

from app.errors import TrainerError


def reset_fsdp_state(model: torch.nn.Module) -> None:
    """Drop unreduced gradients and reshard. A collective, since it gathers parameters. No-op for a plain module.

    Raises:
        TrainerError: torch is older than 2.13 and cannot reset FSDP2's state.
    """
    if not isinstance(model, FSDPModule):
        return
    if not hasattr(model, "reset_iter_state"):
        raise TrainerError(
            f"a forward or backward pass failed, and torch {torch.__version__} cannot reset a sharded model after "
            "that: all later gradients would be wrong"
        )

    model.reset_iter_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                parameter.grad = None
            module.reshard()
