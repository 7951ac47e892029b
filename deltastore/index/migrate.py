"""Makes and upgrades the schema. The only module that imports alembic; itself imported only when there is work."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, NullPool, create_engine

from deltastore.errors import IntegrityError
from deltastore.index.database import BUSY_SECONDS, RECOVERY, SCHEMA, revision_of, translated


def migrations_dir() -> Path:
    """`deltastore/_migrations` in an installed package, `migrations/` at the top of a checkout."""
    installed = Path(__file__).parents[1] / "_migrations"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "migrations"


def configuration(connection: Connection | None = None) -> Config:
    """The settings of alembic; `connection` is what migrations/env.py then works on."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    return config


def is_known(revision: str) -> bool:
    """Whether this version of deltastore can upgrade from a schema revision."""
    try:
        return ScriptDirectory.from_config(configuration()).get_revision(revision) is not None
    except CommandError:
        return False


def upgrade(url: str | URL) -> None:
    """Bring a database to the current schema, in one transaction; an empty one gets all tables."""
    with _exclusive(url) as connection:
        command.upgrade(configuration(connection), SCHEMA)


def upgrade_file(path: Path) -> Path | None:
    """Upgrade an embedded index after a copy of it was put beside it.

    Returns:
        The copy, or None when another process was faster.
    """
    with translated(path), _exclusive(sqlite_url(path)) as connection:
        revision = revision_of(connection)
        if revision is None or revision == SCHEMA:
            return None
        copy = _back_up(path, revision)
        command.upgrade(configuration(connection), SCHEMA)
    return copy


def sqlite_url(path: Path) -> URL:
    """The address of a SQLite file, whatever signs its name has."""
    return URL.create("sqlite", database=str(path))


@contextmanager
def _exclusive(url: str | URL) -> Iterator[Connection]:
    """A transaction that keeps every other writer out."""
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            sqlite = connection.dialect.name == "sqlite"
            if sqlite:
                # Off is the default, but can be compiled in otherwise; a table that is rebuilt must not cascade.
                connection.connection.dbapi_connection.isolation_level = None  # type: ignore[union-attr]
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
                connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            if sqlite and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()):
                raise IntegrityError(
                    f"{url}: {len(broken)} rows refer to nothing, first {tuple(broken[0])}; nothing was changed; {RECOVERY}"
                )
            connection.commit()
    finally:
        engine.dispose()


def _back_up(path: Path, revision: str) -> Path:
    copy = path.with_name(f"{path.name}.backup-{revision}")
    part = path.with_name(f"{copy.name}.{os.getpid()}.part")
    try:
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
        part.replace(copy)
    finally:
        part.unlink(missing_ok=True)
    return copy
