"""The migrations make exactly the tables of the code, and an index outlives releases."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from deltastore.errors import IndexSchemaError
from deltastore.index import migrate, tables
from deltastore.index.database import SCHEMA, VERSION_TABLE
from deltastore.index.index import Index

ROOT = Path(__file__).parents[2]


def schema(path):
    """Every table and index by name, with the parts of its definition in one order and one spelling."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {
        name: sorted(re.sub(r"\s+", " ", line).strip().rstrip(",") for line in sql.splitlines() if line.strip())
        for name, sql in rows
        if name != VERSION_TABLE
    }


@pytest.fixture
def database(tmp_path):
    """The engine of an empty database that was brought to the current schema."""
    url = f"sqlite:///{tmp_path / 'a.sqlite'}"
    migrate.upgrade(url)
    engine = create_engine(url)
    yield engine
    engine.dispose()


def test_alembic_sees_no_difference(database):
    with database.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert context.get_current_revision() == SCHEMA
        assert compare_metadata(context, tables.metadata) == []


def test_definitions_are_equal_to_the_last_detail(database, tmp_path):
    direct = create_engine(f"sqlite:///{tmp_path / 'b.sqlite'}")
    tables.metadata.create_all(direct)
    direct.dispose()
    assert schema(tmp_path / "a.sqlite") == schema(tmp_path / "b.sqlite")
    assert len(tables.metadata.tables) == 11


def test_every_constraint_has_a_name():
    for table in tables.metadata.tables.values():
        for constraint in table.constraints:
            assert constraint.name is not None, (table.name, constraint)


def test_there_is_one_head():
    assert ScriptDirectory.from_config(migrate.configuration()).get_heads() == [SCHEMA]


def test_down_and_up_again(database, tmp_path):
    before = schema(tmp_path / "a.sqlite")
    with database.begin() as connection:
        command.downgrade(migrate.configuration(connection), "base")
    assert schema(tmp_path / "a.sqlite") == {}
    migrate.upgrade(f"sqlite:///{tmp_path / 'a.sqlite'}")
    assert schema(tmp_path / "a.sqlite") == before


def test_upgrading_twice_is_harmless(database, tmp_path):
    before = schema(tmp_path / "a.sqlite")
    migrate.upgrade(f"sqlite:///{tmp_path / 'a.sqlite'}")
    assert schema(tmp_path / "a.sqlite") == before


NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("object", recreate="always") as batch:  # the hard way: others refer to it
        batch.add_column(sa.Column("hint", sa.Text()))
"""


@pytest.fixture(scope="module")
def next_release(tmp_path_factory):
    """A copy of the library whose schema is one step ahead."""
    root = tmp_path_factory.mktemp("next")
    for folder in ("deltastore", "migrations"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    database = root / "deltastore" / "index" / "database.py"
    database.write_text(database.read_text().replace(f'SCHEMA = "{SCHEMA}"', 'SCHEMA = "0002"'))
    (root / "migrations" / "versions" / "0002_next.py").write_text(NEXT)
    return root


class TestNextRelease:
    @pytest.fixture
    def filled(self, index, commit):
        """An index of this release with two commits, closed."""
        for number in (1, 2):
            commit(number, number - 1 or None, ((f"packs/{number}", "pack", 1),))
        index.close()
        return index.path

    def test_upgrades_after_a_backup_and_loses_nothing(self, filled, dump, next_release, run_python):
        with Index.open(filled) as index:
            before = dump(index)
        code = """
import deltastore
assert Path(deltastore.__file__).is_relative_to(sys.argv[2])
try:
    Index.open(sys.argv[1], read_only=True)
except IndexSchemaError as error:
    say("open the store once for writing" in str(error))
def work(number):
    with Index.open(sys.argv[1]) as index:
        say([index.ref("main").commit_id[-1], *index.objects_of_commit(f"{2:064x}"), len(index.object_totals())])
in_children(4, work)
work(4)  # now there is nothing to do
"""
        out = run_python(code, filled, next_release, root=next_release)
        assert out == "True\n" + "['2', 'packs/2', 2]\n" * 5
        assert sorted(each.name for each in filled.parent.iterdir()) == ["index.sqlite", "index.sqlite.backup-0001"]
        with Index.open(filled.with_name("index.sqlite.backup-0001")) as backup:
            assert dump(backup) == before
        with closing(sqlite3.connect(filled)) as connection:
            assert connection.execute("SELECT key, state, hint FROM object WHERE kind = 'pack'").fetchall() == [
                ("packs/1", "live", None),
                ("packs/2", "live", None),
            ]
            assert connection.execute("SELECT count(*) FROM edge").fetchone() == (2,)
        with pytest.raises(IndexSchemaError, match=r"schema 0002, this deltastore knows 0001.*pip install -U deltastore"):
            Index.open(filled)
