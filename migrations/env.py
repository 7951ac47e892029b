"""What alembic runs to make, upgrade or compare the schema of an index."""

from alembic import context
from sqlalchemy import Connection, create_engine

from deltastore.index.database import VERSION_TABLE
from deltastore.index.tables import metadata


def migrate(connection: Connection) -> None:
    """Run the asked-for revisions in the transaction that `connection` is in."""
    context.configure(connection=connection, target_metadata=metadata, version_table=VERSION_TABLE, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:  # the alembic command line, in a checkout
    url = context.config.get_main_option("sqlalchemy.url")
    if url is None:
        raise SystemExit("set sqlalchemy.url to the address of a database")
    with create_engine(url).begin() as opened:
        migrate(opened)
