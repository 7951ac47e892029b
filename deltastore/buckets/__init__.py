"""Where objects are: a folder, or memory."""

from __future__ import annotations

import os
import threading
from urllib.parse import unquote, urlsplit

from deltastore.buckets.base import Bucket, Capabilities, ObjectInfo, Upload
from deltastore.buckets.folder import FolderBucket
from deltastore.buckets.memory import MemoryBucket
from deltastore.errors import InvalidInputError

__all__ = ["Bucket", "Capabilities", "FolderBucket", "MemoryBucket", "ObjectInfo", "Upload", "open_bucket"]

_memory: dict[str, MemoryBucket] = {}
_memory_lock = threading.Lock()


def open_bucket(address: str | os.PathLike[str]) -> Bucket:
    """The bucket at an address: a path, `file:///path`, or `memory://name` (shared by this process). Touches nothing.

    Raises:
        InvalidInputError: an address of another kind, also `hf://` and `s3://`, which this version does not have.
    """
    text = os.fspath(address)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInputError(f"{text!r} is not the address of a store; give a folder")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return FolderBucket(text)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidInputError(f"{text!r} is not the address of a folder here; write file:///path, or just the path")
        return FolderBucket(unquote(parts.path))
    if scheme == "memory":
        if not rest or "/" in rest:
            raise InvalidInputError(f"{text!r} is not the address of a store in memory; write memory://name")
        with _memory_lock:
            return _memory.setdefault(rest, MemoryBucket(rest))
    if scheme in ("hf", "s3"):
        raise InvalidInputError(f"{text!r}: {scheme}:// is not in this version of deltastore; use a folder, or upgrade")
    raise InvalidInputError(f"{text!r}: unknown kind of address; use a folder, file:///path or memory://name")
