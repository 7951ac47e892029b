from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_traffic import Traffic

from deltastore import DeltaStore
from deltastore.buckets.folder import FolderBucket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[DeltaStore]:
    with DeltaStore.create(folder) as opened:
        yield opened


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
