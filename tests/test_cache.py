"""The cache folder: what is listed, what is deleted, and what is not because somebody uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltastore import cache
from deltastore.cache import CacheEntry, list_entries, plan_cap, plan_prune, run_cleaning
from deltastore.cache_folder import LOCK_NAME, entry_folder, lock_entry

UUID = "8f14e45f-ceea-467f-a8b6-0d3f6c6f2b1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def make(root: Path, number: int, size: int = 100_000, days: float = 0, kind: str = "baseline") -> Path:
    """An entry that was last used some days ago."""
    folder = entry_folder(root, f"{UUID}{number}", kind, "main")
    with lock_entry(folder) or pytest.fail("in use"):
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub" / "data").write_bytes(b"x" * size)
    moment = time.time() - days * 86400
    for path in (folder / "sub" / "data", folder / "sub", folder / LOCK_NAME):
        os.utime(path, (moment, moment))
    return folder


def stores(entries: tuple[CacheEntry, ...] | list[CacheEntry]) -> list[str]:
    return [entry.store[-1] for entry in entries]


def test_nothing_there(root: Path) -> None:
    assert list_entries(root) == []
    report = run_cleaning(plan_prune(root))
    assert (report.deleted, report.skipped, report.bytes_freed) == ((), (), 0)
    assert not root.exists()


def test_list(root: Path) -> None:
    make(root, 1, days=3)
    make(root, 2, size=1_000_000, days=5, kind="spool")
    (root / "stores" / f"{UUID}1" / "index.sqlite").write_bytes(b"not an entry")
    (root / "stores" / f"{UUID}3" / "other" / "main").mkdir(parents=True)
    second, first = list_entries(root)
    assert stores([second, first]) == ["2", "1"]  # the one used longest ago first
    assert (first.kind, first.name, first.in_use) == ("baseline", "main", False)
    assert 1_000_000 <= second.bytes < 1_100_000
    assert first.last_used == pytest.approx(time.time() - 3 * 86400, abs=60)
    assert list_entries(root) == [second, first]  # looking is no use


def test_holes_count_as_nothing(root: Path) -> None:
    folder = make(root, 1)
    with (folder / "baseline").open("wb") as file:
        file.truncate(1 << 30)
    assert list_entries(root)[0].bytes < 1 << 20


def test_the_cache_folder_of_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(root, 1)
    monkeypatch.setenv("DELTASTORE_CACHE", str(root))
    assert stores(list_entries()) == ["1"]


def test_prune(root: Path) -> None:
    folders = [make(root, number, days=number) for number in range(4)]
    plan = plan_prune(root, older_than=1.5 * 86400)
    assert stores(plan.delete) == ["3", "2"]
    assert [folder.exists() for folder in folders] == [True] * 4  # a plan changes nothing
    report = run_cleaning(plan)
    assert report.deleted == plan.delete
    assert report.bytes_freed == plan.bytes_before - plan.bytes_after > 200_000
    assert [folder.exists() for folder in folders] == [True, True, False, False]
    assert sorted(path.name[-1] for path in (root / "stores").iterdir()) == ["0", "1"]  # empty folders go
    assert list((root / "deleted").iterdir()) == []


def test_cap(root: Path) -> None:
    for number in range(4):
        make(root, number, days=number)
    total = sum(entry.bytes for entry in list_entries(root))
    assert plan_cap(root, total).delete == ()
    assert stores(plan_cap(root, total - 1).delete) == ["3"]
    assert stores(plan_cap(root, 0).delete) == ["3", "2", "1", "0"]
    plan = plan_cap(root, 250_000)
    run_cleaning(plan)
    assert stores(list_entries(root)) == ["1", "0"]
    assert plan.bytes_after == sum(entry.bytes for entry in list_entries(root))


def test_what_is_in_use_stays(root: Path) -> None:
    for number in range(3):
        make(root, number, days=number)
    used = entry_folder(root, f"{UUID}2", "baseline", "main")
    code = (
        "import sys; from pathlib import Path; from deltastore.cache_folder import lock_entry\n"
        "lock = lock_entry(Path(sys.argv[1]), create=False); print(lock is not None, flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-c", code, str(used)]
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        for plan in (plan_prune(root), plan_cap(root, 0)):
            assert stores(plan.delete) == ["1", "0"]
            assert stores(plan.kept_in_use) == ["2"]
        assert stores(plan_cap(root, 150_000).delete) == ["1", "0"]  # what stays does not count as deleted
        run_cleaning(plan_prune(root))
        assert (used / "sub" / "data").exists()
        process.kill()
    assert stores(plan_prune(root).delete) == ["2"]


def test_what_comes_into_use_after_the_plan_stays(root: Path) -> None:
    folder = make(root, 1)
    plan = plan_prune(root)
    with lock_entry(folder) or pytest.fail("in use"):
        report = run_cleaning(plan)
        assert (report.deleted, report.skipped) == ((), plan.delete)
        assert (folder / "sub" / "data").exists()
    assert run_cleaning(plan).deleted == plan.delete
    assert run_cleaning(plan).skipped == plan.delete  # it is gone


def test_no_locks_means_in_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(root, 1)

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert [entry.in_use for entry in list_entries(root)] == [True]
    plan = plan_prune(root)
    assert (plan.delete, stores(plan.kept_in_use)) == ((), ["1"])
    run_cleaning(plan)
    assert folder.exists()


def test_a_cleaning_that_was_cut_off_is_finished_by_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(root, 1)
    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run_cleaning(plan_prune(root))
    assert not folder.exists()
    assert list_entries(root) == []
    assert len(list((root / "deleted").iterdir())) == 1
    run_cleaning(plan_prune(root))
    assert list((root / "deleted").iterdir()) == []


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"x" * 100_000)
    folder = make(root, 1)
    (folder / "link").symlink_to(precious)
    (root / "stores" / f"{UUID}2").symlink_to(precious)
    (folder.parent / "other").symlink_to(precious)
    assert stores(list_entries(root)) == ["1"]
    run_cleaning(plan_prune(root))
    assert (precious / "file").exists()
    assert not folder.exists()
