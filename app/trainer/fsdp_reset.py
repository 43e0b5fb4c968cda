"""Puts an FSDP2 model back in order after a forward or backward that raised.

Such a pass leaves modules in the middle of it: the next forward takes a module for one that is still in its backward,
and gradients that were not reduced yet would join those of the next step. Nothing of this raises; it gives wrong
gradients. Every rank calls this, since it gathers parameters.
"""

import torch
from torch.distributed.fsdp import FSDPModule

from app.errors import TrainerError


def reset_fsdp_state(model: torch.nn.Module) -> None:
    """Reshard, and drop what the failed pass left; a plain module needs nothing of it."""
    if not isinstance(model, FSDPModule):
        return
    if not hasattr(model, "reset_iter_state"):  # older than torch 2.13
        raise TrainerError(
            f"a pass failed, and torch {torch.__version__} cannot put a sharded model back in order after that: "
            "its gradients would be wrong from here on"
        )
    model.reset_iter_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                parameter.grad = None
            module.reshard()
