"""Which tensors have plain dense memory that can be read and written byte by byte, and why the others have not."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from deltastore.dtypes import dtype_of
from deltastore.errors import IncompatibleStateError
from deltastore.torch_import import import_torch

Tensor = Any  # torch.Tensor: this module is read by type checkers and programs that have no torch

_SUBCLASSES = {
    "DTensor": "is a DTensor; call `tensor.full_tensor()` on every rank",
    "FakeTensor": "is a fake tensor, it has no values; make the model outside FakeTensorMode",
    "FunctionalTensor": "is a functional tensor; call `torch._from_functional_tensor(tensor.elem)`",
    "NestedTensor": "is a nested tensor; commit the list `tensor.unbind()`",
    "UninitializedParameter": "is not initialised; run the model once, so that its shape is known",
    "UninitializedBuffer": "is not initialised; run the model once, so that its shape is known",
}


def known_subclass(kind: type) -> str | None:
    """What to do with a subclass of torch itself that can never be stored as it is; None for all others."""
    return next((_SUBCLASSES[base.__name__] for base in kind.__mro__ if base.__name__ in _SUBCLASSES), None)


def why_not_stored(tensor: Tensor, *, resolved: bool = False) -> str | None:
    """Why a tensor has no plain dense memory, and what to do; None when it has.

    `resolved` says that somebody else gives the values of tensors on the meta device.
    """
    torch = import_torch()
    kind = type(tensor)
    if (known := known_subclass(kind)) is not None:
        return known
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, an unknown tensor subclass; commit the plain tensors that it "
            "is made of, or `tensor.dequantize()`, or `tensor.as_subclass(torch.Tensor)` where that holds the values"
        )
    if torch._is_functional_tensor(tensor):
        return "is a functional tensor; call `torch._from_functional_tensor(tensor)`"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "is a tensor inside a torch.func transform; commit it outside"
    if tensor.is_nested:
        return _SUBCLASSES["NestedTensor"]
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}); commit `tensor.int_repr()` with its scales, or `tensor.dequantize()`"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; commit `tensor.to_dense()`, or its parts"
    if tensor.is_meta and not resolved:
        return (
            "is on the meta device, it has no values; load the model without offloading, make it with "
            "`module.to_empty(device='cpu')`, commit an iterable of (name, tensor) pairs, or pass `resolver=`"
        )
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = dtype_of(name)
    except IncompatibleStateError as error:
        return f"can't be stored: {error}"
    if tensor.is_neg() and not dtype.floating:
        return "is a lazily negated integer tensor; call `tensor.resolve_neg()`"
    if not tensor.is_meta and not has_memory(tensor):
        return "has no memory behind it (FSDP frees that of sharded parameters); gather the full parameters first"
    return None


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage holds every element. Torch itself checks that only when a view is made."""
    if tensor.numel() == 0:
        return True
    try:
        available = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return False
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((last + 1) * tensor.dtype.itemsize <= available)


def why_not_written(tensor: Tensor) -> str | None:
    """Why the elements of a tensor can't be written one by one; None when each has memory of its own."""
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazily conjugated or negated view; load into `tensor.resolve_conj().resolve_neg()`"
    reach = 0
    for step, size in sorted((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if step <= reach and tensor.numel():
            kind = "an expanded view" if step == 0 else "a view with overlapping elements"
            return f"is {kind}, several elements share one place in memory; load into `tensor.contiguous()`"
        reach += step * (size - 1)
    return None


def storage_pointer(tensor: Tensor) -> int:
    """Names the storage of a tensor; that of one on the meta device, which has no memory, by the object behind it."""
    if tensor.is_meta:
        return int(tensor.untyped_storage()._cdata)
    return int(tensor.untyped_storage().data_ptr())


def tie_key(tensor: Tensor) -> Hashable | None:
    """Equal for tensors that are one: same non-empty storage, device, offset, dtype, shape and strides. None: never tied."""
    if tensor.numel() == 0:
        return None
    lazy = (tensor.is_conj(), tensor.is_neg())
    layout = (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return storage_pointer(tensor), str(tensor.device), layout, lazy


def is_frozen(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter that is not trained."""
    return isinstance(tensor, import_torch().nn.Parameter) and not tensor.requires_grad
