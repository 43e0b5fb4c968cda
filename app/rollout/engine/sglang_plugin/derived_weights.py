"""Runs inside SGLang's processes: refreshes what an engine computed from its weights and keeps.

SGLang 0.5.22 and 0.5.23 transpose the convolutions of linear attention on NPUs at their first use, keep the copies
(`_get_conv_weights_t` in hardware_backend/npu/attention), and never refresh them: after a weight sync such an engine
would compute with its initial convolutions. Every way to load weights, of a sync or of a checkpoint, ends with the
method hooked here, in every rank and for a draft model too. CONTRIBUTING.md lists the other copies.
"""

from typing import Any

import torch

LOADED = "sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights"
TRANSPOSED = "_conv_weights_t"  # beside `conv_weights`, a view of the parameter


@torch.inference_mode()  # in which SGLang may have made the copies: nothing else may change them
def refresh_convolutions(_: None, model: Any, *__: Any) -> None:
    """Compute the copies again, in place: captured graphs read their memory. Hook after weights were loaded."""
    for module in model.modules():
        copy = getattr(module, TRANSPOSED, None)
        if copy is not None:
            copy.copy_(module.conv_weights.transpose(0, 1))
