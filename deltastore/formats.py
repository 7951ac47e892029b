"""JSON documents of format 1: what may stand in them, and how they are read and written (docs/FORMAT.md).

Every document is canonical JSON with `format` and `kind`; log entries also say whether they are `optional`. Parsing is
strict: unknown fields, wrong types, keys of the wrong kind and newer formats are refused with the name of the object.
The JSON Schemas in `schemas/v1` are made from these classes by `python -m deltastore.schemas`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict  # typing's own works with pydantic from Python 3.12 on

from deltastore import digests, layout
from deltastore.canonical import dumps
from deltastore.errors import FormatError, UnsupportedFormatError
from deltastore.options import INLINE_FILE_BYTES, MAX_ITEMSIZE, MAX_STORED_FILE_BYTES

FORMAT: Final = 1
RESERVED_FEATURES = {
    "pieces": "tensors written by several ranks",
    "external": "chunks that live in an existing safetensors file",
}
KNOWN_FEATURES: frozenset[str] = frozenset()  # this version knows none

# -- values -----------------------------------------------------------------------------------------------------------

_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_TIME = r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]\.[0-9]{6}Z"


def _key_of(kind: str) -> Callable[[str], str]:
    def check(key: str) -> str:
        if layout.object_kind(key) != kind:
            raise ValueError(f"not the key of a {kind}")
        return key

    return check


def _as_list(value: object) -> object:
    """pydantic would also take a JSON object for a named tuple."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected an array")
    return value


def _decode_base64(value: object) -> object:
    if isinstance(value, str):
        data = base64.b64decode(value, validate=True)
        if base64.b64encode(data).decode() != value:
            raise ValueError("not canonical base64")
        return data
    return value


Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]
Epoch = Annotated[int, Field(strict=True, ge=0, le=layout.MAX_EPOCH)]
Seq = Annotated[int, Field(strict=True, ge=0, le=layout.MAX_SEQ)]
Uuid = Annotated[str, Field(strict=True, pattern=f"^{_UUID}$")]
ObjectId = Annotated[str, Field(strict=True, pattern=f"^{layout.ID_PATTERN}$")]
CommitId = Annotated[str, Field(strict=True, pattern=f"^{layout.COMMIT_ID_PATTERN}$")]
Time = Annotated[str, Field(strict=True, pattern=f"^{_TIME}$", description="UTC, microseconds")]
RefName = Annotated[str, Field(strict=True, pattern="^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$")]
DTypeName = Annotated[str, Field(strict=True, pattern="^[a-z][a-z0-9_]{0,63}$")]
PackKey = Annotated[str, Field(strict=True, pattern="^packs/"), AfterValidator(_key_of("pack"))]
ManifestKey = Annotated[str, Field(strict=True, pattern="^manifests/"), AfterValidator(_key_of("manifest"))]
StructureKey = Annotated[str, Field(strict=True, pattern="^structures/"), AfterValidator(_key_of("structure"))]
CommitKey = Annotated[str, Field(strict=True, pattern="^commits/"), AfterValidator(_key_of("commit"))]
SnapshotKey = Annotated[str, Field(strict=True, pattern="^refs/snapshot/"), AfterValidator(_key_of("snapshot"))]
InlineBytes = Annotated[
    bytes,
    BeforeValidator(_decode_base64),
    Field(max_length=INLINE_FILE_BYTES),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "pattern": "^[A-Za-z0-9+/]*={0,2}$"}),
]
# JSON values that deltastore.canonical and deltastore.state define and check
Packed = Annotated[Any, Field(description="packed plain value, see docs/FORMAT.md")]
Tree = Annotated[Any, Field(description="node of the tree of a state, see docs/FORMAT.md")]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, json_schema_serialization_defaults_required=True)


class _Document(_Value):
    format: Literal[1] = FORMAT


# -- store.json and epochs --------------------------------------------------------------------------------------------


class StoreDocument(_Document):
    """`store.json`: the identity of a store. `index` says whether it has an embedded index or a shared one."""

    kind: Literal["store"] = "store"
    uuid: Uuid
    index: Literal["embedded", "shared"]
    features: tuple[StrictStr, ...] = ()
    created_at: Time


class EpochDocument(_Document):
    """`epochs/<n>.json`: from now on only `writer`, an index on `host`, writes to this store."""

    kind: Literal["epoch"] = "epoch"
    epoch: Epoch
    host: StrictStr
    time: Time
    writer: Uuid


# -- commits ----------------------------------------------------------------------------------------------------------


@with_config(ConfigDict(extra="forbid"))
class Identity(TypedDict):
    """What a commit id is the digest of. `metadata` maps names to packed values."""

    parents: list[CommitId]
    tree: CommitId
    message: StrictStr
    author: StrictStr
    time: Time
    metadata: dict[StrictStr, Packed]


class ObjectPlace(_Value):
    """A structure, and its size in bytes."""

    key: StructureKey
    size: Count


class ManifestPlace(_Value):
    """A manifest, its size in bytes and its rows. `packs` are positions in `pack_table` of the packs in its own table;
    None when an earlier commit brought the manifest."""

    key: ManifestKey
    size: Count
    rows: Count
    packs: tuple[Count, ...] | None


class PackPlace(_Value):
    """A pack that the commit brought: bytes of the file and of its head, the span of its entries, and their number."""

    key: PackKey
    size: Count
    head: Count
    span: Count
    rows: Count


@with_config(ConfigDict(extra="forbid"))
class LargeValues(TypedDict):
    """Plain values that are too large for the commit document: the number of the stored byte tensor that holds them."""

    tensor: Count


class Placement(_Value):
    """Where the content of a commit is. Not part of its id.

    `height` is the first-parent height, 0 for a root; `values` the packed plain values of the state.
    """

    height: Count
    structure: ObjectPlace
    manifests: tuple[ManifestPlace, ...]
    pack_table: tuple[ObjectId, ...]
    packs: tuple[PackPlace, ...]
    values: list[Packed] | LargeValues

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.pack_table)) != len(self.pack_table):
            raise ValueError("a pack stands twice in pack_table")
        for manifest in self.manifests:
            if any(number >= len(self.pack_table) for number in manifest.packs or ()):
                raise ValueError(f"a manifest names a pack beyond the pack_table of {len(self.pack_table)}")
        return self


class Publish(_Value):
    """What the commit did to a branch. `expected` is the head it was put on (None: it made the branch)."""

    ref: RefName
    expected: CommitId | None
    write_id: Uuid


class CommitDocument(_Document):
    """`commits/…json`, and byte for byte the log entry of the commit."""

    kind: Literal["commit"] = "commit"
    optional: Literal[False] = False
    identity: Identity
    placement: Placement
    publish: Publish

    def commit_id(self) -> str:
        """The id, computed from the identity."""
        return digests.commit_id(dict(self.identity))


