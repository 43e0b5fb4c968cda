"""Make torchvision importable with a torch build without accelerator support.

Package indexes offer torchvision wheels built for accelerators. With a CPU build of torch their import fails for lack
of two operators, and breaks the import of transformers and SGLang. Call `define_operators` before importing either;
modules that need transformers take it from `transformers()`.

A torchvision built for this torch registers the operators itself. A second definition would abort the process, so ours
come only after its library was tried.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
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
    if built_for_accelerator or hasattr(torch.ops.torchvision, "nms") or _loads_its_own():
        return None

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


@cache
def transformers() -> ModuleType:
    """Import the transformers package with its model classes usable."""
    define_operators()
    import transformers as package

    package.utils.logging.disable_progress_bar()
    return package


def _loads_its_own() -> bool:
    """Load torchvision's operators from its library, without importing torchvision; return whether that worked."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None else None
    for file in (file for folder in folders or () for file in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(file)
        except OSError:  # built for another torch
            continue
        if hasattr(torch.ops.torchvision, "nms"):
            return True
    return False
