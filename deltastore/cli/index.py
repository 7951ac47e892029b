"""`index`: the SQL index beside the objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltastore.cli.settings import Settings, global_options
from deltastore.errors import IndexSchemaError, InvalidInputError, StoreNotFoundError

if TYPE_CHECKING:
    from deltastore.formats import StoreDocument


@click.group("index", invoke_without_command=True)
@global_options(writes=True)
@click.pass_context
def index_command(context: click.Context) -> None:
    """Look at the index of the store, and upgrade it."""
    if context.invoked_subcommand is None:
        _print_status(context.ensure_object(Settings))


@index_command.command("status")
@global_options()
@click.pass_obj
def index_status(settings: Settings) -> None:
    """Show where the index is, its schema and its place in the log."""
    _print_status(settings)


@index_command.command("upgrade")
@global_options(writes=True)
@click.pass_obj
def index_upgrade(settings: Settings) -> None:
    """Bring the index to the schema of this version; a copy of it is kept beside it."""
    path, _ = locate_index(settings)
    from deltastore.index import migrate
    from deltastore.index.database import SCHEMA

    revision = index_revision(path)
    if revision is None:
        raise IndexSchemaError(f"{path} is not the index of a deltastore; put it back from a backup")
    if not migrate.is_known(revision):
        raise IndexSchemaError(
            f"{path} has schema {revision}, this deltastore knows {SCHEMA}: a newer version wrote it; `pip install -U deltastore`"
        )
    copy = None if settings.dry_run or revision == SCHEMA else migrate.upgrade_file(path)
    output = settings.output()
    if output.as_json:
        document = {"path": str(path), "from": revision, "to": SCHEMA, "backup": None if copy is None else str(copy)}
        output.document(document | {"dry_run": settings.dry_run})
    elif output.quiet:
        return  # nothing here has an id
    elif revision == SCHEMA:
        output.line(f"{path} has schema {SCHEMA} already")
    else:
        verb = "would upgrade" if settings.dry_run else "upgraded"
        output.line(f"{verb} {path} from schema {revision} to {SCHEMA}" + (f"; the old one is {copy}" if copy else ""))


def _print_status(settings: Settings) -> None:
    output = settings.output()
    path, store = locate_index(settings)
    from deltastore.index.database import SCHEMA

    revision = index_revision(path)
    status: dict[str, Any] = {"path": str(path), "schema": revision, "expected_schema": SCHEMA, "store": store.uuid}
    if revision == SCHEMA:
        from deltastore.index.index import Index

        with Index.open(path, read_only=True, store_uuid=store.uuid) as index:
            meta = index.meta()
        status |= {"epoch": meta.epoch, "seq": meta.seq}
    else:
        status |= {"epoch": None, "seq": None}
    if output.as_json:
        output.document(status)
    elif output.quiet:
        output.line(store.uuid)
    else:
        for name, value in status.items():
            text = "" if value is None else str(value)
            if output.terminal:
                output.line(f"{name.replace('_', ' '):15}  {text}")
            else:
                output.fields(name, text)


def locate_index(settings: Settings) -> tuple[Path, StoreDocument]:
    """The file of the index, and whose it has to be."""
    settings.check_index()
    from deltastore.buckets import FolderBucket, open_bucket
    from deltastore.errors import StorageError
    from deltastore.formats import parse_store
    from deltastore.layout import STORE_KEY
    from deltastore.opening import INDEX_NAME

    address = settings.address()
    bucket = open_bucket(address)
    if not isinstance(bucket, FolderBucket):
        raise InvalidInputError(f"{address} has no index in a file; give a folder")
    try:
        document = parse_store(bucket.get(STORE_KEY))
    except StorageError as error:
        if error.kind != "missing":
            raise
        raise StoreNotFoundError(f"no deltastore at {address!r}; make one with `deltastore init {address}`") from error
    path = bucket.root / INDEX_NAME
    if not path.exists():
        raise IndexSchemaError(f"{path} is missing; put it back from a backup")
    return path, document


def index_revision(path: Path) -> str | None:
    """The schema of an index file, which is left as it is."""
    from deltastore.index.database import Database

    database = Database(path.absolute(), read_only=True)
    try:
        return database.revision()
    finally:
        database.close()
