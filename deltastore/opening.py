"""Making a store and finding its parts: `store.json` in the bucket, and the index that lies beside it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from pathlib import Path

from deltastore import layout
from deltastore.buckets.base import Bucket, Upload
from deltastore.buckets.folder import FolderBucket
from deltastore.canonical import utc_now
from deltastore.errors import AlreadyExistsError, IndexSchemaError, InvalidInputError, StorageError, StoreNotFoundError
from deltastore.index.database import RECOVERY
from deltastore.index.index import Index

FIRST_EPOCH = 1
INDEX_NAME = "index.sqlite"


def store_uuid(bucket: Bucket, address: str) -> str:
    """Read `store.json` and check that this version can open the store.

    Raises:
        StoreNotFoundError: there is none.
        FormatError, UnsupportedFormatError: it is damaged, or of a newer deltastore.
        IndexSchemaError: its index is not beside the bucket.
    """
    try:
        data = bucket.get(layout.STORE_KEY)
    except StorageError as error:
        if error.kind == "missing":
            raise StoreNotFoundError(f"no deltastore at {address!r}; make one with `deltastore init {address}`") from error
        raise
    found = _plain_store_uuid(data)
    if found is not None:
        return found
    from deltastore.formats import parse_store

    document = parse_store(data)
    if document.index != "embedded":
        raise IndexSchemaError(f"{bucket.url} has a shared index, which this version can't open; upgrade deltastore")
    return document.uuid


def _plain_store_uuid(data: bytes) -> str | None:
    """The uuid of the document as this version writes it; None for any other, which is then parsed in full.

    Saves `deltastore log` the import of pydantic, a good part of its time.
    """
    try:
        value = json.loads(data)
        ours = {"created_at": str(value["created_at"]), "features": [], "format": 1, "index": "embedded", "kind": "store"}
        return value["uuid"] if value == ours | {"uuid": str(uuid.UUID(value["uuid"]))} else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _index_path(bucket: Bucket) -> Path:
    if not isinstance(bucket, FolderBucket):
        raise InvalidInputError(f"{bucket.url}: this version keeps stores in folders only")
    return bucket.root / INDEX_NAME


def open_index(bucket: Bucket, address: str, *, read_only: bool) -> Index:
    """The index of the store at an address.

    Raises:
        StoreNotFoundError: there is no store.
        IndexSchemaError: the index is missing, newer than this version, or that of another store.
    """
    uuid_of_store = store_uuid(bucket, address)
    path = _index_path(bucket)
    if not path.exists():
        raise IndexSchemaError(f"{path} is missing, so branches and history are unknown; {RECOVERY}")
    return Index.open(path, read_only=read_only, store_uuid=uuid_of_store)


def make_store(bucket: Bucket) -> None:
    """Index first, `store.json` last: a store that was only half made is finished by the next call.

    Raises:
        InvalidInputError: the place is inside or around another store.
    """
    from deltastore.formats import EpochDocument, StoreDocument, to_bytes

    path = _index_path(bucket)
    _refuse_nesting(path.parent)
    if not path.exists():
        with contextlib.suppress(AlreadyExistsError):  # another process was faster
            made = Index.create(path, store_uuid=str(uuid.uuid4()), format=1, epoch=FIRST_EPOCH, created_at=utc_now())
            made.close()
    with Index.open(path) as index:
        meta = index.meta()
    epoch = EpochDocument(epoch=meta.epoch, host=socket.gethostname(), time=meta.created_at, writer=meta.store_uuid)
    store = StoreDocument(uuid=meta.store_uuid, index="embedded", features=(), created_at=meta.created_at)
    bucket.put([Upload(layout.epoch_key(meta.epoch), [to_bytes(epoch)])])
    bucket.put([Upload(layout.STORE_KEY, [to_bytes(store)])])


def _refuse_nesting(folder: Path) -> None:
    for parent in folder.absolute().parents:
        if (parent / layout.STORE_KEY).is_file() and (parent / INDEX_NAME).exists():
            raise InvalidInputError(f"{folder} is inside the store {parent}; choose a place outside of it")
    if folder.is_dir():
        for inner, _, names in os.walk(folder):
            if layout.STORE_KEY in names and INDEX_NAME in names:
                raise InvalidInputError(f"{folder} holds the store {inner}; choose another place")
