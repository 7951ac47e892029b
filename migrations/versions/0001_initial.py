"""All tables of format 1."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "meta",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("store_uuid", sa.Text(), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("features", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_seq", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_meta")),
        sa.CheckConstraint("id = 1", name=op.f("ck_meta_one_row")),
    )
    op.create_table(
        "object",
        sa.Column("id", number, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.Text()),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_object")),
        sa.UniqueConstraint("key", name=op.f("uq_object_key")),
        sa.CheckConstraint("state IN ('pending', 'live')", name=op.f("ck_object_state")),
    )
    op.create_index(op.f("ix_object_session_id"), "object", ["session_id"])
    op.create_table(
        "edge",
        sa.Column("source_id", number, nullable=False),
        sa.Column("target_id", number, nullable=False),
        sa.PrimaryKeyConstraint("source_id", "target_id", name=op.f("pk_edge")),
        sa.ForeignKeyConstraint(["source_id"], ["object.id"], name=op.f("fk_edge_source_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["target_id"], ["object.id"], name=op.f("fk_edge_target_id"), ondelete="RESTRICT"),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_edge_target_id"), "edge", ["target_id"])
    op.create_table(
        "commit",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("object_id", number, nullable=False),
        sa.Column("tree", sa.Text(), nullable=False),
        sa.Column("height", sa.BigInteger(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("write_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commit")),
        sa.UniqueConstraint("write_id", name=op.f("uq_commit_write_id")),
        sa.UniqueConstraint("seq", "epoch", name=op.f("uq_commit_seq_epoch")),
        sa.ForeignKeyConstraint(["object_id"], ["object.id"], name=op.f("fk_commit_object_id"), ondelete="RESTRICT"),
    )
    op.create_index(op.f("ix_commit_object_id"), "commit", ["object_id"])
    op.create_table(
        "commit_parent",
        sa.Column("commit_id", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("commit_id", "position", name=op.f("pk_commit_parent")),
        sa.ForeignKeyConstraint(["commit_id"], ["commit.id"], name=op.f("fk_commit_parent_commit_id"), ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_commit_parent_parent_id"), "commit_parent", ["parent_id"])
    op.create_table(
        "commit_metadata",
        sa.Column("commit_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("number", sa.Double()),
        sa.PrimaryKeyConstraint("commit_id", "key", name=op.f("pk_commit_metadata")),
        sa.ForeignKeyConstraint(["commit_id"], ["commit.id"], name=op.f("fk_commit_metadata_commit_id"), ondelete="CASCADE"),
    )
    op.create_index(op.f("ix_commit_metadata_key_number"), "commit_metadata", ["key", "number"])
    op.create_table(
        "ref",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("commit_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_ref")),
        sa.ForeignKeyConstraint(["commit_id"], ["commit.id"], name=op.f("fk_ref_commit_id"), ondelete="RESTRICT"),
        sa.CheckConstraint("kind IN ('branch', 'tag')", name=op.f("ck_ref_kind")),
    )
    op.create_index(op.f("ix_ref_commit_id"), "ref", ["commit_id"])
    op.create_table(
        "oplog",
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("commit_id", sa.Text()),
        sa.Column("commit_key", sa.Text()),
        sa.Column("mirrored", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("epoch", "seq", name=op.f("pk_oplog")),
    )
    unmirrored = sa.column("mirrored", sa.Boolean()) == sa.false()
    op.create_index("ix_oplog_unmirrored", "oplog", ["seq"], sqlite_where=unmirrored)
    op.create_table(
        "tombstone",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("dropped_at", sa.Text(), nullable=False),
        sa.Column("delete_after", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("deleted_at", sa.Text()),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_tombstone")),
    )
    op.create_table(
        "lease",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text()),
        sa.Column("pinned_commit", sa.Text()),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease")),
    )
    op.create_table(
        "dedup",
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("object_id", number, nullable=False),
        sa.Column("row", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_dedup")),
        sa.ForeignKeyConstraint(["object_id"], ["object.id"], name=op.f("fk_dedup_object_id"), ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_dedup_object_id"), "dedup", ["object_id"])


def downgrade() -> None:
    for name in (
        "dedup",
        "lease",
        "tombstone",
        "oplog",
        "ref",
        "commit_metadata",
        "commit_parent",
        "commit",
        "edge",
        "object",
        "meta",
    ):
        op.drop_table(name)
