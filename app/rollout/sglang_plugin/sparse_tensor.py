"""A checkpoint tensor of which only some entries are known, to be placed by a model's own loaders.

A loader narrows, reshapes and transposes what it is given, and ends by copying a view of it into a parameter: that is
where fused and tensor-parallel parameters find their part. Here the views are followed on a tensor without memory, and
the copy writes the known entries that the view covers and leaves the others as they are. Whatever else a loader would
compute from the values raises, since it could not be right.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class SparseTensor(Tensor):
    """`position` [n] int64, ascending, in the flat tensor; `value` [n]; `hits` collects how many were written."""

    layout_: Tensor  # on the meta device: shape, strides and offset of this view
    position: Tensor
    value: Tensor
    hits: list[int]

    @staticmethod
    def __new__(cls, layout: Tensor, position: Tensor, value: Tensor, hits: list[int]) -> "SparseTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.stride(),
            storage_offset=layout.storage_offset(),
            dtype=value.dtype,
            device=value.device,
        )
        made.layout_, made.position, made.value, made.hits = layout, position, value, hits
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SparseTensor({tuple(self.shape)}, {self.position.numel()} known entries)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        named, arguments = kwargs or {}, args
        if function is aten.copy_.default and isinstance(arguments[1], SparseTensor):
            target, source = arguments[0], arguments[1]
            if isinstance(target, SparseTensor):
                raise NotImplementedError("a tensor of known entries cannot be written to")
            source.write(target)
            return target
        source = next(each for each in arguments if isinstance(each, SparseTensor))
        if function is aten._to_copy.default:
            device, dtype = named.get("device") or source.device, named.get("dtype") or source.dtype
            moved = source.value.to(device, dtype)
            return SparseTensor(source.layout_, source.position.to(device), moved, source.hits)
        if not function.is_view and function is not aten.detach.default:
            raise NotImplementedError(f"the model's loader computes {function}, which needs the whole tensor")
        viewed = function(*tree_map(_layout, arguments), **named)
        return tree_map(lambda view: SparseTensor(view, source.position, source.value, source.hits), viewed)

    def write(self, target: Tensor) -> None:
        """Write the known entries that this view covers into `target`, of this view's shape."""
        view = self.layout_
        if target.shape != view.shape:
            raise ValueError(f"the loader copies {tuple(view.shape)} into {tuple(target.shape)}")
        if view.is_contiguous() and target.is_contiguous():  # all of the tensor, or a block of its rows
            first = int(view.storage_offset())
            ends = torch.tensor([first, first + view.numel()], device=self.position.device)
            begin, end = torch.searchsorted(self.position, ends).tolist()
            target.view(-1)[self.position[begin:end] - first] = self.value[begin:end].to(target.dtype)
            self.hits.append(end - begin)
            return
        at, covered = _places(self.position - int(view.storage_offset()), view, target)
        at = at[covered]
        _flat(target)[at] = self.value[covered].to(target.dtype)
        self.hits.append(at.numel())


def _layout(argument: Any) -> Any:
    return argument.layout_ if isinstance(argument, SparseTensor) else argument


def _places(rest: Tensor, view: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the entries lie in `target`, in elements from its start, and which of them the view covers at all."""
    if 0 in view.stride():
        raise NotImplementedError("the model's loader repeats a tensor, of which only some entries are known")
    covered, at = rest >= 0, torch.zeros_like(rest)
    for axis in sorted(range(view.dim()), key=view.stride, reverse=True):
        if view.size(axis) == 1:
            continue
        coordinate = rest.div(view.stride(axis), rounding_mode="floor")
        rest = rest - coordinate * view.stride(axis)
        covered &= coordinate < view.size(axis)
        at += coordinate * target.stride(axis)
    return at, covered & (rest == 0)


def _flat(tensor: Tensor) -> Tensor:
    """The memory that a strided tensor spans, from its first element to its last."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))
