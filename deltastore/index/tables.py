"""The tables of the index, as SQLAlchemy Core metadata.

`migrations/` is what makes these tables; a test holds the two equal. Times are text, UTC with microseconds and `Z`, so
that they sort as text and read the same in every database.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite numbers rows by itself only in a column of type INTEGER.
RowNumber = BigInteger().with_variant(Integer, "sqlite")

meta = Table(
    "meta",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("store_uuid", Text, nullable=False),
    Column("format", Integer, nullable=False),
    Column("features", Text, nullable=False),  # JSON list
    Column("epoch", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),  # the last used log number, 0 at the start
    Column("snapshot_seq", BigInteger, nullable=False),  # the log number of the last ref snapshot, 0 at the start
    Column("created_at", Text, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

object_ = Table(
    "object",
    metadata,
    Column("id", RowNumber, primary_key=True),
    Column("key", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),  # pack | manifest | structure | commit
    Column("state", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("session_id", Text, index=True),  # who is writing it; null once it is live
    Column("created_at", Text, nullable=False),
    CheckConstraint("state IN ('pending', 'live')", name="state"),
)

edge = Table(
    "edge",
    metadata,
    Column("source_id", RowNumber, ForeignKey(object_.c.id, ondelete="CASCADE"), primary_key=True),
    Column("target_id", RowNumber, ForeignKey(object_.c.id, ondelete="RESTRICT"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)

commit_ = Table(
    "commit",
    metadata,
    Column("id", Text, primary_key=True),
    Column("object_id", RowNumber, ForeignKey(object_.c.id, ondelete="RESTRICT"), nullable=False, index=True),
    Column("tree", Text, nullable=False),
    Column("height", BigInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("write_id", Text, nullable=False, unique=True),
    Column("seq", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    UniqueConstraint("seq", "epoch"),
)

commit_parent = Table(
    "commit_parent",
    metadata,
    Column("commit_id", Text, ForeignKey(commit_.c.id, ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("parent_id", Text, nullable=False, index=True),  # no foreign key: a parent may be forgotten
    sqlite_with_rowid=False,
)

commit_metadata = Table(
    "commit_metadata",
    metadata,
    Column("commit_id", Text, ForeignKey(commit_.c.id, ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),  # canonical JSON
    Column("number", Double),  # the value of an int or float, when it is one
    Index(None, "key", "number"),
)

ref = Table(
    "ref",
    metadata,
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("commit_id", Text, ForeignKey(commit_.c.id, ondelete="RESTRICT"), nullable=False, index=True),
    Column("version", BigInteger, nullable=False),
    Column("updated_at", Text, nullable=False),
    CheckConstraint("kind IN ('branch', 'tag')", name="kind"),
)

oplog = Table(
    "oplog",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # the exact bytes of the log entry
    Column("commit_id", Text),
    Column("commit_key", Text),  # the bucket key that the log entry is a copy of
    Column("mirrored", Boolean, nullable=False),
    Column("created_at", Text, nullable=False),
)
# Nearly all entries are mirrored: this index stays empty while the log grows. (An argument for PostgreSQL beside it would
# import that dialect whenever an index is opened.)
Index("ix_oplog_unmirrored", oplog.c.seq, sqlite_where=oplog.c.mirrored == false())

tombstone = Table(
    "tombstone",
    metadata,
    Column("key", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("dropped_at", Text, nullable=False),
    Column("delete_after", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("deleted_at", Text),
)

lease = Table(
    "lease",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),  # writer | reader | branch
    Column("holder", Text, nullable=False),
    Column("ref", Text),
    Column("pinned_commit", Text),
    Column("created_at", Text, nullable=False),
    Column("expires_at", Text, nullable=False),
)

# A hint, never a reference: where a full copy of a chunk is.
dedup = Table(
    "dedup",
    metadata,
    Column("digest", LargeBinary(32), primary_key=True),
    Column("object_id", RowNumber, ForeignKey(object_.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("row", Integer, nullable=False),
    sqlite_with_rowid=False,
)
