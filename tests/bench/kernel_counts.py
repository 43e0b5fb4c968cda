"""Kernels that a device would launch for torch's operators, and the bytes that they read and write."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that move no bytes: views, allocations, and what only looks at a tensor's metadata.
VIEWS = {"_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "expand", "lift_fresh", "narrow"}
VIEWS |= {"permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"}
VIEWS |= {"unfold", "unsqueeze", "view"}
ALLOCATIONS = ("empty", "new_empty")


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; an expanded one has each of them once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


class KernelCounts(TorchDispatchMode):
    """Counts every operator below autograd that is no view: one kernel, which reads its inputs and writes its outputs.

    Args:
        smallest: An operator counts if one of its tensors has as many elements.

    Attributes:
        names: How many operators of each name there were, and `sizes` the bytes of their inputs and outputs.
    """

    def __init__(self, *, smallest: int = 0) -> None:
        super().__init__()
        self.smallest = smallest
        self.names: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    def add(self, name: str, size: int, kernels: int = 1) -> None:
        self.names[name] += kernels
        self.sizes[name] += size

    def found(self) -> dict[str, Any]:
        by_name = {"names": dict(sorted(self.names.items())), "sizes": dict(sorted(self.sizes.items()))}
        return {"kernels": self.names.total(), "bytes": self.sizes.total(), **by_name}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled beside this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name not in VIEWS and not name.startswith(ALLOCATIONS):
            read = {key: value for key, value in kwargs.items() if key != "out"}
            tensors = [each for each in tree_leaves((args, read, out)) if isinstance(each, Tensor)]
            if max((each.numel() for each in tensors), default=0) >= self.smallest:
                self.add(name, sum(map(bytes_of, tensors)))
        return out
