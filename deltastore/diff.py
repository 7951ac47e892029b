"""What changed between two versions, per tensor: added, removed, reshaped, changed elements, bytes.

Chunks with equal digests are equal, so only chunks that differ are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltastore import display
from deltastore.chunk_reader import ChunkReader, ReadJob
from deltastore.history import Commit
from deltastore.manifests import ChunkRow
from deltastore.options import CHUNK_ELEMENTS
from deltastore.state import Array, Path
from deltastore.versions import TensorInfo, Version, match_leaves

Flags = npt.NDArray[np.bool_]
Status = Literal["added", "removed", "reshaped", "changed"]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor that differs.

    Attributes:
        before, after: (dtype, shape) on either side, None where it does not exist.
        elements: how many elements the tensor has after (before, when it was removed).
        changed_elements: how many differ bit for bit; None when the sides can't be compared element by element.
        changed_bytes: raw bytes of the chunks that differ.
        shared_rows: of a reshaped tensor whose shapes differ in the first dimension only, such as an embedding whose
            vocabulary was resized: how many rows both sides have; else None.
        changed_rows: how many of those differ bit for bit; the others are equal.
    """

    name: str
    status: Status
    before: tuple[str, tuple[int, ...]] | None
    after: tuple[str, tuple[int, ...]] | None
    elements: int
    changed_elements: int | None
    changed_bytes: int
    shared_rows: int | None = None
    changed_rows: int | None = None


@dataclass(frozen=True, slots=True)
class FileDiff:
    """A committed file that was added, removed or changed."""

    name: str
    status: Status


@dataclass(frozen=True, slots=True)
class Diff:
    """The difference of two commits. False when they hold the same tensors and files, bit for bit."""

    before: Commit
    after: Commit
    tensors: tuple[TensorDiff, ...] = ()
    files: tuple[FileDiff, ...] = ()
    elements: int = field(default=0)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.files)

    def __repr__(self) -> str:
        ends = f"{self.before.short_id}..{self.after.short_id}"
        changed = f"{self.changed_elements} of {self.elements} elements in {len(self.tensors)} tensors"
        return f"Diff({ends}, {changed}, {len(self.files)} files)"

    def _repr_html_(self) -> str:
        share = f"{self.changed_elements} of {self.elements} elements ({display.percent(self.changed_elements, self.elements)})"
        rows = ((each.status, each.name, each.elements, each.changed_elements, each.changed_bytes) for each in self.tensors)
        titles = ("status", "tensor", "elements", "changed", "bytes of changed chunks")
        tensors = display.table(titles, rows, len(self.tensors))
        files = display.table(("status", "file"), ((each.status, each.name) for each in self.files), len(self.files))
        facts = [("before", self.before.short_id), ("after", self.after.short_id), ("changed", share)]
        return display.card("diff", facts, tensors, files)

    @property
    def changed_elements(self) -> int:
        """Changed elements of all tensors that can be compared."""
        return sum(each.changed_elements or 0 for each in self.tensors)


@dataclass(frozen=True, slots=True)
class _Side:
    path: Path
    name: str
    number: int
    info: TensorInfo


def _sides(version: Version) -> list[_Side]:
    leaves = zip(version.names, version.leaves, strict=True)
    return [_Side(path, name, number, version.tensors[number]) for name, (path, number) in leaves]


def run_diff(reader: ChunkReader, before: tuple[Commit, Version], after: tuple[Commit, Version]) -> Diff:
    """Compare two versions. Tensors are matched by path or name, wrapper prefixes aside."""
    old, new = _sides(before[1]), _sides(after[1])
    elements = sum(side.info.elements for side in new)
    tensors = tuple(_tensor_diffs(reader, before[1], after[1], old, new))
    return Diff(before[0], after[0], tensors, tuple(_file_diffs(before[1], after[1])), elements)


