"""Make torchvision importable with a torch build without accelerator support.

Package indexes offer torchvision wheels built for accelerators. With a CPU build of torch their import fails for lack
of two operators, and breaks the import of transformers and SGLang. Call `define_operators` before importing either.
"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@cache
def define_operators() -> "torch.library.Library | None":
    """Declare the two operators if torch cannot load torchvision's own. Idempotent.

    Returns the library, which the cache keeps alive: torch drops the operators of a library with its last reference.
    """
    import torch

    built_for_accelerator = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    if built_for_accelerator or hasattr(torch.ops.torchvision, "nms"):
        return None

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
