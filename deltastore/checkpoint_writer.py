"""Checkpoints written as safetensors files: planned before a byte is written, filled in any order, then moved into place.

Files are built in a hidden folder beside the target, or inside it when it exists, synced, and moved in with the index last.
Layout and names are those of Hugging Face checkpoints: `model.safetensors`, or `model-00001-of-00002.safetensors` … with
`model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from deltastore.canonical import show
from deltastore.dtypes import dtype_of
from deltastore.errors import AlreadyExistsError, IncompatibleStateError, InvalidInputError
from deltastore.open_file import OpenFile, storage_error
from deltastore.space import require_space
from deltastore.state import Array, check_range

MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
METADATA = "__metadata__"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype name, shape in storage elements


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


def plan_shards(entries: Iterable[Entry], max_shard_bytes: int = 5 << 30, units: Mapping[str, str] | None = None) -> ShardPlan:
    """Plan the files for (name, dtype name, shape) entries, in order, each with at most `max_shard_bytes` of tensors.

    A tensor that is larger gets a file of its own. Neighbours that `units` gives one name stay in one file, unless they are
    larger together than `max_shard_bytes`. Raises IncompatibleStateError, before anything is written, for duplicate
    names, the name `__metadata__`, and dtypes that safetensors files can't hold.
    """
    if max_shard_bytes <= 0:
        raise InvalidInputError(f"max_shard_bytes is {max_shard_bytes}; expected a positive number of bytes")
    groups: list[list[tuple[str, str, tuple[int, ...], str]]] = [[]]
    used = header = 0
    seen: dict[str, int] = {}
    entries = list(entries)
    together = _bytes_together(entries, units or {})
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
        whole = together.get(position, nbytes)
        if whole > max_shard_bytes:
            whole = nbytes
        if groups[-1] and (used + whole > max_shard_bytes or header + length + 64 > MAX_HEADER_BYTES):
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


def _bytes_together(entries: Sequence[Entry], units: Mapping[str, str]) -> dict[int, int]:
    """Position of the first entry of each unit -> bytes of the whole unit."""
    found: dict[int, int] = {}
    first, unit = 0, None
    for position, (name, dtype, shape) in enumerate(entries):
        if units.get(name) is None or units[name] != unit:
            first, unit = position, units.get(name)
        if unit is not None:
            found[first] = found.get(first, 0) + math.prod(shape) * dtype_of(dtype).itemsize
    return found


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
    _file: OpenFile
    _offset: int

    def view(self, start: int, stop: int) -> None:  # a mapped page of a full disk would kill the process
        """None: bytes reach a file by `write` only."""
        check_range(start, stop, self.shape)

    def write(self, start: int, stop: int, data: Array) -> None:
        """Write the bytes of elements [start, stop). Raises StoreFullError and StorageError."""
        check_range(start, stop, self.shape)
        itemsize = dtype_of(self.dtype).itemsize
        if data.nbytes != (stop - start) * itemsize:
            raise InvalidInputError(f"[{start}, {stop}) takes {(stop - start) * itemsize} bytes, got {data.nbytes}")
        self._file.write(self._offset + start * itemsize, data)


class CheckpointWriter:
    """Writes tensors and other files into a folder, all of them or none: nothing is in place before `finish()`.

        with CheckpointWriter(folder, [(name, dtype, shape), ...]) as writer:
            writer.sink(name).write(start, stop, data)      # in any order, from several threads
            writer.add_file("config.json", data)
            written = writer.finish()

    Raises AlreadyExistsError when the folder has weights and `overwrite` is not given; else what `plan_shards` raises,
    StoreFullError, before anything is written when it can be foreseen, and StorageError. With `overwrite`, weight files named
    by the old or the new index are replaced, others left. `extra_bytes` is the size of the files that will be added.
    """

    def __init__(
        self,
        folder: Path,
        entries: Iterable[Entry],
        *,
        max_shard_bytes: int = 5 << 30,
        overwrite: bool = False,
        extra_bytes: int = 0,
        units: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._plan = plan_shards(entries, max_shard_bytes, units)
        self._overwrite = overwrite
        self._bytes = extra_bytes + len(self._plan.index or b"") + sum(shard.size for shard in self._plan.shards)
        self._files: dict[str, OpenFile] = {}
        self._sinks: dict[str, FileSink] = {}
        self._staging: Path | None = None

    def __enter__(self) -> Self:
        try:
            self._refuse_existing([*self._plan.filenames, WEIGHTS_NAME, INDEX_NAME])
            require_space(self._folder, self._bytes, f"writing a checkpoint to {self._folder}")
            inside = self._folder.is_dir()
            parent = self._folder if inside else self._folder.absolute().parent
            parent.mkdir(parents=True, exist_ok=True)
            self._staging = parent / f".deltastore-{uuid.uuid4().hex}.partial"
            self._staging.mkdir()
            for shard in self._plan.shards:
                file = self._create(shard.filename)
                file.write(0, shard.head)
                file.truncate(shard.size)
                for name, place in shard.places.items():
                    self._sinks[name] = FileSink(place.dtype, place.shape, file, place.offset)
            if self._plan.index is not None:
                self._create(INDEX_NAME).write(0, self._plan.index)
        except OSError as error:
            self._discard()
            raise storage_error(error, self._folder) from error
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()

    def sink(self, name: str) -> FileSink:
        """Where the bytes of the tensor of this name go."""
        return self._sinks[name]

    def add_file(self, name: str, data: bytes) -> None:
        """Add another file under its posix relative name. Raises InvalidInputError for names that leave the folder."""
        self._add(name).write(0, data)

    def file_sink(self, name: str, size: int) -> FileSink:
        """Where the bytes of another file go, as those of a tensor of uint8. Raises as `add_file`."""
        file = self._add(name)
        file.truncate(size)
        return FileSink("uint8", (size,), file, 0)

    def _add(self, name: str) -> OpenFile:
        parts = name.split("/")
        if any(part in ("", ".", "..", ".git") for part in parts) or any(sign in name for sign in "\\:\0"):
            raise InvalidInputError(f"the file name {show(name)} is not one that can be written below {self._folder}")
        if name in self._files:
            raise InvalidInputError(f"the file {show(name)} would replace a weight file of the same name; leave it out")
        return self._create(name)

    def finish(self) -> list[Path]:
        """Sync everything and move it into place. Returns the paths that were written."""
        assert self._staging is not None, "finish() belongs inside the with block"
        self._refuse_existing(self._files)
        try:
            stale = self._old_weights() - self._files.keys()
            for file in self._files.values():
                file.sync()
                file.close()
            names = sorted(self._files, key=lambda name: name == INDEX_NAME)  # the index last: it vouches for the shards
            folders = {Path(name).parent for name in names} | {Path()}
            for folder in folders:
                _sync_folder(self._staging / folder)
            if not self._folder.exists():
                self._staging.rename(self._folder)
            for name in names if self._staging.exists() else ():
                target = self._folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (self._staging / name).replace(target)
            for name in stale:
                (self._folder / name).unlink(missing_ok=True)
            for folder in folders:
                _sync_folder(self._folder / folder)
            _sync_folder(self._folder.absolute().parent)
        except OSError as error:
            raise storage_error(error, self._folder) from error
        return [self._folder / name for name in names]

    def _refuse_existing(self, names: Iterable[str]) -> None:
        if self._folder.exists() and not self._folder.is_dir():
            raise AlreadyExistsError(f"{self._folder} is a file; name a folder")
        found = [name for name in dict.fromkeys(names) if os.path.lexists(self._folder / name)]
        if found and not self._overwrite:
            raise AlreadyExistsError(f"{self._folder} has {show(found)} already; choose another folder, or pass overwrite=True")

    def _old_weights(self) -> set[str]:
        """Weight files of the checkpoint that was in the folder, by its index; only names of plain files beside it."""
        old = {WEIGHTS_NAME}
        index = self._folder / INDEX_NAME
        if index.is_file():
            old.add(INDEX_NAME)
            try:
                shards = json.loads(index.read_bytes())["weight_map"].values()
                old.update(name for name in shards if name.endswith(".safetensors") and Path(name).name == name)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                pass  # no index that names anything
        return old

    def _create(self, name: str) -> OpenFile:
        assert self._staging is not None
        path = self._staging / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, path.parent) from error
        self._files[name] = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return self._files[name]

    def _discard(self) -> None:
        for file in self._files.values():
            file.close()
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # others can't open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
