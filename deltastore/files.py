"""Checkpoints as safetensors files, read and written in ranges of bytes, without torch.

A safetensors file is a little-endian u64 header length, a JSON header (name → dtype, shape, data_offsets; `__metadata__`), and
the bytes of all tensors without gaps (safetensors format description). Files are read and written by position, never mapped:
a file that another process truncates, or a full disk, gives an error here and not a signal.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

import numpy as np

from deltastore.canonical import show
from deltastore.dtypes import dtype_of, from_safetensors
from deltastore.errors import (
    FormatError,
    IncompatibleStateError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    StoreFullError,
)
from deltastore.options import MAX_FILE_BYTES
from deltastore.state import Array, FlatState, flatten

MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
METADATA = "__metadata__"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_BOOKKEEPING = frozenset({".git", ".cache"})  # folders that clones and downloads keep for themselves


# -- files by position ------------------------------------------------------------------------------------------------


class _OpenFile:
    """A file that several threads read and write by position."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        try:
            self._fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise _storage_error(error, path) from error
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, os.close, self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> Array:
        parts = []
        try:
            while length:
                part = self._read_some(offset, length)
                if not part:
                    raise FormatError(f"{self.path} ends {length} bytes too early; it was cut short: fetch or save it again")
                parts.append(part)
                offset += len(part)
                length -= len(part)
        except OSError as error:
            raise _storage_error(error, self.path) from error
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)

    def write(self, offset: int, data: Array | bytes) -> None:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                count = self._write_some(offset, rest)
                offset += count
                rest = rest[count:]
        except OSError as error:
            raise _storage_error(error, self.path) from error

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise _storage_error(error, self.path) from error

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise _storage_error(error, self.path) from error

    def _read_some(self, offset: int, length: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._fd, length, offset)
        with self._lock:  # Windows
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.read(self._fd, length)

    def _write_some(self, offset: int, data: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._fd, data, offset)
        with self._lock:
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.write(self._fd, data)


def _storage_error(error: OSError, path: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFullError(f"no space left for {path}: {error.strerror}; free some and try again")
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"there is no file {path}")
    if isinstance(error, PermissionError):
        return StorageError(f"{path}: {error.strerror}; check who may use it", "denied")
    return StorageError(f"{path}: {error.strerror}; try again", "io")


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileSource:
    """A tensor in a safetensors file. See `TensorSource`."""

    dtype: str
    shape: tuple[int, ...]
    frozen: bool
    _file: _OpenFile
    _offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def read(self, start: int, stop: int) -> Array:
        """Bytes of elements [start, stop), a fresh read-only array. Raises FormatError when the file is too short by now."""
        _check_range(start, stop, self.shape)
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
    file = _OpenFile(path, os.O_RDONLY)
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


def _parse_entry(name: str, entry: Any, file: _OpenFile, base: int) -> tuple[FileSource, int]:
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


def _are_sizes(value: Any) -> bool:
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


def _check_range(start: int, stop: int, shape: tuple[int, ...]) -> None:
    if not 0 <= start <= stop <= math.prod(shape):
        raise InvalidInputError(f"[{start}, {stop}) is no range of the {math.prod(shape)} elements of the tensor")


