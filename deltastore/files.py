"""Checkpoints in safetensors files, read in ranges of bytes, without torch. Writing them is in `checkpoint_writer`.

A safetensors file is a little-endian u64 header length, a JSON header (name → dtype, shape, data_offsets; `__metadata__`), and
the bytes of all tensors without gaps (safetensors format description, version 0.8).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from deltastore.canonical import show
from deltastore.checkpoint_writer import MAX_HEADER_BYTES, METADATA, CheckpointWriter, plan_shards
from deltastore.dtypes import dtype_of, from_safetensors
from deltastore.errors import FormatError, InvalidInputError, NotFoundError
from deltastore.layout import STORE_KEY
from deltastore.open_file import OpenFile
from deltastore.state import Array, check_range
from deltastore.weights import PICKLED_SUFFIXES, Weights, find_weights, merge_shards, unique_object

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "FileSource",
    "SafetensorsFile",
    "open_checkpoint",
    "open_safetensors",
    "plan_shards",
]

_BOOKKEEPING = frozenset({".git", ".cache"})  # folders that clones and downloads keep for themselves


@dataclass(frozen=True, slots=True)
class FileSource:
    """A tensor in a safetensors file. See `TensorSource`."""

    dtype: str
    shape: tuple[int, ...]
    frozen: bool
    _file: OpenFile
    _offset: int

    @property
    def path(self) -> Path:
        """The file that it is in."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def read(self, start: int, stop: int) -> Array:
        """Bytes of elements [start, stop), a fresh read-only array. Raises FormatError when the file is too short by now."""
        check_range(start, stop, self.shape)
        itemsize = dtype_of(self.dtype).itemsize
        return self._file.read(self._offset + start * itemsize, (stop - start) * itemsize)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The tensors of a safetensors file in the order of its header, and the texts of its `__metadata__`."""

    path: Path
    tensors: dict[str, FileSource]
    metadata: dict[str, str]


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Open a safetensors file; reads its header only. The file stays open while a source of it is in use.

    Raises NotFoundError, and FormatError naming the file when the header is malformed, names an unknown dtype, or does not
    cover the rest of the file exactly.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}; expected a safetensors file")
    file = OpenFile(path, os.O_RDONLY)
    try:
        size = file.size()
        length = int.from_bytes(file.read(0, 8).tobytes(), "little") if size >= 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise FormatError(f"no safetensors header of at most {MAX_HEADER_BYTES} bytes in its {size} bytes")
        header = _parse_header(file.read(8, length).tobytes())
        metadata = _parse_metadata(header.pop(METADATA, None))
        data = size - 8 - length
        tensors: dict[str, FileSource] = {}
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            source, end = _parse_entry(name, entry, file, 8 + length)
            tensors[name] = source
            spans.append((source._offset - 8 - length, end, name))
        _check_spans(sorted(spans), data)
    except FormatError as error:
        file.close()
        raise type(error)(f"{path}: {error}") from None
    except BaseException:
        file.close()
        raise
    return SafetensorsFile(path, tensors, metadata)


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_object) if text[:1] == b"{" else None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the safetensors header is no JSON: {str(error)[:200]}") from None
    if type(header) is not dict:
        raise FormatError("the safetensors header is no JSON object")
    return header


def _parse_metadata(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
        raise FormatError(f"{METADATA} must map text to text, found {show(metadata)}")
    return metadata


def _parse_entry(name: str, entry: Any, file: OpenFile, base: int) -> tuple[FileSource, int]:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(f"the tensor name {show(name)} is no valid text") from None
    if type(entry) is not dict or type(entry.get("dtype")) is not str:
        raise FormatError(f"tensor {show(name)}: expected dtype, shape and data_offsets, found {show(entry)}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise FormatError(f"tensor {show(name)}: shape {show(shape)} or data_offsets {show(offsets)} is malformed")
    dtype = from_safetensors(entry["dtype"])
    stored_shape = dtype.shape_from_file(shape)
    if stored_shape is None:
        raise FormatError(f"tensor {show(name)}: {entry['dtype']} of shape {show(shape)} does not fill whole bytes")
    begin, end = offsets
    expected = math.prod(stored_shape) * dtype.itemsize
    if end - begin != expected:
        raise FormatError(f"tensor {show(name)}: expected {expected} bytes, the header gives it {end - begin}")
    return FileSource(dtype.name, stored_shape, False, file, base + begin), end


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return type(value) is list and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_spans(spans: list[tuple[int, int, str]], size: int) -> None:
    filled = 0
    for begin, end, name in spans:
        if end > size:
            raise FormatError(f"tensor {show(name)} ends at byte {end} of {size}: the file was cut short; fetch or save it again")
        if begin != filled:
            raise FormatError(f"tensor {show(name)} begins at byte {begin}, expected {filled}: tensors overlap or leave a gap")
        filled = end
    if filled != size:
        raise FormatError(f"the tensors end at byte {filled}, but there are {size}")


class ByteSource:
    """Bytes held in memory, as a tensor of uint8. See `TensorSource`."""

    dtype = "uint8"
    frozen = False

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.shape: tuple[int, ...] = (len(data),)

    def read(self, start: int, stop: int) -> Array:
        """Elements [start, stop)."""
        return self._data[start:stop]


def open_file_bytes(path: Path) -> FileSource:
    """A whole file as a tensor of uint8, read in ranges. Raises NotFoundError, StorageError."""
    file = OpenFile(path, os.O_RDONLY)
    return FileSource("uint8", (file.size(),), False, file, 0)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint on disk holds: tensors by name, other files by posix relative name, texts of `__metadata__`.

    `pickled`: weights of `torch.save`, which only torch can read (see `sources.checkpoint_state`); there are no `tensors` then.
    """

    tensors: dict[str, FileSource]
    files: dict[str, Path]
    metadata: dict[str, str]
    pickled: Weights | None = None


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a weight file, or a folder with one, or with shards and their index; reads headers only.

    A weight file is a `.safetensors` file, or a `.pt`, `.pth` or `.bin` file of `torch.save`; see `find_weights` for those of a
    folder. Tensors come in the order of the file, or of the index. All other files of a folder are listed, except in `.git`,
    `.cache` and stores. Raises NotFoundError, FormatError when index and shards disagree, InvalidInputError for a folder whose
    weights are ambiguous, and for what is no plain file.
    """
    path = Path(path)
    if path.is_dir():
        weights = find_weights(path)
        files = _other_files(path, weights.names)
    else:
        weights = Weights(path.parent, (path.name,), path.name.endswith(PICKLED_SUFFIXES), None, {})
        files = {}
    if weights.pickled:
        return Checkpoint({}, files, {}, weights)
    opened = {shard: open_safetensors(weights.folder / shard) for shard in weights.shards}
    if weights.index is None:
        tensors = opened[weights.shards[0]].tensors
    else:
        tensors = merge_shards(weights, {shard: file.tensors for shard, file in opened.items()})
    metadata: dict[str, str] = {}
    for file in opened.values():
        metadata.update(file.metadata)
    return Checkpoint(tensors, files, metadata)


def _other_files(folder: Path, skipped: set[str]) -> dict[str, Path]:
    files = {}
    for path in sorted(_walk(folder)):
        name = path.relative_to(folder).as_posix()
        if name in skipped:
            continue
        if not name.isprintable() and not _is_text(name):
            raise InvalidInputError(f"the file name {show(name)} in {folder} is no valid text; rename it")
        if not path.is_file():
            raise InvalidInputError(f"{path} is no plain file; remove it from the folder, or replace it by what it points to")
        files[name] = path
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name not in _BOOKKEEPING and not (path / STORE_KEY).is_file():
                yield from _walk(path)
        else:
            yield path


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
