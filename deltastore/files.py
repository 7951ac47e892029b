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
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import numpy as np

from deltastore.canonical import show
from deltastore.checkpoint_writer import INDEX_NAME, MAX_HEADER_BYTES, METADATA, WEIGHTS_NAME, CheckpointWriter, plan_shards
from deltastore.dtypes import dtype_of, from_safetensors
from deltastore.errors import FormatError, InvalidInputError, NotFoundError
from deltastore.layout import STORE_KEY
from deltastore.open_file import OpenFile
from deltastore.state import Array, FlatState, check_range, flatten

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "FileSource",
    "SafetensorsFile",
    "checkpoint_state",
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
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_object) if text[:1] == b"{" else None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the safetensors header is no JSON: {str(error)[:200]}") from None
    if type(header) is not dict:
        raise FormatError("the safetensors header is no JSON object")
    return header


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise FormatError(f"the name {show(name)} comes twice in the header")
    return result


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
    """What a checkpoint on disk holds: tensors by name, other files by posix relative name, texts of `__metadata__`."""

    tensors: dict[str, FileSource]
    files: dict[str, Path]
    metadata: dict[str, str]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a `.safetensors` file, or a folder with one, or with shards and their index; reads headers only.

    Tensors come in the order of the file, or of the index. All other files of a folder are listed, except in `.git`, `.cache`
    and stores. Raises NotFoundError, FormatError when index and shards disagree, InvalidInputError for a folder whose weights
    are ambiguous, and for what is no plain file.
    """
    path = Path(path)
    if not path.is_dir():
        opened = open_safetensors(path)
        return Checkpoint(opened.tensors, {}, opened.metadata)
    names = sorted(entry.name for entry in path.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    index = INDEX_NAME if INDEX_NAME in indexes else indexes[0] if len(indexes) == 1 else None
    if index is not None:
        weight_map = _read_index(path / index)
        shards = set(weight_map.values())
        if WEIGHTS_NAME in weights and WEIGHTS_NAME not in shards:
            raise InvalidInputError(f"{path} has {WEIGHTS_NAME} and {index}, which names other files; remove the stale one")
        tensors, metadata = _open_shards(path, index, weight_map)
        return Checkpoint(tensors, _other_files(path, {index, *shards}), metadata)
    chosen = WEIGHTS_NAME if WEIGHTS_NAME in weights else weights[0] if len(weights) == 1 else None
    if chosen is None and not weights:
        raise NotFoundError(f"{path} holds no .safetensors file; save the model there with `save_pretrained`, or name a file")
    if chosen is None:
        raise InvalidInputError(
            f"{path} holds {len(weights)} .safetensors files and no {INDEX_NAME}; name one of {show(weights)}"
        )
    opened = open_safetensors(path / chosen)
    return Checkpoint(opened.tensors, _other_files(path, {chosen}), opened.metadata)


def checkpoint_state(checkpoint: Checkpoint) -> FlatState:
    """The state that a plain dict of these tensors is; its tensors are `FileSource`s."""
    return flatten(checkpoint.tensors, lambda value: isinstance(value, FileSource))


def _read_index(path: Path) -> dict[str, str]:
    if not path.is_file() or path.stat().st_size > MAX_HEADER_BYTES:
        raise FormatError(f"{path} is no index of safetensors files: expected a file of at most {MAX_HEADER_BYTES} bytes")
    try:
        index = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_unique_object)
    except (ValueError, RecursionError, FormatError) as error:
        raise FormatError(f"{path}: {str(error)[:200]}") from None
    weight_map = index.get("weight_map") if type(index) is dict else None
    if type(weight_map) is not dict or not all(type(shard) is str for shard in weight_map.values()):
        raise FormatError(f"{path}: expected an object `weight_map` from tensor names to file names")
    for shard in set(weight_map.values()):
        if not shard.endswith(".safetensors") or PurePosixPath(shard).name != shard or "\\" in shard or "\0" in shard:
            raise FormatError(f"{path}: {show(shard)} is no name of a .safetensors file beside it")
    return weight_map


def _open_shards(folder: Path, index: str, weight_map: dict[str, str]) -> tuple[dict[str, FileSource], dict[str, str]]:
    shards = list(dict.fromkeys(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise FormatError(f"{folder}: {index} names {show(missing)}, which are not there; fetch or save the checkpoint again")
    opened = {shard: open_safetensors(folder / shard) for shard in shards}
    tensors: dict[str, FileSource] = {}
    for name, shard in weight_map.items():
        if name not in opened[shard].tensors:
            raise FormatError(f"{folder / shard} has no tensor {show(name)}, which {index} says is there; save it again")
        tensors[name] = opened[shard].tensors[name]
    for shard, file in opened.items():
        for name in file.tensors:
            if weight_map.get(name) != shard:
                where = f"says is in {weight_map[name]}" if name in weight_map else "does not name"
                raise FormatError(f"{folder / shard} has a tensor {show(name)}, which {index} {where}; save it again")
    metadata: dict[str, str] = {}
    for file in opened.values():
        metadata.update(file.metadata)
    return tensors, metadata


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
