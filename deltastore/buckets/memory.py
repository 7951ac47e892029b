"""Objects in this process's memory: for tests, and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from deltastore.buckets.base import Capabilities, ObjectInfo, Upload, check_key, check_prefix, in_folder
from deltastore.buffers import as_memory
from deltastore.errors import AlreadyExistsError, InvalidInputError, StorageError


class MemoryBucket:
    """See `Bucket`. A forked child starts with a copy of what was there."""

    capabilities = Capabilities(exclusive=True, server_copy=True, local=True, persistent=False)

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, datetime]] = {}
        self._lock = threading.Lock()

    def put(self, uploads: Sequence[Upload]) -> None:
        """See `Bucket.put`."""
        joined = [(check_key(each.key), b"".join(as_memory(piece) for piece in each.pieces)) for each in uploads]
        with self._lock:
            for key, data in joined:
                known = self._objects.setdefault(key, (data, datetime.now(UTC)))
                if known[0] != data:
                    raise AlreadyExistsError(
                        f"{self.url}: {key} exists with other content ({len(known[0])} bytes, expected {len(data)}); "
                        "objects are never rewritten, so another writer uses this store: open it anew"
                    )

    def get(self, key: str) -> bytes:
        """See `Bucket.get`."""
        found = self._objects.get(check_key(key))
        if found is None:
            raise StorageError(f"{self.url}: {key} is not there", "missing", key=key)
        return found[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `Bucket.get_range`."""
        if start < 0 or length < 0:
            raise InvalidInputError(f"{key}: can't read {length} bytes at {start}")
        data = self.get(key)
        if start + length > len(data):
            raise StorageError(
                f"{self.url}: {key} has {len(data)} bytes, expected at least {start + length}", "truncated", key=key
            )
        return data[start : start + length]

    def stat(self, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
        """See `Bucket.stat`."""
        found = {key: self._objects.get(check_key(key)) for key in keys}
        return {key: ObjectInfo(key, len(each[0]), each[1]) if each else None for key, each in found.items()}

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Bucket.list`."""
        check_prefix(prefix)
        with self._lock:
            found = sorted((key, each) for key, each in self._objects.items() if in_folder(key, prefix))
        return iter([ObjectInfo(key, len(data), modified) for key, (data, modified) in found])

    def copy(self, source: str, target: str) -> None:
        """See `Bucket.copy`."""
        self.put([Upload(target, [self.get(source)])])

    def delete(self, keys: Iterable[str]) -> None:
        """See `Bucket.delete`."""
        for key in keys:
            self._objects.pop(check_key(key), None)

    def free_bytes(self) -> None:
        """None: memory has no limit that could be asked for."""

    def close(self) -> None:
        """Keeps everything: the same address opens it again."""
