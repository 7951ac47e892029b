from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from bucket_contract import PACK, BucketContract, keys

from deltastore import layout
from deltastore.buckets import Bucket, FolderBucket, Upload, folder, open_bucket
from deltastore.errors import AlreadyExistsError, ReadOnlyError, StorageError, StoreFullError


def staged(root: Path) -> list[Path]:
    return list((root / ".staging").iterdir())


class TestFolderBucket(BucketContract):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return open_bucket(tmp_path / "runs, 100 % ünïcode #1")

    def raw_read(self, bucket: Bucket, key: str) -> bytes:
        assert isinstance(bucket, FolderBucket)
        return (bucket.root / key).read_bytes()

    def raw_write(self, bucket: Bucket, key: str, data: bytes) -> None:
        assert isinstance(bucket, FolderBucket)
        path = bucket.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_opening_and_reading_touch_nothing(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path / "new")
    assert list(bucket.list("")) == []
    assert bucket.stat([PACK]) == {PACK: None}
    bucket.delete([PACK])
    with pytest.raises(StorageError, match="not there"):
        bucket.get(PACK)
    bucket.put([])
    assert list(tmp_path.iterdir()) == []


def test_paths_and_addresses_of_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    addresses = ["store", "./store/", tmp_path / "store", "link", f"file://{tmp_path}/store", f"file://localhost{tmp_path}/store"]
    assert {open_bucket(address).url for address in addresses} == {(tmp_path / "store").as_uri()}


def test_nothing_but_objects_is_listed(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path)
    bucket.put([Upload(PACK, [b"x"])])
    (tmp_path / "index.sqlite").write_bytes(b"x")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".staging" / "left").write_bytes(b"x")
    os.mkfifo(tmp_path / "packs" / "pipe")
    (tmp_path / "packs" / "link").symlink_to(tmp_path / "index.sqlite")
    (tmp_path / "manifests").symlink_to(tmp_path / "packs")
    (tmp_path / "epochs").write_bytes(b"x")
    assert keys(list(bucket.list(""))) == [PACK]


def test_no_staged_file_stays(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path)
    bucket.put([Upload(PACK, [b"first"]), Upload("store.json", [b"{}"])])
    bucket.put([Upload(PACK, [b"first"])])
    with pytest.raises(AlreadyExistsError):
        bucket.put([Upload(PACK, [b"other"])])
    assert staged(tmp_path) == []


def test_what_a_crash_left_is_removed_after_a_day(tmp_path: Path) -> None:
    FolderBucket(tmp_path).put([Upload(PACK, [b"x"])])
    old, young = tmp_path / ".staging" / "old", tmp_path / ".staging" / "young"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    FolderBucket(tmp_path).put([Upload("store.json", [b"{}"])])
    assert staged(tmp_path) == [young]


