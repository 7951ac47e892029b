"""Regions of a tensor: what basic indexing selects, and the flat element ranges that must be read for it.

A region is narrowed without reading anything. To load one, it is cut into runs: flat element ranges whose chunks are needed,
each with the place in the result that they fill.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltastore.errors import InvalidInputError
from deltastore.options import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a region: `length` indices from `start` with `step`; `kept` is False where an integer selected one."""

    start: int
    length: int
    step: int = 1
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Region:
    """A selection of a tensor of `full_shape`, one axis per dimension."""

    full_shape: tuple[int, ...]
    axes: tuple[Axis, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a tensor."""
        return cls(shape, tuple(Axis(0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the selection."""
        return tuple(axis.length for axis in self.axes if axis.kept)

    @property
    def elements(self) -> int:
        """Number of selected elements."""
        return math.prod(axis.length for axis in self.axes)

    def narrow(self, index: Any) -> Region:
        """Select further, as torch and NumPy do with integers, slices of positive step and `...`.

        Raises:
            InvalidInputError: another kind of index, too many of them, or an integer out of range.
        """
        items = list(index) if isinstance(index, tuple) else [index]
        open_axes = [number for number, axis in enumerate(self.axes) if axis.kept]
        ellipses = [number for number, item in enumerate(items) if item is Ellipsis]
        if len(ellipses) > 1:
            raise InvalidInputError("an index may hold '...' once")
        if ellipses:
            missing = len(open_axes) - (len(items) - 1)
            items[ellipses[0] : ellipses[0] + 1] = [slice(None)] * max(missing, 0)
        if len(items) > len(open_axes):
            raise InvalidInputError(f"{len(items)} indices for a tensor of {len(open_axes)} dimensions")
        axes = list(self.axes)
        for number, item in zip(open_axes, items, strict=False):
            axes[number] = _narrow_axis(axes[number], item, number)
        return Region(self.full_shape, tuple(axes))

    def flat_range(self) -> tuple[int, int] | None:
        """[start, stop) in flat order when the selection is one contiguous run, else None."""
        if self.elements == 0:
            return 0, 0
        inner = len(self.axes)
        while inner > 0 and _covers(self.axes[inner - 1], self.full_shape[inner - 1]):
            inner -= 1
        outer = self.axes[: max(inner - 1, 0)]
        if any(axis.length != 1 for axis in outer):
            return None
        if inner > 0 and self.axes[inner - 1].step != 1 and self.axes[inner - 1].length != 1:
            return None
        start, stride = 0, 1
        for axis, size in zip(reversed(self.axes), reversed(self.full_shape), strict=True):
            start += axis.start * stride
            stride *= size
        return start, start + self.elements

    def blocks(self) -> Iterator[Region]:
        """Cut a selection that is not contiguous into parts whose surroundings are about a chunk or less each.

        The parts are in row-major order, so that their elements one after another are those of the region.
        """
        if self.elements == 0:
            return
        split = 0
        while split < len(self.axes) and self.axes[split].length == 1:
            split += 1
        if split == len(self.axes) or self.flat_range() is not None:
            yield self
            return
        axis = self.axes[split]
        row = math.prod(self.full_shape[split + 1 :]) * axis.step
        rows = max(1, CHUNK_ELEMENTS // max(row, 1))
        for first in range(0, axis.length, rows):
            count = min(rows, axis.length - first)
            part = Axis(axis.start + first * axis.step, count, axis.step, axis.kept)
            block = Region(self.full_shape, (*self.axes[:split], part, *self.axes[split + 1 :]))
            if count == 1 and row > CHUNK_ELEMENTS:
                yield from block.blocks()
            else:
                yield block

    def surroundings(self) -> tuple[int, int, tuple[int, ...], tuple[Any, ...]]:
        """How to take a block out of a contiguous run: (start, stop, shape, index).

        Elements [start, stop) in flat order, reshaped to `shape` and indexed with `index`, are the selection.
        """
        split = 0
        while split < len(self.axes) - 1 and self.axes[split].length == 1:
            split += 1
        inner = math.prod(self.full_shape[split + 1 :])
        start, stride = 0, 1
        for axis, size in zip(reversed(self.axes[: split + 1]), reversed(self.full_shape[: split + 1]), strict=True):
            start += axis.start * stride * inner
            stride *= size
        axis = self.axes[split]
        rows = (axis.length - 1) * axis.step + 1
        shape = (rows, *self.full_shape[split + 1 :])
        index = (slice(0, rows, axis.step), *(_as_slice(each) for each in self.axes[split + 1 :]))
        return start, start + rows * inner, shape, index


def _as_slice(axis: Axis) -> slice:
    return slice(axis.start, axis.start + (axis.length - 1) * axis.step + 1, axis.step)


def _covers(axis: Axis, size: int) -> bool:
    return axis.start == 0 and axis.length == size and (axis.step == 1 or size <= 1)


def _narrow_axis(axis: Axis, item: Any, dimension: int) -> Axis:
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(axis.length)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"dimension {dimension}: {error}") from error
        if step < 0:
            raise InvalidInputError(f"dimension {dimension}: slices with a negative step are not supported; load, then flip")
        length = len(range(start, stop, step))
        return Axis(axis.start + start * axis.step, length, axis.step * step)
    try:
        position = None if isinstance(item, bool) else operator.index(item)
    except TypeError:
        position = None
    if position is None:
        raise InvalidInputError(
            f"dimension {dimension}: can't index with {type(item).__name__}; use integers, slices and '...', or load() first"
        )
    if not -axis.length <= position < axis.length:
        raise InvalidInputError(f"index {position} is out of range for dimension {dimension} with {axis.length} entries")
    return Axis(axis.start + (position % axis.length) * axis.step, 1, 1, kept=False)
