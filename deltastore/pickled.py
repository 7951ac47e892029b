"""Files of `torch.save`: loaded as data only, by torch's own reader of weights. Nothing in them is ever called.

`torch.load(weights_only=True)` builds tensors, containers and plain values, and refuses every other name that the pickle asks
for. Tensors of zip archives stay in the file, mapped into memory, until they are read: the file must not be cut short meanwhile.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltastore.canonical import show
from deltastore.errors import DeltaStoreError, FormatError, IncompatibleStateError, MissingDependencyError, NotFoundError
from deltastore.open_file import OpenFile, storage_error
from deltastore.torch_import import import_torch
from deltastore.weights import Weights, merge_shards

_ZIP_MAGIC = b"PK\x03\x04"
_CONVERT = "convert it with the tool that made it, for example to safetensors"

# What torch says of a file that is whole, but needs more than data. All else means damage, or another format.
_REFUSED_GLOBAL = re.compile(r"GLOBAL (\S+)|unrecognized function (.+)|[Cc]an only (?:build|create new object) .*?got (.+)")
_REFUSED_KINDS = {
    "TorchScript": "a TorchScript archive, a program",
    "``.tar`` format": "a tar archive of a very old torch",
    "must be imported to load": "the state of distributed or nested tensors",
    "'torch.storage.UntypedStorage' has no attribute 'dtype'": "in torch's old format, which it can't load with these dtypes",
}


def load_weights(weights: Weights) -> Any:
    """The content of pickled weights: what was saved, or the dict of all shards. Errors: those of `load_pickled`, and FormatError
    when shards and index disagree."""
    if weights.index is None:
        return load_pickled(weights.folder / weights.shards[0])
    return merge_shards(weights, {shard: _load_shard(weights.folder / shard) for shard in weights.shards})


def _load_shard(path: Path) -> Mapping[str, Any]:
    content = load_pickled(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path} holds a {type(content).__name__}; expected a dict of tensors, as in all shards: save it again")
    return content


def load_pickled(path: Path) -> Any:
    """What `torch.save` put into a file, with its tensors on the CPU.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it was not made by `torch.save`, or is damaged.
        IncompatibleStateError: it holds more than tensors, containers and plain values.
        MissingDependencyError: torch is not installed, or too old to read such a file safely.
    """
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}; expected a file of `torch.save`")
    torch = _torch(path)
    mapped = _can_be_mapped(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except OSError as error:
        raise storage_error(error, path) from error
    except Exception as error:  # a damaged pickle makes torch raise anything
        raise _explained(path, str(error)) from None


def _torch(path: Path) -> Any:
    torch = import_torch(f"to read {path}")
    if torch.__version__ < (2, 6):  # its `weights_only` could be made to run code
        raise MissingDependencyError(
            f"torch {torch.__version__} can't read {path} safely; run `pip install --upgrade 'deltastore[torch]'`"
        )
    return torch


def _can_be_mapped(path: Path) -> bool:
    """Whether tensors lie in the file as they are: in a zip archive that no other tool has compressed since."""
    file = OpenFile(path, os.O_RDONLY)
    try:
        if file.size() < len(_ZIP_MAGIC) or file.read(0, len(_ZIP_MAGIC)).tobytes() != _ZIP_MAGIC:
            return False
    finally:
        file.close()
    try:
        with zipfile.ZipFile(path) as archive:
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise FormatError(f"{path}: the end of the zip archive is missing or damaged; fetch or save the file again") from None


def _explained(path: Path, text: str) -> DeltaStoreError:
    """What torch's error says of a file, without its advice to trust the file."""
    refused = _REFUSED_GLOBAL.search(text)
    if refused is not None:
        name = next(group for group in refused.groups() if group).strip()
        return IncompatibleStateError(
            f"{path} asks for {show(name)}, and only tensors, containers and plain values are loaded from it; {_CONVERT}"
        )
    for mark, kind in _REFUSED_KINDS.items():
        if mark in text:
            return IncompatibleStateError(f"{path} is {kind}, and can't be read as plain tensors; {_CONVERT}")
    lines = text.partition("WeightsUnpickler error:")[2].strip().splitlines() or text.strip().splitlines()
    sentence = bool(lines) and " " in lines[0] and "weights_only" not in lines[0]  # a damaged pickle gives a KeyError: 101
    reason = lines[0][:200] if sentence else "it can't be parsed"
    return FormatError(f"{path} is damaged or was not made by `torch.save`: {reason}; fetch or save it again")
