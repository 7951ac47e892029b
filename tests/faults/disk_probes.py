"""Disks that are full or broken. Functions that tests call in forks of `child.py`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_shim
import numpy as np
from safetensors.numpy import save_file
from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_store import commit_next, copy_store, prepare, refs_of_open

from deltastore import DeltaStore
from deltastore.errors import DeltaStoreError, StoreFullError


def commit_above_size_limit(folder: str) -> None:
    """No file may grow beyond 2 MiB: a commit of more is refused, and one of less works."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    prepare(folder, 3)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _noise(3 << 20) as path, DeltaStore(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
        for _ in range(2):
            _assert_refused_as_full(store, path)
            commit_next(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        store.commit(path, branch="large", metadata={"step": 0})
        assert store.checkout("large")["noise"].nbytes == 3 << 20
        store.delete_branch("large")
        assert_all_exact(store)
        assert_log_dense(store)


def commit_on_a_small_file_system(mount_point: str) -> bool:
    """A file system of 2 MiB that fills up: the commit is refused, and works when there is room. False: can't mount."""
    Path(mount_point).mkdir()
    if not _mount_small(mount_point, "2m"):
        return False
    folder = f"{mount_point}/store"
    prepare(folder, 3)
    filler = Path(mount_point) / "filler"
    with _noise(100_000) as path, DeltaStore(folder) as store:
        for room in (0, 4096, 65536):
            free = os.statvfs(mount_point)
            filler.write_bytes(bytes(free.f_bavail * free.f_frsize - room))
            _assert_refused_as_full(store, path)
            filler.unlink()
            commit_next(store)
        assert_all_exact(store)
        assert_log_dense(store)
    return True


def commit_more_than_fits(mount_point: str) -> bool:
    """10 MB of disk and 20 MB to commit: refused before anything is written, and a run may go on. False: can't mount."""
    Path(mount_point).mkdir()
    if not _mount_small(mount_point, "10m"):
        return False
    folder = f"{mount_point}/store"
    prepare(folder, 3)
    with _noise(20_000_000) as path, DeltaStore(folder) as store:
        before = _files(folder)
        _assert_refused_as_full(store, path, branch="new")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert store.commit(path, "too large", branch="new", on_full="warn") is None
        assert ["too large was not committed" in str(each.message) for each in caught] == [True]
        pending = store.commit(path, branch="new", wait=False, on_full="warn")
        assert pending.phase == "failed"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            commit_next(store)
        assert ["could not be stored" in str(each.message) for each in caught] == [True]
        grown = _files(folder) - before
        assert not {name for name in grown if name.startswith("packs/") and grown[name] > 100_000}
        _assert_refused_as_full(store, path)  # on a branch that has commits it is found out by writing
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            later = [store.commit(path, wait=False, on_full="warn"), store.commit(path, wait=False, on_full="warn")]
            for each in later:
                try:
                    each.result()
                except StoreFullError:
                    continue
                raise AssertionError("a background commit that can't fit was not refused")
        assert not caught  # `result` told
        commit_next(store)
        assert_all_exact(store)
        assert_log_dense(store)
        command = [sys.executable, "-m", "deltastore", "-s", folder, "commit", str(path), "-b", "other"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 14
    return True


def _files(folder: str) -> Counter[str]:
    """Sizes of all files of a store by relative name, but for those of SQLite."""
    root = Path(folder)
    found = {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}
    return Counter({name: size for name, size in found.items() if not name.startswith("index.sqlite")})


@contextlib.contextmanager
def _noise(size: int) -> Iterator[Path]:
    """A file with a tensor of so many bytes that don't compress."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({"noise": np.random.default_rng(1).integers(0, 256, size, np.uint8)}, path)
        yield path


def _assert_refused_as_full(store: DeltaStore, path: Path, branch: str = "main") -> None:
    refs = refs_of_open(store)
    refusal = ""
    try:
        store.commit(path, branch=branch)
    except StoreFullError as error:
        refusal = str(error)
    assert str(store.address) in refusal, f"a commit that can't fit was not refused, or without a word where: {refusal!r}"
    assert refs_of_open(store) == refs


def _mount_small(mount_point: str, size: str) -> bool:
    """Mount a file system that only this process sees: as root, or as root of a user namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_users = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
    user, group = os.getuid(), os.getgid()
    if libc.unshare(new_mounts) != 0:
        if libc.unshare(new_users | new_mounts) != 0:
            return False
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            return False
    recursive_private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: nothing of this is seen outside
    return bool(
        libc.mount(b"none", b"/", None, recursive_private, None) == 0
        and libc.mount(b"tmpfs", os.fsencode(mount_point), b"tmpfs", 0, f"size={size}".encode()) == 0
    )


def fail_at_calls(moments: list[dict[str, Any]]) -> list[str]:
    """Let a commit fail at its n-th system call that changes a file (needs the shim), once for each of `moments`.

    Args:
        moments: of {"template": a store, "number": n, "mode": "full" or "broken"}.

    Returns:
        For each "landed" or the type of the error, or both.
    """
    return [_fail_at_call(**each) for each in moments]


def _fail_at_call(template: str, number: int, mode: str) -> str:
    outcome = []
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = copy_store(template, work)
        try:
            with DeltaStore(folder) as store, warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*log entry could not be written.*")
                before = refs_of_open(store)
                kill_shim.arm(folder, number, mode)
                try:
                    commit_next(store)
                except DeltaStoreError as error:
                    outcome.append(type(error).__name__)
                finally:
                    kill_shim.arm(folder, 0, "count")
                if refs_of_open(store) != before:
                    outcome.insert(0, "landed")
                step = commit_next(store)  # the same store, now that the disk works again
                assert assert_exact(store, "main") == step
                assert store.verify(read_data=True)
                assert_log_dense(store)
        except Exception as error:
            error.add_note(f"after a disk that was {mode} from call {number} on: {outcome}")
            raise
    return ", ".join(outcome)
