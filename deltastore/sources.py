"""What can be committed: modules, nested states, streams of named tensors, weight files and checkpoint folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deltastore import files, offload, pickled, tensors
from deltastore.errors import IncompatibleStateError, InvalidInputError
from deltastore.options import MAX_FILE_BYTES
from deltastore.state import FlatState, TensorSource, flatten

HELD_FILE_BYTES = 1 << 20  # larger files of a folder are read while they are committed


def flattened(
    source: Any, cast: Mapping[str, Any] | None, resolver: Callable[[str], Any] | None = None
) -> tuple[FlatState | Iterator[tuple[str, TensorSource]], dict[str, bytes | TensorSource]]:
    """The state of any source, and the files that it brings by itself. Reads no tensor bytes.

    `resolver` gives the values of tensors on the meta device, by name, when they are read.

    Raises:
        IncompatibleStateError: something in it can't be stored; names it and the conversion to use.
    """
    if isinstance(source, (str, os.PathLike)):
        checkpoint = files.open_checkpoint(Path(source))
        state = checkpoint_state(checkpoint)
        return (state if cast is None else tensors.cast_state(state, cast)), {
            name: folder_file(path) for name, path in checkpoint.files.items()
        }
    if isinstance(source, Iterator):
        return tensors.iterable_sources(source, cast), {}
    resolve = None if resolver is None else offload.Offload(resolver).source
    return tensors.flatten_state(source, cast, resolve), dict(tensors.module_files(source))


def folder_file(path: Path) -> bytes | TensorSource:
    """A file of a checkpoint folder: its bytes, or a source of them when it is large."""
    return files.open_file_bytes(path) if path.stat().st_size > HELD_FILE_BYTES else path.read_bytes()


def checkpoint_state(checkpoint: files.Checkpoint) -> FlatState:
    """The state that a checkpoint holds: a plain dict of the tensors of safetensors files, or all that was pickled.

    Raises:
        FormatError: a pickled file is damaged, or is none.
        IncompatibleStateError: a pickled file holds what is no data, or what a state can't hold.
        MissingDependencyError: it takes torch to read a pickled file.
    """
    if checkpoint.pickled is None:
        return flatten(checkpoint.tensors, lambda value: isinstance(value, files.FileSource))
    content = pickled.load_weights(checkpoint.pickled)
    path = checkpoint.pickled.path
    try:
        state = tensors.flatten_state(content)
    except IncompatibleStateError as error:
        raise IncompatibleStateError(
            f"{path}: {error}, in what is saved there, or load it and commit the parts that matter"
        ) from None
    if not state.tensors:
        raise IncompatibleStateError(f"{path} holds no tensors; name a file with weights")
    return state


def file_bytes(name: str, value: str | os.PathLike[str] | bytes) -> bytes:
    """The content of one of `files=`. Raises InvalidInputError when it can't be read or is too large."""
    if isinstance(value, bytes):
        _check_size(name, len(value))
        return value
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidInputError(f"file {name!r} is a {type(value).__name__}; expected a path or bytes")
    path = Path(value)
    try:
        if path.exists() and not path.is_file():
            raise InvalidInputError(f"file {name!r}: {value} is no plain file; name a file, or give its bytes")
        _check_size(name, path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"file {name!r}: {value} can't be read: {error.strerror}") from error


def _check_size(name: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise InvalidInputError(
            f"file {name!r} has {size} bytes; files= takes up to {MAX_FILE_BYTES} each: put it into the state as a tensor, or "
            "commit a folder that holds it"
        )
