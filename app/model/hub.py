"""Makes transformers importable beside a CPU build of torch.

PyPI's torchvision is built for CUDA: beside a CPU torch its import fails ("operator torchvision::nms does not exist")
and takes transformers' model classes down with it, though nothing here looks at pictures. Declaring the two operators
lets that import pass. Every module of this application that needs transformers gets it from here.
"""

from functools import cache
from types import ModuleType

OPERATORS = ("nms", "qnms")


@cache
def transformers() -> ModuleType:
    """The transformers package, safe to take model classes from."""
    _declare_torchvision_operators()
    import transformers as package

    package.utils.logging.disable_progress_bar()
    return package


@cache
def _declare_torchvision_operators() -> object:
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # the cache keeps it: its operators go when it does