def _tensor_diffs(
    reader: ChunkReader, before: Version, after: Version, old: list[_Side], new: list[_Side]
) -> Iterator[TensorDiff]:
    pairs = match_leaves([(side.path, side.name) for side in new], [(side.path, side.name) for side in old])
    for at, side in enumerate(new):
        spec = (side.info.dtype.name, side.info.shape)
        was = old[pairs[at]] if at in pairs else None
        if was is None:
            yield TensorDiff(side.name, "added", None, spec, side.info.elements, None, side.info.nbytes)
            continue
        known = (was.info.dtype.name, was.info.shape)
        rows_before, rows_after = before.rows(was.number), after.rows(side.number)
        if known == spec:
            differing = [i for i, (a, b) in enumerate(zip(rows_before, rows_after, strict=True)) if a.digest != b.digest]
            if not differing:
                continue
            changed = sum(_changed(reader, rows_before[i], rows_after[i], side, i) for i in differing)
            size = sum(side.info.chunk_length(i) for i in differing)
            yield TensorDiff(side.name, "changed", known, spec, side.info.elements, changed, size)
        else:
            digests = {row.digest for row in rows_before}
            size = sum(side.info.chunk_length(i) for i, row in enumerate(rows_after) if row.digest not in digests)
            rows = _compare_rows(reader, was, side, rows_before, rows_after)
            yield TensorDiff(side.name, "reshaped", known, spec, side.info.elements, None, size, *rows)
    matched = set(pairs.values())
    for at, side in enumerate(old):
        if at not in matched:
            spec = (side.info.dtype.name, side.info.shape)
            yield TensorDiff(side.name, "removed", spec, None, side.info.elements, None, side.info.nbytes)


def _changed(reader: ChunkReader, before: ChunkRow, after: ChunkRow, side: _Side, index: int) -> int:
    """Elements of one chunk that differ."""
    length = side.info.chunk_length(index)
    return int(np.count_nonzero(_differing(*_read_pair(reader, (before, length), (after, length), side, index), side.info)))


def _read_pair(
    reader: ChunkReader, before: tuple[ChunkRow, int], after: tuple[ChunkRow, int], side: _Side, index: int
) -> tuple[Array, Array]:
    label = f"tensor {side.name!r}, chunk {index}"
    pair = np.empty(before[1], np.uint8), np.empty(after[1], np.uint8)
    reader.read_many([ReadJob(*each, label, out=out) for each, out in zip((before, after), pair, strict=True)])
    return pair


def _differing(before: Array, after: Array, info: TensorInfo) -> Flags:
    """Which elements of two equally long buffers differ bit for bit."""
    itemsize = info.dtype.itemsize
    if itemsize in (1, 2, 4, 8):
        flags: Flags = before.view(f"<u{itemsize}") != after.view(f"<u{itemsize}")
        return flags
    parts = [each.view("<u8").reshape(-1, itemsize // 8) for each in (before, after)]
    return np.asarray((parts[0] != parts[1]).any(axis=1))


def _compare_rows(
    reader: ChunkReader, was: _Side, side: _Side, before: list[ChunkRow], after: list[ChunkRow]
) -> tuple[int | None, int | None]:
    """Rows that both sides of a resized tensor have, and how many of them differ; (None, None) when there are no such."""
    old, new = was.info, side.info
    if old.dtype != new.dtype or not old.shape or not new.shape or old.shape[1:] != new.shape[1:]:
        return None, None
    shared = min(old.shape[0], new.shape[0])
    row = math.prod(new.shape[1:])
    changed, last = 0, -1  # a row that lies in two chunks counts once
    for index in range(-(-shared * row // CHUNK_ELEMENTS)):
        if before[index].digest == after[index].digest:
            continue
        first = index * CHUNK_ELEMENTS
        size = (min(first + CHUNK_ELEMENTS, shared * row) - first) * new.dtype.itemsize
        lengths = old.chunk_length(index), new.chunk_length(index)
        pair = _read_pair(reader, (before[index], lengths[0]), (after[index], lengths[1]), side, index)
        positions = np.flatnonzero(_differing(pair[0][:size], pair[1][:size], new))
        rows = np.unique((positions + first) // row)
        changed += len(rows) - int(len(rows) > 0 and rows[0] == last)
        last = int(rows[-1]) if len(rows) else last
    return shared, changed


def _file_diffs(before: Version, after: Version) -> Iterator[FileDiff]:
    old = {file.name: _file_content(before, file) for file in before.structure.files}
    new = {file.name: _file_content(after, file) for file in after.structure.files}
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            yield FileDiff(name, "added")
        elif name not in new:
            yield FileDiff(name, "removed")
        elif old[name] != new[name]:
            yield FileDiff(name, "changed")


def _file_content(version: Version, file: object) -> object:
    tensor = getattr(file, "tensor", None)
    if tensor is None:
        return getattr(file, "data", None)
    return [row.digest for row in version.rows(tensor)]
