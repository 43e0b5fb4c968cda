"""Make the torchvision of this Python importable with a torch that its library was not built for.

Package indexes without torch's CPU builds have a torchvision for CUDA. Its two operators are then missing, and without
them neither transformers nor SGLang can be imported. This declares them in torchvision's own module, where its library
did not load.
"""

import importlib.util
import os
from pathlib import Path

DECLARATION = """
if not hasattr(torch.ops.torchvision, "nms"):  # added by launch/setup.sh
    _declared = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _declared.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Add the declaration, once."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).with_name("extension.py")
    text = file.read_text(encoding="utf-8")
    if DECLARATION not in text:
        changed = file.with_suffix(".new")
        changed.write_text(text + DECLARATION, encoding="utf-8")
        os.replace(changed, file)  # other environments may link to the old one


if __name__ == "__main__":
    main()
