"""What a bucket is: a flat space of immutable objects. The rest of the library knows nothing else of storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from deltastore.buffers import byte_count
from deltastore.errors import InvalidInputError
from deltastore.layout import FOLDERS, STORE_KEY, shorten

if TYPE_CHECKING:
    from deltastore.buffers import Bytes

MAX_KEY_BYTES = 1024
MAX_COMPONENT_BYTES = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """An object to be written: its key, and its bytes in pieces that are never joined."""

    key: str
    pieces: Sequence[Bytes]

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return byte_count(self.pieces)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object that is there: size in bytes, and when it was written by the bucket's own clock (UTC)."""

    key: str
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a bucket can do besides the protocol.

    Attributes:
        exclusive: `put` and `copy` notice another writer's object under the same key, also in a race.
        server_copy: `copy` moves no bytes through this machine.
        local: reads cost no network round trip, so nothing is gained by caching them.
        persistent: objects outlive the process.
    """

    exclusive: bool
    server_copy: bool
    local: bool
    persistent: bool


class Bucket(Protocol):
    """A store's objects. Thread-safe. Keys are those of `layout`; others are refused with InvalidInputError.

    Failures are StorageError with `kind` "missing", "truncated", "denied", "timeout" or "io", StoreFullError and
    ReadOnlyError.
    """

    @property
    def url(self) -> str:
        """The address that `open_bucket` opens again."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do besides this protocol."""

    def put(self, uploads: Sequence[Upload]) -> None:
        """Write objects; durable at return. Each appears whole or not at all, the batch may appear in part.

        Raises:
            AlreadyExistsError: a key is taken by other content (the same content is fine: a retry).
            StoreFullError: no space or quota left.
        """

    def get(self, key: str) -> bytes:
        """A whole object. Raises StorageError("missing")."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly the bytes [start, start + length). Raises StorageError("truncated") when the object is shorter."""

    def stat(self, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
        """What is there under each key; None: nothing."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects in a folder such as "refs/log", or with "" in the store. The prefix is whole path components."""

    def copy(self, source: str, target: str) -> None:
        """Write an object that equals another. Raises like `get` and `put`."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are skipped."""

    def free_bytes(self) -> int | None:
        """Bytes that may still be written; None where there is no such limit or nobody can tell."""

    def close(self) -> None:
        """Give back connections and the like."""


def check_key(key: str) -> str:
    """A key from anywhere, checked: no way out of the store, nothing that is not a store's.

    Raises:
        InvalidInputError: otherwise.
    """
    parts = check_path(key)
    if key != STORE_KEY and (len(parts) < 2 or parts[0] not in FOLDERS):
        raise InvalidInputError(
            f"{shorten(key)} is not the key of an object: expected {STORE_KEY}, or a path in {', '.join(FOLDERS)}"
        )
    return key


def check_prefix(prefix: str) -> str:
    """A prefix for `list`, checked like a key: "", "store.json", a folder, or a folder in it; no slash at its end.

    Raises:
        InvalidInputError: otherwise.
    """
    if prefix and prefix != STORE_KEY and check_path(prefix)[0] not in FOLDERS:
        raise InvalidInputError(f"{shorten(prefix)} is not a folder of a store: expected one of {', '.join(FOLDERS)}")
    return prefix


def check_path(path: str) -> list[str]:
    """The components of a relative path that is safe on every kind of bucket. Raises InvalidInputError."""
    parts = path.split("/")
    try:
        lengths = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        lengths = [0]
    safe = all(0 < length <= MAX_COMPONENT_BYTES for length in lengths) and sum(lengths) + len(parts) <= MAX_KEY_BYTES
    if not safe or "\0" in path or "\\" in path or any(part in (".", "..") for part in parts):
        raise InvalidInputError(
            f"{shorten(path)} is not the key of an object: a key is a relative path of at most {MAX_KEY_BYTES} bytes, "
            f"its parts have 1 to {MAX_COMPONENT_BYTES} bytes, none is '.' or '..', there is no backslash and no NUL"
        )
    return parts


def in_folder(key: str, prefix: str) -> bool:
    """Whether a key lies in a folder, counted in whole path components; "" is the whole store."""
    return not prefix or key == prefix or key.startswith(f"{prefix}/")
