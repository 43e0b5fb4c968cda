"""Make transformers importable with a CPU build of torch.

Every module that needs transformers gets it from here; app/device/torchvision_shim.py explains why.
"""

from functools import cache
from types import ModuleType
from typing import Any

from app.device.torchvision_shim import define_operators


@cache
def transformers() -> ModuleType:
    """Import the transformers package with its model classes usable."""
    define_operators()
    import transformers as package

    package.utils.logging.disable_progress_bar()
    return package


def general_tokenizer() -> Any:
    """Return transformers' class for any `tokenizer.json`, which does not import torch, unlike `AutoTokenizer`.

    Importing torch costs seconds at every start, and 200 MB in every process that only needs a tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast
