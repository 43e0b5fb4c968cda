"""Makes transformers importable beside a CPU build of torch.

Every module of this application that needs transformers gets it from here; app/device/torchvision_shim.py says why.
"""

from functools import cache
from types import ModuleType
from typing import Any

from app.device.torchvision_shim import define_operators


@cache
def transformers() -> ModuleType:
    """The transformers package, safe to take model classes from."""
    define_operators()
    import transformers as package

    package.utils.logging.disable_progress_bar()
    return package


def general_tokenizer() -> Any:
    """transformers' class for whatever tokenizer.json describes. Unlike its `AutoTokenizer` it does not import torch.

    That would be seconds at every start and 200 MB in every process that only needs a tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast
