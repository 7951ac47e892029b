"""The SQLite file: created once, checked when opened, its troubles told in our words."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from deltastore.errors import (
    AlreadyExistsError,
    IndexSchemaError,
    IntegrityError,
    ReadOnlyError,
    StorageError,
    StoreFullError,
    StoreNotFoundError,
)
from deltastore.index.filesystems import filesystem_type, is_network
from deltastore.index.index import Index

UUID = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"


def create(path, store_uuid=UUID):
    return Index.create(
        path, store_uuid=store_uuid, format=1, epoch=3, features=("pieces",), created_at="2026-01-01T00:00:00.000000Z"
    )


class TestCreate:
    def test_a_new_index(self, tmp_path):
        path = tmp_path / "new #1 %41?" / "index.sqlite"
        with create(path) as index:
            meta = index.meta()
            assert (meta.store_uuid, meta.format, meta.features, meta.epoch) == (UUID, 1, ("pieces",), 3)
            assert (meta.seq, meta.snapshot_seq, meta.created_at) == (0, 0, "2026-01-01T00:00:00.000000Z")
            assert index.refs() == index.oplog() == []
        assert [each.name for each in path.parent.iterdir()] == ["index.sqlite"]

    def test_again_opens_it(self, tmp_path):
        create(tmp_path / "index.sqlite").close()
        with create(tmp_path / "index.sqlite") as index:
            assert index.meta().store_uuid == UUID

    def test_not_over_the_index_of_another_store(self, tmp_path):
        create(tmp_path / "index.sqlite").close()
        with pytest.raises(AlreadyExistsError, match=UUID):
            create(tmp_path / "index.sqlite", OTHER)

    def test_a_place_that_can_not_be(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError, match="file"):
            create(tmp_path / "file" / "index.sqlite")

    def test_settings_of_connections(self, tmp_path):
        expected = {"foreign_keys": 1, "journal_mode": "wal", "synchronous": 2, "busy_timeout": 60_000}
        with create(tmp_path / "index.sqlite") as index, index._database.read() as connection:
            found = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in expected}
        assert found == expected


class TestOpen:
    def test_missing(self, tmp_path):
        with pytest.raises(StoreNotFoundError, match="from a backup"):
            Index.open(tmp_path / "index.sqlite")
        assert list(tmp_path.iterdir()) == []

    def test_of_another_store(self, tmp_path):
        create(tmp_path / "index.sqlite").close()
        with pytest.raises(IndexSchemaError, match=f"another store: expected {OTHER}, found {UUID}"):
            Index.open(tmp_path / "index.sqlite", store_uuid=OTHER)
        Index.open(tmp_path / "index.sqlite", store_uuid=UUID).close()

    def test_of_a_newer_version(self, tmp_path):
        create(tmp_path / "index.sqlite").close()
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection, connection:
            connection.execute("UPDATE deltastore_alembic_version SET version_num = '9999'")
        with pytest.raises(IndexSchemaError, match="pip install -U deltastore"):
            Index.open(tmp_path / "index.sqlite")

    @pytest.mark.parametrize("statement", ["CREATE TABLE alembic_version (version_num TEXT)", "VACUUM"])
    def test_a_database_of_something_else(self, tmp_path, statement):
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection:
            connection.execute(statement)
        with pytest.raises(IndexSchemaError, match="not a deltastore index"):
            Index.open(tmp_path / "index.sqlite")

    def test_no_database_at_all(self, tmp_path):
        (tmp_path / "index.sqlite").write_bytes(b"this is text, not a database, and quite a bit of it\n" * 200)
        with pytest.raises(IntegrityError, match=r"index\.sqlite is damaged.*every object is still in the bucket"):
            Index.open(tmp_path / "index.sqlite")

    def test_a_folder(self, tmp_path):
        (tmp_path / "index.sqlite").mkdir()
        with pytest.raises(StorageError, match=r"index\.sqlite"):
            Index.open(tmp_path / "index.sqlite")

    @pytest.mark.parametrize("keep", [100, 4096, 5000, 30_000])
    def test_a_file_cut_short(self, tmp_path, keep):
        create(tmp_path / "index.sqlite").close()
        whole = (tmp_path / "index.sqlite").read_bytes()
        assert len(whole) > keep
        (tmp_path / "index.sqlite").write_bytes(whole[:keep])
        with pytest.raises(IntegrityError, match=r"index\.sqlite is damaged.*from a backup"):
            Index.open(tmp_path / "index.sqlite")

    def test_a_page_of_rubbish_in_the_middle(self, tmp_path, index, commit):
        for number in range(1, 60):
            commit(number, number - 1 or None, message="m" * 2000)
        index.close()
        data = bytearray(index.path.read_bytes())
        for page in range(8192, len(data) - 4096, 4096):
            if data[page] == 13 and b"mmmm" in data[page : page + 4096]:  # a leaf of the table of commits
                data[page : page + 4096] = b"\xa5" * 4096
        index.path.write_bytes(data)
        with pytest.raises(IntegrityError, match="is damaged"), Index.open(index.path) as damaged:
            damaged.commits(f"{number:064x}" for number in range(1, 60))

    def test_read_only(self, index, commit, dump):
        commit(1, None)
        before = dump(index)
        with Index.open(index.path, read_only=True) as reader:
            assert reader.ref("main") == index.ref("main")
            for write in (
                lambda: reader.open_session("writer", "x", 1),
                lambda: reader.mark_mirrored([(1, 1)]),
                lambda: reader.set_snapshot_seq(1),
            ):
                with pytest.raises(ReadOnlyError, match="read-only"):
                    write()
        assert dump(index) == before

    def test_a_reader_sees_what_a_writer_commits(self, index, commit):
        with Index.open(index.path, read_only=True) as reader:
            assert reader.ref("main") is None
            commit(1, None)
            assert reader.ref("main").commit_id == f"{1:064x}"


class TestTroubles:
    def test_locked(self, index):
        with Index.open(index.path, busy_seconds=0.05) as second, index._database.write():
            assert second.refs() == []  # reading goes on
            with pytest.raises(StorageError, match="locked") as caught:
                second.set_snapshot_seq(1)
        assert (caught.value.kind, caught.value.retryable) == ("locked", True)

    def test_disk_full(self, index, commit, dump):
        commit(1, None)
        before = dump(index)["commit"]
        with index._database.write() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(StoreFullError, match="nothing was changed"):
            commit(2, 1, message="m" * 200_000)
        assert dump(index)["commit"] == before

    def test_an_exception_undoes_the_transaction(self, index, commit, dump):
        before = dump(index)

        def fail(seq):
            raise KeyError(seq)

        index.register(commit.session_id, [("commits/1", "commit", 1)])
        registered = dump(index)
        with pytest.raises(KeyError):
            commit(2, None, body=fail)
        assert dump(index)["oplog"] == before["oplog"]
        assert dump(index)["meta"] == registered["meta"]
        commit(3, None)
        assert index.meta().seq == 1

    def test_a_folder_without_the_right_to_write(self, run_python):
        out = run_python(
            """