# -- links and other things in the way --------------------------------------------------------------------------------


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "store"
    (root / "packs").mkdir(parents=True)
    (root / "packs" / "aa").symlink_to(outside)
    (root / "packs" / "file").symlink_to(outside / "secret")
    (root / "manifests").symlink_to("../outside")
    (root / "refs").symlink_to("refs")  # a loop
    bucket = FolderBucket(root)
    for key in ("packs/aa/secret", "manifests/secret"):
        for call in (bucket.get, lambda key: bucket.put([Upload(key, [b"x"])]), lambda key: bucket.delete([key])):
            with pytest.raises(StorageError, match="symbolic link") as caught:
                call(key)
            assert caught.value.kind == "denied"
    for call in (bucket.get, lambda key: bucket.put([Upload(key, [b"x"])]), lambda key: bucket.delete([key])):
        with pytest.raises(StorageError, match="refs/log"):
            call("refs/log")
    with pytest.raises(StorageError, match="packs/file"):
        bucket.get("packs/file")
    assert bucket.stat(["packs/file"]) == {"packs/file": None}
    with pytest.raises(AlreadyExistsError):
        bucket.put([Upload("packs/file", [b"secret"])])
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_staging_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".staging").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match="symbolic link"):
        FolderBucket(tmp_path / "store").put([Upload(PACK, [b"x"])])
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_pipe_in_place_of_an_object_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    os.mkfifo(tmp_path / "packs" / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        FolderBucket(tmp_path).get("packs/pipe")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    bucket = FolderBucket(tmp_path / "file")
    with pytest.raises(StorageError, match="packs"):
        bucket.put([Upload(PACK, [b"x"])])
    assert bucket.stat([PACK]) == {PACK: None}
    assert list(bucket.list("")) == []


# -- durability -------------------------------------------------------------------------------------------------------


def test_order_of_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are synced before the first name appears, and all folders that got an entry afterwards."""
    calls: list[tuple[str, str]] = []
    real_sync, real_link = os.fsync, os.link

    def fsync(file: int) -> None:
        calls.append(("sync", str(Path(f"/proc/self/fd/{file}").readlink())))
        real_sync(file)

    def link(source: Any, target: Any, **options: Any) -> None:
        calls.append(("link", str(target)))
        real_link(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    root = tmp_path / "a" / "b"
    bucket = FolderBucket(root)
    bucket.put([Upload("packs/aa/1", [b"x"]), Upload("store.json", [b"{}"])])
    assert [action for action, _ in calls[:4]] == ["sync", "sync", "link", "link"]
    assert all(Path(path).parent == root / ".staging" for _, path in calls[:2])
    assert {path for _, path in calls[4:]} == {
        str(path) for path in (tmp_path, tmp_path / "a", root, root / "packs", root / "packs" / "aa")
    }
    calls.clear()
    bucket.put([Upload("packs/aa/2", [b"x"])])
    assert [(action, path.removeprefix(str(root))[:9]) for action, path in calls] == [
        ("sync", "/.staging"),
        ("link", "/packs/aa"),
        ("sync", "/packs/aa"),
    ]


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Any, target: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    bucket = FolderBucket(tmp_path)
    bucket.put([Upload(PACK, [b"first"])])
    bucket.put([Upload(PACK, [b"first"])])
    with pytest.raises(AlreadyExistsError):
        bucket.put([Upload(PACK, [b"other"])])
    assert bucket.get(PACK) == b"first"
    assert staged(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def writev(file: int, pieces: Any) -> int:
        whole = b"".join(bytes(piece) for piece in pieces)
        return real(file, [whole[: max(1, min(len(whole) - 1, 37))]])

    monkeypatch.setattr(os, "writev", writev)
    pieces = [bytes([number]) * number for number in range(100)]
    FolderBucket(tmp_path).put([Upload(PACK, pieces)])
    assert (tmp_path / PACK).read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("call", ["writev", "fsync", "link"])
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EROFS, ReadOnlyError),
        (errno.EIO, StorageError),
        (errno.EACCES, StorageError),
    ],
)
def test_a_failing_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, error: type[Exception]
) -> None:
    bucket = FolderBucket(tmp_path)
    bucket.put([Upload("store.json", [b"{}"])])
    real = getattr(os, call)
    seen = 0

    def fail_at_the_second(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, fail_at_the_second)
    with pytest.raises(error, match="packs/aa"):
        bucket.put([Upload(f"packs/aa/{each}", [b"x"]) for each in range(3)])
    monkeypatch.undo()
    assert staged(tmp_path) == []
    assert len(list(bucket.list("packs"))) == (1 if call == "link" else 0)
    bucket.put([Upload(f"packs/aa/{each}", [b"x"]) for each in range(3)])  # the retry
    assert len(list(bucket.list("packs"))) == 3


def run_python(text: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_limit_of_the_file_size_is_a_full_store(tmp_path: Path) -> None:
    """A real failure below Python: the kernel refuses to write on, after the first 64 KiB of the second object."""
    bucket = FolderBucket(tmp_path)
    bucket.put([Upload("packs/aa/0", [b"kept"])])
    script = """
        import resource, sys
        from deltastore.buckets import FolderBucket, Upload
        from deltastore.errors import StoreFullError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            FolderBucket(sys.argv[1]).put([Upload("packs/aa/1", [b"x"]), Upload("packs/aa/2", [bytes(1 << 15)] * 9)])
        except StoreFullError as error:
            print(error)
    """
    assert "packs/aa/2" in run_python(script, str(tmp_path))
    assert keys(list(bucket.list(""))) == ["packs/aa/0"]
    assert staged(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        bucket = FolderBucket(disk)
        bucket.put([Upload("packs/aa/0", [bytes(600_000)])])
        with pytest.raises(StoreFullError, match=r"packs/aa/2.*No space left"):
            bucket.put([Upload("packs/aa/1", [bytes(100_000)]), Upload("packs/aa/2", [bytes(500_000)])])
        assert keys(list(bucket.list(""))) == ["packs/aa/0"]
        assert staged(disk) == []
        bucket.put([Upload("packs/aa/2", [bytes(300_000)])])  # what was freed can be used
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, capture_output=True)
        with pytest.raises(ReadOnlyError, match="read_only=True"):
            bucket.put([Upload("packs/aa/3", [b"x"])])
        with pytest.raises(ReadOnlyError, match="packs/aa/0"):
            bucket.delete(["packs/aa/0"])
        assert bucket.get_range("packs/aa/0", 599_999, 1) == b"\0"
    finally:
        subprocess.run(["umount", str(disk)], check=True, capture_output=True)


def test_folders_that_may_not_be_entered() -> None:
    """As an unprivileged user, because root may do everything; that user can't enter pytest's own folders."""
    script = """
        import os, sys
        from deltastore.buckets import FolderBucket, Upload
        from deltastore.errors import StorageError
        bucket = FolderBucket(sys.argv[1])
        if os.geteuid() == 0:
            os.setuid(65534)
        for call in (lambda: bucket.get("packs/aa/0"), lambda: bucket.put([Upload("store.json", [b"{}"])])):
            try:
                call()
            except StorageError as error:
                print(error.kind)
    """
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        bucket = FolderBucket(root)
        bucket.put([Upload("packs/aa/0", [b"kept"])])
        modes = {root / "packs" / "aa": 0, root / ".staging": 0o555, root: 0o555}
        for path, mode in modes.items():
            path.chmod(mode)
        try:
            assert run_python(script, place).split() == ["denied", "denied"]
        finally:
            for path in reversed(modes):
                path.chmod(0o755)
        assert bucket.get("packs/aa/0") == b"kept"


def test_a_forked_child_reads_and_writes(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path)
    bucket.put([Upload(PACK, [b"parent"])])
    child = os.fork()
    if child == 0:
        try:
            key = layout.pack_key(layout.new_id())
            bucket.put([Upload(key, [bucket.get(PACK)])])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert [bucket.get(info.key) for info in bucket.list("packs")] == [b"parent", b"parent"]


def test_no_file_stays_open(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for number in range(20):
        bucket.put([Upload(f"packs/aa/{number}", [b"x"])])
        bucket.get(f"packs/aa/{number}")
        with pytest.raises(StorageError):
            bucket.get_range(f"packs/aa/{number}", 0, 2)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_pieces_per_write_is_below_the_limit_of_the_system() -> None:
    assert os.sysconf("SC_IOV_MAX") >= folder.PIECES_PER_WRITE