# -- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint on disk holds: tensors by name, other files by posix relative name, texts of `__metadata__`."""

    tensors: dict[str, FileSource]
    files: dict[str, Path]
    metadata: dict[str, str]

    def flat_state(self) -> FlatState:
        """The same state as a plain dict of these tensors."""
        return flatten(self.tensors, lambda value: isinstance(value, FileSource))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a `.safetensors` file, or a folder with one, or with shards and their index; reads headers only.

    Tensors come in the order of the file, or of the index. All other files of a folder are listed, except in `.git` and
    `.cache`. Raises NotFoundError, FormatError when index and shards disagree, InvalidInputError for a folder whose weights are
    ambiguous, and for files that are larger than 64 MiB or not plain files.
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
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidInputError(f"{path} has {size} bytes; files beside the weights may have {MAX_FILE_BYTES}: move it away")
        files[name] = path
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name not in _BOOKKEEPING:
                yield from _walk(path)
        else:
            yield path


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its file: `offset` is absolute."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file to write: its `head` (length and header), the place of every tensor, and its size in bytes."""

    filename: str
    head: bytes
    places: Mapping[str, Place]
    size: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The files that a set of tensors is written to; `index` is the text of model.safetensors.index.json, if one is due."""

    shards: tuple[Shard, ...]
    index: bytes | None

    @property
    def filenames(self) -> list[str]:
        """Every file that will be written."""
        return [shard.filename for shard in self.shards] + ([INDEX_NAME] if self.index is not None else [])


def plan_shards(entries: Iterable[tuple[str, str, tuple[int, ...]]], max_shard_bytes: int = 5 << 30) -> ShardPlan:
    """Plan the files for (name, dtype name, shape) entries, in order, each with at most `max_shard_bytes` of tensors.

    A tensor that is larger gets a file of its own. Raises IncompatibleStateError, before anything is written, for duplicate
    names, the name `__metadata__`, and dtypes that safetensors files can't hold.
    """
    if max_shard_bytes <= 0:
        raise InvalidInputError(f"max_shard_bytes is {max_shard_bytes}; expected a positive number of bytes")
    groups: list[list[tuple[str, str, tuple[int, ...], str]]] = [[]]
    used = header = 0
    seen: dict[str, int] = {}
    for position, (name, dtype, shape) in enumerate(entries):
        if name in seen:
            raise IncompatibleStateError(
                f"tensors {seen[name]} and {position} both have the name {show(name)}; rename one of them before saving"
            )
        seen[name] = position
        fields = _header_fields(name, dtype, shape)
        nbytes = math.prod(shape) * dtype_of(dtype).itemsize
        length = len(fields.encode()) + 48  # and two offsets of up to 20 digits
        if length + 64 > MAX_HEADER_BYTES:
            raise IncompatibleStateError(f"the tensor name {show(name)} is too long for a safetensors header; rename it")
        if groups[-1] and (used + nbytes > max_shard_bytes or header + length + 64 > MAX_HEADER_BYTES):
            groups.append([])
            used = header = 0
        groups[-1].append((name, dtype, shape, fields))
        used += nbytes
        header += length
    if len(groups) == 1:
        return ShardPlan((_lay_out(WEIGHTS_NAME, groups[0]),), None)
    shards = tuple(
        _lay_out(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups, start=1)
    )
    index = {
        "metadata": {"total_size": sum(place.nbytes for shard in shards for place in shard.places.values())},
        "weight_map": {name: shard.filename for shard in shards for name in shard.places},
    }
    return ShardPlan(shards, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())


def _header_fields(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    kind = dtype_of(dtype)
    file_shape = kind.file_shape(shape)
    if name == METADATA:
        raise IncompatibleStateError(f"a tensor is named {METADATA}, which safetensors files reserve; rename it before saving")
    if kind.safetensors is None or file_shape is None:
        raise IncompatibleStateError(
            f"tensor {show(name)} is {dtype} of shape {list(shape)}, which safetensors files can't hold; "
            "load it with `snapshot.state()`, or convert it and commit again"
        )
    sizes = ",".join(map(str, file_shape))
    return f'{json.dumps(name, ensure_ascii=False)}:{{"dtype":"{kind.safetensors}","shape":[{sizes}],"data_offsets":'


def _lay_out(filename: str, group: list[tuple[str, str, tuple[int, ...], str]]) -> Shard:
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    # Wide elements first, so that every tensor is aligned; the header keeps the order of the state.
    for name, dtype, shape, _ in sorted(group, key=lambda entry: -dtype_of(entry[1]).itemsize):
        begin, end = end, end + math.prod(shape) * dtype_of(dtype).itemsize
        offsets[name] = (begin, end)
    texts = [f"{fields}[{offsets[name][0]},{offsets[name][1]}]}}" for name, _, _, fields in group]
    header = ("{" + ",".join([f'"{METADATA}":{{"format":"pt"}}', *texts]) + "}").encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    places = {
        name: Place(dtype, tuple(shape), len(head) + offsets[name][0], offsets[name][1] - offsets[name][0])
        for name, dtype, shape, _ in group
    }
    return Shard(filename, head, places, len(head) + end)


@dataclass(frozen=True, slots=True)
class FileSink:
    """A tensor in a file that is being written. See `TensorSink`."""

    dtype: str
    shape: tuple[int, ...]
    _file: _OpenFile
    _offset: int

    def view(self, start: int, stop: int) -> None:  # a mapped page of a full disk would kill the process
        """None: bytes reach a file by `write` only."""
        _check_range(start, stop, self.shape)

    def write(self, start: int, stop: int, data: Array) -> None:
        """Write the bytes of elements [start, stop). Raises StoreFullError and StorageError."""
        _check_range(start, stop, self.shape)
        itemsize = dtype_of(self.dtype).itemsize
        if data.nbytes != (stop - start) * itemsize:
            raise InvalidInputError(f"[{start}, {stop}) takes {(stop - start) * itemsize} bytes, got {data.nbytes}")
        self._file.write(self._offset + start * itemsize, data)


class SafetensorsWriter:
    """Writes the files of a plan into a folder: tensors in any order, in ranges, from several threads.

    Leaving the block without an error syncs every file. The files must not exist yet. Raises StoreFullError, StorageError.
    """

    def __init__(self, folder: str | os.PathLike[str], plan: ShardPlan) -> None:
        self._folder = Path(folder)
        self._plan = plan
        self._files: list[_OpenFile] = []
        self._sinks: dict[str, FileSink] = {}

    def __enter__(self) -> Self:
        try:
            for shard in self._plan.shards:
                file = self._create(shard.filename, shard.head, shard.size)
                for name, place in shard.places.items():
                    self._sinks[name] = FileSink(place.dtype, place.shape, file, place.offset)
            if self._plan.index is not None:
                self._create(INDEX_NAME, self._plan.index, len(self._plan.index))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                for file in self._files:
                    file.sync()
        finally:
            self._close()

    def sink(self, name: str) -> FileSink:
        """Where the bytes of the tensor of this name go."""
        return self._sinks[name]

    def _create(self, filename: str, head: bytes, size: int) -> _OpenFile:
        file = _OpenFile(self._folder / filename, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._files.append(file)
        file.write(0, head)
        file.truncate(size)
        return file

    def _close(self) -> None:
        for file in self._files:
            file.close()
