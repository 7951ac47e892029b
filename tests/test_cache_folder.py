"""The cache folder: where it is, and who may use an entry."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltastore.cache_folder import cache_root, entry_folder, lock_entry, locks_work
from deltastore.errors import InvalidInputError, ReadOnlyError

UUID = "8f14e45f-ceea-467f-a8b6-0d3f6c6f2b1a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return entry_folder(tmp_path / "cache", UUID, "baseline", "main")


def test_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DELTASTORE_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "huggingface" / "deltastore"
    monkeypatch.setenv("XDG_CACHE_HOME", "$HOME/xdg")
    assert cache_root() == tmp_path / "xdg" / "huggingface" / "deltastore"
    monkeypatch.setenv("HF_HOME", "~/hub")
    assert cache_root() == tmp_path / "hub" / "deltastore"
    monkeypatch.setenv("DELTASTORE_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert cache_root(str(tmp_path / "given")) == tmp_path / "given"


def test_the_root_is_that_of_huggingface_hub(tmp_path: Path) -> None:
    code = "import huggingface_hub.constants as c, deltastore.cache_folder as f; print(c.HF_HOME, f.cache_root().parent)"
    environment = {k: v for k, v in os.environ.items() if k not in ("DELTASTORE_CACHE", "HF_HOME")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-c", code]
    theirs, ours = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert theirs == ours


@pytest.mark.parametrize("part", ["", "..", ".hidden", "a/b", "a\\b", "C:", "a\0"])
def test_entries_stay_inside(tmp_path: Path, part: str) -> None:
    for uuid, name in ((UUID, part), (part, "main")):
        with pytest.raises(InvalidInputError, match="plain file name"):
            entry_folder(tmp_path, uuid, "spool", name)
    with pytest.raises(InvalidInputError, match="expected one of 'baseline', 'spool'"):
        entry_folder(tmp_path, UUID, "index", "main")


def test_one_has_it_at_a_time(folder: Path) -> None:
    assert lock_entry(folder, create=False) is None
    with lock_entry(folder) or pytest.fail("not locked") as lock:
        assert lock.folder == folder
        assert lock_entry(folder) is None
    again = lock_entry(folder, create=False)
    assert again is not None
    again.release()
    again.release()


def test_other_processes_see_the_lock_and_inherit_it_when_its_holder_dies(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from deltastore.cache_folder import lock_entry\n"
        "lock = lock_entry(Path(sys.argv[1])); print(lock is not None, flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", code, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        assert lock_entry(folder) is None
        process.kill()
    with lock_entry(folder) or pytest.fail("still locked"):
        pass


def test_a_forked_child_neither_keeps_nor_loses_the_lock(folder: Path) -> None:
    lock = lock_entry(folder)
    assert lock is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        lock.release()
        os._exit(0)
    try:
        lock.release()
        again = lock_entry(folder)  # although the child has the file open
        assert again is not None
    finally:
        os.write(writing, b"x")
        assert os.waitpid(child, 0)[1] == 0
        os.close(reading)
        os.close(writing)
    assert lock_entry(folder) is None
    again.release()


def test_an_entry_that_is_deleted_meanwhile_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        if not calls:
            calls.append(file)
            shutil.rmtree(folder)  # what a prune does between our open and our lock
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_entry(folder) or pytest.fail("not locked"):
        assert (folder / "lock").exists()
        assert lock_entry(folder) is None


def test_who_only_looks_is_in_nobodys_way(folder: Path) -> None:
    with lock_entry(folder) or pytest.fail("not locked"):
        pass
    look = lock_entry(folder, create=False)  # as `deltastore cache list` does for a moment
    assert look is not None
    timer = threading.Timer(0.03, look.release)
    timer.start()
    with lock_entry(folder) or pytest.fail("not locked"):
        timer.join()
        start = time.monotonic()
        assert lock_entry(folder, create=False) is None
        assert time.monotonic() - start < 0.05


def test_flock_not_implemented(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    assert locks_work(folder)

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert lock_entry(folder) is None
    assert not locks_work(folder)


def test_no_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ReadOnlyError, match="DELTASTORE_CACHE"):
        lock_entry(tmp_path / "entry")
