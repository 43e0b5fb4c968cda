"""Runs inside SGLang's processes: a checkpoint tensor with some entries known, loaded by the model's own loaders.

A loader narrows, reshapes and transposes a checkpoint tensor, then copies a view of it into a parameter: that is how
fused and tensor-parallel parameters are filled. Here the views are tracked on a meta tensor, and the copy writes the
known entries that the view covers and leaves the others unchanged. Any computation on the values raises
`RuntimeError`, because it needs the whole tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

aten = torch.ops.aten


class SparseTensor(Tensor):
    """A view of a tensor with `n` known entries.

    Attributes:
        layout_: Meta tensor with the shape, strides and storage offset of this view.
        position: [n] int64, ascending: index of each entry in the flat tensor.
        value: [n].
        hits: Collects the number of entries that each copy wrote. Shared by all views.
    """

    layout_: Tensor
    position: Tensor
    value: Tensor
    hits: list[int]

    @staticmethod
    def __new__(cls, layout: Tensor, position: Tensor, value: Tensor, hits: list[int]) -> "SparseTensor":
        """Create a view; the tensor itself has no storage."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.stride(),
            storage_offset=layout.storage_offset(),
            dtype=value.dtype,
            device=value.device,
        )
        tensor.layout_ = layout
        tensor.position = position
        tensor.value = value
        tensor.hits = hits
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SparseTensor({tuple(self.shape)}, {self.position.numel()} known entries)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is aten.copy_.default and isinstance(args[1], SparseTensor):
            target, source = args[0], args[1]
            if isinstance(target, SparseTensor):
                raise RuntimeError("a sparse tensor cannot be written to")
            source.write(target)
            return target

        source = next(each for each in args if isinstance(each, SparseTensor))
        if function is aten._to_copy.default:
            device = kwargs.get("device") or source.device
            value = source.value.to(device, kwargs.get("dtype") or source.dtype)
            return SparseTensor(source.layout_, source.position.to(device), value, source.hits)

        if not function.is_view and function is not aten.detach.default:
            raise RuntimeError(f"the model's loader computes {function}, which needs the whole tensor")
        views = function(*tree_map_only(SparseTensor, lambda known: known.layout_, args), **kwargs)
        return tree_map(lambda view: SparseTensor(view, source.position, source.value, source.hits), views)

    def write(self, target: Tensor) -> None:
        """Write the known entries that this view covers into `target`, which has this view's shape."""
        view = self.layout_
        if target.shape != view.shape:
            raise ValueError(f"the loader copies {tuple(view.shape)} into {tuple(target.shape)}")

        # The whole tensor, or a block of its rows: the entries are contiguous too.
        if view.is_contiguous() and target.is_contiguous():
            first = int(view.storage_offset())
            ends = torch.tensor([first, first + view.numel()], device=self.position.device)
            begin, end = torch.searchsorted(self.position, ends).tolist()
            target.view(-1)[self.position[begin:end] - first] = self.value[begin:end].to(target.dtype)
            self.hits.append(end - begin)
            return

        offset, covered = _offsets(self.position - int(view.storage_offset()), view, target)
        offset = offset[covered]
        _flat(target)[offset] = self.value[covered].to(target.dtype)
        self.hits.append(offset.numel())


def _offsets(remainder: Tensor, view: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Map entries of the storage to `target`, a parameter.

    Args:
        remainder: [n] int64, index of each entry in the storage, relative to the first element of `view` (meta).

    Returns:
        [n] int64, the offset of each entry in `target`'s storage, and [n] bool, whether the view covers it.
    """
    if 0 in view.stride():
        raise RuntimeError("the model's loader repeats a tensor, which needs all of its entries")

    covered = remainder >= 0
    offset = torch.zeros_like(remainder)
    for axis in sorted(range(view.dim()), key=view.stride, reverse=True):
        if view.size(axis) == 1:
            continue
        coordinate = remainder.div(view.stride(axis), rounding_mode="floor")
        remainder = remainder - coordinate * view.stride(axis)
        covered &= coordinate < view.size(axis)
        offset += coordinate * target.stride(axis)
    return offset, covered & (remainder == 0)


def _flat(tensor: Tensor) -> Tensor:
    """Return the storage that a strided tensor spans, from its first element to its last, as one axis."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))
