"""Tensors whose values are elsewhere: on the meta device in the model, and given by a resolver when they are committed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from deltastore.errors import IncompatibleStateError, InvalidInputError
from deltastore.state import Array, TensorSource
from deltastore.storable import why_not_stored
from deltastore.tensors import TorchSource, from_torch_dtype
from deltastore.torch_import import import_torch

Resolver = Callable[[str], Any]


class Offload:
    """Asks a resolver for values as they are read. Holds one of its results at a time, from all threads together.

    Args:
        resolver: gives for a name, which is that of the tensor in the snapshot, a torch tensor or a `TensorSource`. It may be
            asked again for a large tensor while chunks of its neighbour are read.
    """

    def __init__(self, resolver: Resolver) -> None:
        if not callable(resolver):
            raise InvalidInputError(f"resolver is a {type(resolver).__name__}; expected a function from names to tensors")
        self._resolver = resolver
        self._lock = threading.Lock()
        self._held: tuple[str, TensorSource] | None = None

    def source(self, name: str, tensor: Any, frozen: bool) -> OffloadedSource:
        """A source with the dtype and shape of `tensor`, which is on the meta device, and the values that the resolver gives."""
        return OffloadedSource(self, name, from_torch_dtype(tensor.dtype), tuple(int(n) for n in tensor.shape), frozen)

    def read(self, source: OffloadedSource, start: int, stop: int) -> Array:
        """A copy of the bytes of elements [start, stop)."""
        with self._lock:
            if self._held is None or self._held[0] != source.name:
                self._held = None  # the one before goes first
                self._held = source.name, self._resolve(source)
            return self._held[1].read(start, stop).copy()

    def _resolve(self, source: OffloadedSource) -> TensorSource:
        found = self._resolver(source.name)
        if isinstance(found, import_torch().Tensor):
            problem = why_not_stored(found)
            if problem is not None:
                raise IncompatibleStateError(f"what the resolver gave for {source.name!r} {problem}")
            resolved: TensorSource = TorchSource(found, name=f"tensor {source.name!r}")
        elif callable(getattr(found, "read", None)) and hasattr(found, "dtype") and hasattr(found, "shape"):
            resolved = found
        else:
            raise InvalidInputError(f"the resolver gave a {type(found).__name__} for {source.name!r}; expected a torch tensor")
        if (resolved.dtype, tuple(resolved.shape)) != (source.dtype, source.shape):
            raise IncompatibleStateError(
                f"the resolver gave {resolved.dtype}{list(resolved.shape)} for {source.name!r}, which is "
                f"{source.dtype}{list(source.shape)} in the model; nothing was committed"
            )
        return resolved


class OffloadedSource:
    """A tensor whose bytes come from a resolver. See `TensorSource`."""

    __slots__ = ("_offload", "dtype", "frozen", "name", "shape")

    def __init__(self, offload: Offload, name: str, dtype: str, shape: tuple[int, ...], frozen: bool) -> None:
        self._offload = offload
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.frozen = frozen

    def read(self, start: int, stop: int) -> Array:
        """Bytes of elements [start, stop): a fresh copy. Raises IncompatibleStateError when what is given does not fit."""
        return self._offload.read(self, start, stop)
