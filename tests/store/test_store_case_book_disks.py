"""Failures that users of neighbouring tools met, with pending commits (C41) and on disks (C43 to C49).

C42 stands in tests/faults/test_kill_points.py and test_kill_calls.py, C44 in test_full_disk.py, C45 in test_store_baselines.py,
C46 in tests/index/test_file.py and tests/faults/test_writers.py, C47 in tests/test_cache_folder.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from store_states import same

from deltastore import DeltaStore
from deltastore.errors import RevisionNotFoundError


def test_c41_a_commit_in_the_background_is_seen_by_what_follows(store: DeltaStore) -> None:
    weights = {"w": torch.randn(50_000)}
    expected = []
    for step in range(6):
        weights["w"].mul_(1.01)
        expected.append(weights["w"].clone())
        pending = store.commit(weights, f"step {step}", metadata={"step": step}, wait=False)
        assert pending.phase in ("scanned", "encoded", "visible")
        weights["w"].zero_()
        assert same(store.checkout("main").load()["w"], expected[-1])
        assert pending.phase == "visible"
        assert pending.result() == store.get_commit("main")
        weights["w"].copy_(expected[-1])
    store.commit(weights, "last", wait=False)
    store.create_tag("best", revision="main")
    assert store.get_commit("best").message == "last"


def test_c43_a_copied_store_is_a_store(store: DeltaStore, folder: Path, tmp_path: Path) -> None:
    for step in range(10):
        store.commit({"w": torch.full((3000,), float(step))}, str(step))
    store.close()
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, copy, ignore=lambda _, names: [name for name in names if name == ".staging"])
    shutil.rmtree(folder)
    with DeltaStore(copy) as moved:
        assert moved.verify(read_data=True)
        assert [commit.message for commit in moved.list_commits()] == [str(step) for step in range(9, -1, -1)]
        moved.commit({"w": torch.zeros(3000)}, "goes on")
        assert moved.checkout("main~1")["w"][0].load().item() == 9.0
        with pytest.raises(RevisionNotFoundError):
            moved.checkout("main~11")


def test_c48_paths_are_short_plain_and_no_links(store: DeltaStore, folder: Path) -> None:
    store.commit({"n" * 5000: torch.randn(10), "ü/../x": torch.zeros(3)}, files={"a/b/c": bytes(5000)})
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        assert not path.is_symlink()
        assert len(name) < 150
        assert re.fullmatch(r"[a-z0-9._/-]+", name), name


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what is mapped on Linux only")
def test_c49_objects_are_read_not_mapped(store: DeltaStore, folder: Path) -> None:
    """A page fault over the network is slow, and an error in one kills the process."""
    store.commit({"w": torch.randn(2_000_000)})
    snapshot = store.checkout()
    part = snapshot["w"][5:1_500_000].load()
    loaded = snapshot.load()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert not [line for line in mapped if not line.rstrip().endswith("-shm")]  # SQLite's own
    assert same(part, loaded["w"][5:1_500_000])