# -- structures -------------------------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A stored tensor: dtype and shape; its chunks are rows `position` … of manifest number `shard` of the commit.

    In JSON: `[dtype, shape, shard, position]`. A tensor without elements has no rows.
    """

    dtype: DTypeName
    shape: tuple[Count, ...]
    shard: Count
    position: Count


class StoredFile(_Value):
    """A file of a checkpoint: either its bytes (base64 in JSON) or the number of the tensor that holds them."""

    name: StrictStr
    size: Annotated[int, Field(strict=True, ge=0, le=MAX_STORED_FILE_BYTES)]
    data: InlineBytes | None
    tensor: Count | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.data is None) == (self.tensor is None):
            raise ValueError("a file has either data or tensor")
        if self.data is not None and len(self.data) != self.size:
            raise ValueError(f"size {self.size}, its data has {len(self.data)} bytes")
        return self


class StructureDocument(_Document):
    """`structures/…`: the tree of a state, its stored tensors and its files. Large files are stored as tensors."""

    kind: Literal["structure"] = "structure"
    tree: Tree
    tensors: tuple[Annotated[StoredTensor, BeforeValidator(_as_list)], ...]
    files: tuple[StoredFile, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for number, tensor in enumerate(self.tensors):
            if math.prod(tensor.shape) * MAX_ITEMSIZE >= 2**63:
                raise ValueError(f"tensor {number} has more elements than any file can hold")
        for file in self.files:
            if file.tensor is None:
                continue
            if file.tensor >= len(self.tensors) or self.tensors[file.tensor][:2] != ("uint8", (file.size,)):
                raise ValueError("a file names a tensor that is not there, or is not its bytes")
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("two files have the same name")
        return self


# -- refs -------------------------------------------------------------------------------------------------------------


class RefEntry(_Document):
    """A log entry: a branch or tag was created, deleted or moved by hand. `old` and `new` are commit ids."""

    kind: Literal["ref"] = "ref"
    optional: Literal[False] = False
    action: Literal["create", "delete", "move"]
    ref_kind: Literal["branch", "tag"]
    name: RefName
    old: CommitId | None
    new: CommitId | None
    author: StrictStr
    time: Time

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.old is None, self.new is None) != (self.action == "create", self.action == "delete"):
            raise ValueError(f"{self.action} with old {self.old} and new {self.new}")
        return self


class SnapshotRef(_Value):
    """A branch or tag, and the commit it names."""

    kind: Literal["branch", "tag"]
    name: RefName
    commit: CommitId


class SnapshotCommit(_Value):
    """A commit without its placement."""

    id: CommitId
    parents: tuple[CommitId, ...]
    tree: CommitId
    message: StrictStr
    author: StrictStr
    time: Time
    metadata: dict[StrictStr, Packed]
    key: CommitKey
    height: Count


class SnapshotDocument(_Document):
    """`refs/snapshot/…json`: all refs after log entry `seq`, and the commits since the `previous` snapshot."""

    kind: Literal["snapshot"] = "snapshot"
    epoch: Epoch
    seq: Seq
    previous: SnapshotKey | None
    refs: tuple[SnapshotRef, ...]
    commits: tuple[SnapshotCommit, ...]


Document = StoreDocument | EpochDocument | CommitDocument | StructureDocument | RefEntry | SnapshotDocument
LogEntry = CommitDocument | RefEntry
DOCUMENTS: dict[str, type[Document]] = {
    "store": StoreDocument,
    "epoch": EpochDocument,
    "commit": CommitDocument,
    "structure": StructureDocument,
    "ref": RefEntry,
    "snapshot": SnapshotDocument,
}
_LOG_ENTRIES: dict[str, type[LogEntry]] = {"commit": CommitDocument, "ref": RefEntry}

# -- reading and writing ----------------------------------------------------------------------------------------------


def to_json(value: object) -> Any:
    """A document, or a part of one, as plain JSON values. Every field is there, None as null."""
    if isinstance(value, BaseModel):
        return {name: to_json(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value  # lists and dicts in here are plain JSON already


def to_bytes(document: Document) -> bytes:
    """The canonical bytes of a document."""
    return dumps(to_json(document))


def parse_store(data: bytes, key: str = layout.STORE_KEY) -> StoreDocument:
    """`store.json`. Raises UnsupportedFormatError for a feature that is not known, else like `parse_commit`."""
    document = _parse(_load(data, key), key, StoreDocument)
    for feature in document.features:
        if feature not in KNOWN_FEATURES:
            meaning = RESERVED_FEATURES.get(feature)
            raise UnsupportedFormatError(
                f"{key}: the store uses the feature {layout.shorten(feature)}{f' ({meaning})' if meaning else ''}, "
                "which this version of deltastore does not know; upgrade deltastore to open it"
            )
    return document


def parse_epoch(data: bytes, key: str) -> EpochDocument:
    """An epoch document. Raises like `parse_commit`."""
    return _parse(_load(data, key), key, EpochDocument)


def parse_commit(data: bytes, key: str) -> CommitDocument:
    """A commit document.

    Raises:
        UnsupportedFormatError: its `format` is newer than 1.
        FormatError: anything else that is not as it should be; names `key` and the field.
    """
    return _parse(_load(data, key), key, CommitDocument)


def parse_structure(data: bytes, key: str) -> StructureDocument:
    """A structure. Raises like `parse_commit`; the tree is checked by `state.unflatten`."""
    return _parse(_load(data, key), key, StructureDocument)


def parse_snapshot(data: bytes, key: str) -> SnapshotDocument:
    """A ref snapshot. Raises like `parse_commit`."""
    return _parse(_load(data, key), key, SnapshotDocument)


def parse_log_entry(data: bytes, key: str) -> LogEntry | None:
    """A log entry; None for one of an unknown kind that is optional.

    Raises:
        UnsupportedFormatError: an unknown kind that is required, or a newer `format`.
        FormatError: anything else that is not as it should be.
    """
    value = _load(data, key)
    kind, optional = value.get("kind"), value.get("optional")
    if not isinstance(kind, str) or not isinstance(optional, bool):
        _refuse(key, "a log entry without kind and optional")
    if kind in _LOG_ENTRIES:
        return _parse(value, key, _LOG_ENTRIES[kind])
    if optional:
        return None
    raise UnsupportedFormatError(
        f"{key}: a log entry of kind {layout.shorten(kind)}, which this version of deltastore does not know and "
        "may not skip; upgrade deltastore to open this store"
    )


_D = TypeVar("_D", bound=_Document)


def _load(data: bytes, key: str) -> dict[str, Any]:
    """JSON without duplicate keys, fractions, NaN and lone surrogates, of a format that this version reads."""
    try:
        text = str(data, "utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_float=_no_fraction, parse_constant=_no_fraction)
        if "\\ud" in text.lower():
            dumps(value)  # refuses lone surrogates
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{key}: not the JSON of a deltastore document ({str(error)[:200]}); run `deltastore verify`"
        ) from error
    if not isinstance(value, dict):
        _refuse(key, "a JSON object was expected")
    number = value.get("format")
    if type(number) is not int or number < 1:
        _refuse(key, "no format number")
    if number > FORMAT:
        raise UnsupportedFormatError(
            f"{key}: format {str(number)[:20]}, this version of deltastore reads format {FORMAT}; upgrade deltastore"
        )
    return value


def _parse(value: dict[str, Any], key: str, model: type[_D]) -> _D:
    missing = [name for name in model.model_fields if name not in value]
    if missing:
        _refuse(key, f"no field {', '.join(missing)}")
    expected = model.model_fields["kind"].default
    if value["kind"] != expected:
        _refuse(key, f"kind {layout.shorten(str(value['kind']))}, expected {expected!r}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = layout.shorten(".".join(str(part) for part in first["loc"]) or "the document")
        _refuse(key, f"{where}: {first['msg'][:200]}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _no_fraction(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:40]} is not an integer")


def _refuse(key: str, found: str) -> NoReturn:
    raise FormatError(f"{key} is malformed: {found}; damaged, or written by a newer version: run `deltastore verify`, or upgrade")
