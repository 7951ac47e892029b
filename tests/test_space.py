"""Free space, and what a commit will take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltastore.errors import StoreFullError
from deltastore.space import COMMIT_OVERHEAD, MIN_FREE, estimate_commit_bytes, free_bytes, refuse_if_full, require_space


def test_free_bytes_are_those_of_the_nearest_folder(tmp_path: Path) -> None:
    found = free_bytes(tmp_path / "not" / "there" / "yet")
    system = os.statvfs(tmp_path)
    assert found is not None
    assert abs(found - system.f_bavail * system.f_frsize) < 1 << 30
    (tmp_path / "file").write_bytes(b"x")
    assert free_bytes(tmp_path / "file" / "below") is not None


def test_too_little_space(tmp_path: Path) -> None:
    require_space(tmp_path, 1, "this")
    free = free_bytes(tmp_path)
    assert free is not None
    with pytest.raises(StoreFullError, match=rf"^saving it needs about .* bytes, {tmp_path} has .* free; nothing was changed"):
        require_space(tmp_path, free + (1 << 40), "saving it")


def test_the_reserve_stays_free() -> None:
    refuse_if_full(1000 + MIN_FREE, 1000, "this", "here")
    refuse_if_full(None, 1 << 60, "this", "nowhere")
    with pytest.raises(StoreFullError) as caught:
        refuse_if_full(999 + MIN_FREE, 1000, "this", "here")
    assert caught.value.exit_code == 14


def test_estimate() -> None:
    assert estimate_commit_bytes({"bfloat16": 1000, "float16": 1000, "float32": 1000, "int64": 1000}) == 3250 + COMMIT_OVERHEAD
    assert estimate_commit_bytes({}) == COMMIT_OVERHEAD
    assert estimate_commit_bytes({"float32": 10**6}, [5, 900, 7]) == 900 + COMMIT_OVERHEAD
    assert estimate_commit_bytes({"bfloat16": 1000}, [10**9]) == 700 + COMMIT_OVERHEAD
