"""Lets torchvision import beside a torch that was built without an accelerator.

The wheels that package indexes offer are built for accelerators; there torchvision's import fails for want of two
operators, and takes transformers and SGLang down with it. Call `define_operators` before either is imported.
"""

_library: list[object] = []  # torch drops a library's operators with its last reference


def define_operators() -> None:
    """Declare the two operators where torch cannot load torchvision's own. Harmless to repeat."""
    import torch

    built_for_accelerator = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
    if built_for_accelerator or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.append(library)