import shutil, tempfile
folder = Path(tempfile.mkdtemp())
path = folder / "index.sqlite"
def attempt(name, action):
    try:
        say(f"{name} {action()}")
    except DeltaStoreError as error:
        say(f"{name} {type(error).__name__}")
def reader():
    with Index.open(path, read_only=True) as index:
        return [ref.name for ref in index.refs()]
index = Index.create(path, store_uuid="u", format=1, epoch=1, created_at="2026")
session = index.open_session("writer", "x", 60)
index.register(session, [("commits/1", "commit", 1)])
index.publish(publication(session, 1, None))
folder.chmod(0o555)
for each in folder.iterdir():
    each.chmod(0o444)
if child := os.fork():
    os.waitpid(child, 0)
    index.close()
    if child := os.fork():
        os.waitpid(child, 0)
        folder.chmod(0o755)
        shutil.rmtree(folder)
        os._exit(0)
    state = "idle"
else:
    index.refs()
    state = "in use"
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
attempt(f"{state}: read", reader)
attempt(f"{state}: write", lambda: Index.open(path))
attempt(f"{state}: create", lambda: Index.create(folder / "b.sqlite", store_uuid="u", format=1, epoch=1, created_at=""))
os._exit(0)
"""
        )
        assert out.splitlines() == [
            "in use: read ['main']",
            "in use: write ReadOnlyError",
            "in use: create ReadOnlyError",
            "idle: read ['main']",
            "idle: write ReadOnlyError",
            "idle: create ReadOnlyError",
        ]


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /data rw - nfs4 server:/export rw,vers=4.2
31 30 254:1 / /data/scratch\\040disk rw shared:2 master:1 - xfs /dev/vdb rw
32 22 0:41 / /home/me/remote rw - fuse.sshfs me@host: rw
33 22 0:42 / /over rw - nfs server:/a rw
34 33 0:43 / /over rw - tmpfs tmpfs rw
not a line of this file
35 22 0:44 / /broken rw
"""


class TestNetworkFileSystems:
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/", "ext4"),
            ("/datafolder", "ext4"),
            ("/data/a/b", "nfs4"),
            ("/data/scratch disk/a", "xfs"),
            ("/home/me/remote", "fuse.sshfs"),
            ("/over/a", "tmpfs"),
        ],
    )
    def test_the_innermost_newest_mount_counts(self, path, kind):
        assert filesystem_type(Path(path), MOUNTS) == kind

    def test_unknown(self):
        assert filesystem_type(Path("/data"), "") is None
        assert not is_network(None)

    @pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse.s3fs", "lustre", "ceph", "9p"])
    def test_shared_between_machines(self, kind):
        assert is_network(kind)

    @pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs", "fuse.fuse-overlayfs"])
    def test_of_this_machine(self, kind):
        assert not is_network(kind)

    def test_refused_unless_overridden(self, tmp_path, monkeypatch):
        mounts = tmp_path / "mountinfo"
        mounts.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/ rw\n")
        monkeypatch.setattr("deltastore.index.filesystems.MOUNTS", mounts)
        with pytest.raises(IndexSchemaError, match=r"network file system \(nfs4\)"):
            create(tmp_path / "index.sqlite")
        monkeypatch.setenv("DELTASTORE_ALLOW_NETWORK_SQLITE", "1")
        create(tmp_path / "index.sqlite").close()
        monkeypatch.delenv("DELTASTORE_ALLOW_NETWORK_SQLITE")
        with pytest.raises(IndexSchemaError, match="local disk"):
            Index.open(tmp_path / "index.sqlite")


def test_opening_imports_neither_alembic_nor_the_orm(tmp_path, run_python):
    create(tmp_path / "index.sqlite").close()
    code = """
Index.open(sys.argv[1]).close()
say([name for name in ("alembic", "sqlalchemy.orm", "torch", "sqlalchemy.dialects.postgresql") if name in sys.modules])
"""
    assert run_python(code, tmp_path / "index.sqlite") == "[]\n"
