"""Which stored tensors go into which memory of a target, and what does not fit. Nothing is written here."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from deltastore import tensors
from deltastore.errors import short_name
from deltastore.state import TensorSink
from deltastore.storable import tie_key, why_not_stored, why_not_written
from deltastore.tensors import CastSink, TorchSink
from deltastore.torch_import import import_torch
from deltastore.versions import TensorInfo, Version


@dataclass(frozen=True, slots=True)
class Stored:
    """Stands for a stored tensor in a nested state that is only planned with."""

    number: int


class Fills:
    """A plan that grows: tensors to fill in place, and new ones.

    Attributes:
        names: all tensors of the plan.
        created: those of them that are new.
        problems: what does not fit, for people.
        hints: what to do about it.
    """

    def __init__(self, version: Version, *, cast: bool) -> None:
        self._version = version
        self._cast = cast
        self._plan: list[tuple[int, Any, str]] = []
        self._tied: dict[Hashable, tuple[str, int]] = {}
        self._new: dict[tuple[int, str], Any] = {}
        self.names: list[str] = []
        self.created: list[str] = []
        self.problems: list[str] = []
        self.hints: dict[str, None] = {}

    def fill(self, number: int, tensor: Any, name: str) -> None:
        """Plan to put a stored tensor into the memory of `tensor`."""
        self.names.append(name)
        unusable = why_not_stored(tensor) or why_not_written(tensor)
        if unusable is not None:
            self.problems.append(f"{short_name(name)!r} {unusable}")
            return
        self._check(number, tensor, name)
        key = tie_key(tensor)
        before = self._tied.get(key) if key is not None else None
        if before is None:
            self._plan.append((number, tensor, name))
            self._tied[key] = name, number
        elif before[1] != number and self._digests(before[1]) != self._digests(number):
            self.problems.append(
                f"{short_name(before[0])!r} and {short_name(name)!r} are one tensor, the commit has other values for each"
            )

    def create(self, number: int, name: str, device: Any = "cpu", like: Any = None) -> Any:
        """Plan a new tensor with the stored dtype; with the strides of `like` where that has the same shape."""
        self.created.append(name)
        info = self._version.tensors[number]
        key = number, str(device)
        if key in self._new:  # ties stay ties
            self.names.append(name)
            return self._new[key]
        if like is not None and tuple(like.shape) == info.shape and why_not_stored(like) is None and not like.is_contiguous():
            dtype = tensors.to_torch_dtype(info.dtype.name)
            made = import_torch().empty_like(like.detach(), dtype=dtype, device=device)
        else:
            made = tensors.empty_tensor(info.dtype.name, info.shape, device)
        self._new[key] = made
        self.fill(number, made, name)
        return made

    def sinks(self) -> list[tuple[int, TensorSink]]:
        """(stored tensor, where it goes) of all that is planned, ties once."""
        return [(number, self._sink(number, tensor, name)) for number, tensor, name in self._plan]

    def _sink(self, number: int, tensor: Any, name: str) -> TensorSink:
        sink = TorchSink(tensor, name=f"tensor {short_name(name)!r}")
        stored = self._version.tensors[number].dtype.name
        return sink if sink.dtype == stored else CastSink(sink, stored)

    def _check(self, number: int, tensor: Any, name: str) -> None:
        info = self._version.tensors[number]
        dtype, shape = tensors.from_torch_dtype(tensor.dtype), tuple(tensor.shape)
        castable = self._cast and tensors.can_cast(dtype) and tensors.can_cast(info.dtype.name)
        if shape == info.shape and (dtype == info.dtype.name or castable):
            return
        found = f"{short_name(name)!r} is {dtype}{list(shape)}, the commit has {info.dtype.name}{list(info.shape)}"
        if shape != info.shape:
            found += self._shapes(info, shape, name)
        elif tensors.can_cast(dtype) and tensors.can_cast(info.dtype.name):
            self.hints["Use cast=True to convert floating values"] = None
        else:
            self.hints["Make a target of the dtypes of the commit"] = None
        self.problems.append(found)

    def _shapes(self, info: TensorInfo, shape: tuple[int, ...], name: str) -> str:
        differing = [at for at, (a, b) in enumerate(zip(shape, info.shape, strict=False)) if a != b]
        if len(shape) != len(info.shape):
            self.hints["Make a target of the shapes of the commit"] = None
            return f" ({len(shape)} dimensions, not {len(info.shape)})"
        if differing == [0]:  # such as a vocabulary that was resized
            rows, short = min(shape[0], info.shape[0]), short_name(name)
            hint = f"The {rows} rows that both have fit: `target[:{rows}].copy_(snapshot[{short!r}][:{rows}].load())`"
            self.hints[hint] = None
        else:
            self.hints["Make a target of the shapes of the commit"] = None
        sizes = ", ".join(f"dimension {at}: {shape[at]}, not {info.shape[at]}" for at in differing)
        return f" ({sizes})"

    def _digests(self, number: int) -> list[bytes]:
        return [row.digest for row in self._version.rows(number)]
