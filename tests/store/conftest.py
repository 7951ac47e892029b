from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltastore import DeltaStore
from deltastore.buckets.folder import FolderBucket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[DeltaStore]:
    with DeltaStore.create(folder) as opened:
        yield opened


class Traffic:
    """What passes between a folder and the library: (key, start, length) of reads, keys of writes."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.writes: list[str] = []

    def read_keys(self, kind: str) -> list[str]:
        return [key for key, _, _ in self.reads if key.startswith(kind)]

    def read_bytes(self, kind: str) -> int:
        return sum(length for key, _, length in self.reads if key.startswith(kind))

    def written(self, kind: str) -> list[str]:
        return [key for key in self.writes if key.startswith(kind)]

    def clear(self) -> None:
        self.reads.clear()
        self.writes.clear()


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Records the calls of all folder buckets, which do their work as ever."""
    seen = Traffic()
    get, get_range, put = FolderBucket.get, FolderBucket.get_range, FolderBucket.put  # copy puts what it got

    def recorded_get(self: FolderBucket, key: str) -> bytes:
        data = get(self, key)
        seen.reads.append((key, 0, len(data)))
        return data

    def recorded_range(self: FolderBucket, key: str, start: int, length: int) -> bytes:
        data = get_range(self, key, start, length)
        seen.reads.append((key, start, len(data)))
        return data

    def recorded_put(self: FolderBucket, uploads: Any) -> None:
        put(self, uploads)
        seen.writes.extend(upload.key for upload in uploads)

    monkeypatch.setattr(FolderBucket, "get", recorded_get)
    monkeypatch.setattr(FolderBucket, "get_range", recorded_range)
    monkeypatch.setattr(FolderBucket, "put", recorded_put)
    return seen
