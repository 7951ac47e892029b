"""Packs: encoded chunks behind columns that describe them, in one safetensors file (format 1, docs/FORMAT.md).

Columns by row: `raw_length`, `stored_length`, `span`, `base_pack`, `base_row` U32[n], `digest` U8[n, 32] (BLAKE3),
`fast_digest` U8[n, 16] (xxh3-128), `codec` U8[n]; one table: `bases` U8[m, 16], the ids of the packs that deltas are
based on. Payloads follow back to back in row order.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from deltastore.columns import ColumnSpec, build_head, head_length, parse_head
from deltastore.errors import FormatError, InvalidInputError
from deltastore.layout import is_id, shorten
from deltastore.options import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    from deltastore.buffers import Bytes

__all__ = ["BuiltPack", "PackColumns", "PackEntry", "Place", "StoredEntry", "build_pack", "head_length"]

KIND = "deltastore pack"
NO_BASE = 0xFFFFFFFF  # in base_pack and base_row of a full entry
MAX_STORED_BYTES = MAX_CHUNK_BYTES + (64 << 10)  # no encoding is allowed to be larger than this
MAX_CODECS = 64
LADDER_BITS = 0x49249249  # bits that stand for the powers of 8 below 2^32

SPECS = (
    ColumnSpec("raw_length", "U32"),
    ColumnSpec("stored_length", "U32"),
    ColumnSpec("span", "U32"),
    ColumnSpec("base_pack", "U32"),
    ColumnSpec("base_row", "U32"),
    ColumnSpec("digest", "U8", 32),
    ColumnSpec("fast_digest", "U8", 16),
    ColumnSpec("codec", "U8"),
    ColumnSpec("bases", "U8", 16),
)

_codec_id = re.compile(r"[a-z0-9][a-z0-9.+-]{0,62}@[0-9]{1,9}")

Place = tuple[str, int]  # of an entry: pack id, row
U8 = np.ndarray[Any, np.dtype[np.uint8]]
U32 = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, slots=True)
class PackEntry:
    """An encoded chunk that is to be packed.

    Attributes:
        digest: BLAKE3 of the raw bytes, 32 bytes.
        fast_digest: xxh3-128 of the raw bytes, 16 bytes.
        raw_length: bytes of the chunk when decoded.
        codec: codec id, such as "raw@1".
        payload: the encoded bytes.
        span: how many versions a delta reaches back, a power of 8; 0 for a full entry.
        base: (pack id, row) that a delta applies to; None for a full entry.
    """

    digest: bytes
    fast_digest: bytes
    raw_length: int
    codec: str
    payload: Bytes
    span: int = 0
    base: tuple[str, int] | None = None


class StoredEntry(NamedTuple):
    """A row of a pack. A named tuple, because a commit makes a hundred thousand of them.

    `offset` and `stored_length` say where the payload is, in bytes from the start of the file; the rest as in
    `PackEntry`.
    """

    pack_id: str
    row: int
    digest: bytes
    fast_digest: bytes
    raw_length: int
    codec: str
    offset: int
    stored_length: int
    span: int
    base: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class BuiltPack:
    """The bytes of a pack: `head`, then `pieces` (the payloads as they were given); `size` counts both."""

    head: bytes
    pieces: list[Bytes]
    size: int


def build_pack(pack_id: str, entries: Sequence[PackEntry]) -> BuiltPack:
    """Lay out a pack without joining its payloads; equal input gives an equal head.

    Raises:
        InvalidInputError: an entry could not be read back; names its row.
    """
    if not is_id(pack_id):
        raise InvalidInputError(f"{shorten(pack_id)} is not a pack id; make one with layout.new_id()")
    rows = len(entries)
    codecs = sorted({entry.codec for entry in entries})
    codec_index = {codec: index for index, codec in enumerate(codecs)}
    bases = sorted({entry.base[0] for entry in entries if entry.base is not None})
    base_index = {base: index for index, base in enumerate(bases)}
    pieces = [entry.payload for entry in entries]
    stored = [len(piece) for piece in pieces]
    lengths = {(len(entry.digest), len(entry.fast_digest)) for entry in entries}
    if lengths - {(32, 16)}:
        raise InvalidInputError(f"new pack {pack_id}: digests of {lengths} bytes, expected 32 and 16")
    try:
        columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
            "raw_length": np.array([entry.raw_length for entry in entries], np.uint32),
            "stored_length": np.array(stored, np.uint32),
            "span": np.array([entry.span for entry in entries], np.uint32),
            "base_pack": np.array([base_index[entry.base[0]] if entry.base else NO_BASE for entry in entries], np.uint32),
            "base_row": np.array([entry.base[1] if entry.base else NO_BASE for entry in entries], np.uint32),
            "digest": np.frombuffer(b"".join(entry.digest for entry in entries), np.uint8).reshape(rows, 32),
            "fast_digest": np.frombuffer(b"".join(entry.fast_digest for entry in entries), np.uint8).reshape(rows, 16),
            "codec": np.array([codec_index[entry.codec] for entry in entries], np.uint8),
            "bases": np.frombuffer(b"".join(uuid.UUID(base).bytes for base in bases), np.uint8).reshape(-1, 16),
        }
    except (OverflowError, ValueError) as error:
        raise InvalidInputError(f"new pack {pack_id}: a length, span, row or base that no pack can hold: {error}") from error
    problem = _problem(pack_id, codecs, bases, columns)
    if problem is not None:
        raise InvalidInputError(f"new pack {pack_id}: {problem}; every entry must be one that a reader accepts")
    metadata = {"format": f"{KIND} 1", "id": pack_id, "codecs": " ".join(codecs)}
    head = build_head(metadata, SPECS, columns, sum(stored))
    return BuiltPack(head, pieces, len(head) + sum(stored))


@dataclass(frozen=True, slots=True, eq=False)
class PackColumns:
    """The parsed head of a pack. Attributes hold one value per row, as in the module docstring.

    `head` and `size` are bytes of the head and of the whole file; `offset` int64[n] says where each payload starts in
    the file. Codec ids that this version does not know are kept: only decoding needs them.
    """

    pack_id: str
    head: int
    size: int
    codecs: tuple[str, ...]
    bases: tuple[str, ...]
    raw_length: U32
    stored_length: U32
    offset: np.ndarray[Any, np.dtype[np.int64]]
    span: U32
    base_pack: U32
    base_row: U32
    digest: U8
    fast_digest: U8
    codec: U8
    _lists: list[Any] = field(default_factory=list, repr=False)  # the columns as Python lists, made at first use

    def __len__(self) -> int:
        return len(self.raw_length)

    @classmethod
    def parse(cls, pack_id: str, head: Bytes) -> PackColumns:
        """Parse and validate exactly the bytes of a head.

        Raises:
            FormatError: they are no head, or no head of this pack; names the pack.
        """
        what = f"pack {shorten(pack_id)[1:-1]}"
        parsed = parse_head(head, SPECS, KIND, what, payload=True)
        columns, metadata = parsed.columns, parsed.metadata
        if metadata.get("id") != pack_id:
            _refuse(what, f"it names itself {shorten(metadata.get('id', ''))}")
        codecs = tuple(metadata.get("codecs", "").split())
        bases = tuple(str(uuid.UUID(bytes=base.tobytes())) for base in columns["bases"])
        rows = len(columns["digest"])
        if any(len(columns[spec.name]) != rows for spec in SPECS if spec.name != "bases"):
            _refuse(what, "its columns differ in length")
        problem = _problem(pack_id, codecs, bases, columns)
        if problem is not None:
            _refuse(what, problem)
        stored_length = columns["stored_length"]
        ends = np.cumsum(stored_length, dtype=np.int64)
        if (int(ends[-1]) if rows else 0) != parsed.payload:
            _refuse(what, f"its payloads have {int(ends[-1]) if rows else 0} bytes, the payload tensor {parsed.payload}")
        return cls(
            pack_id=pack_id,
            head=parsed.length,
            size=parsed.length + parsed.payload,
            codecs=codecs,
            bases=bases,
            raw_length=columns["raw_length"],
            stored_length=stored_length,
            offset=parsed.length + ends - stored_length,
            span=columns["span"],
            base_pack=columns["base_pack"],
            base_row=columns["base_row"],
            digest=columns["digest"],
            fast_digest=columns["fast_digest"],
            codec=columns["codec"],
        )

    def digests(self) -> list[bytes]:
        """The BLAKE3 digests of all rows."""
        return [digest.tobytes() for digest in self.digest]

    def entry(self, row: int) -> StoredEntry:
        """One row as plain Python values.

        Raises:
            FormatError: the pack has no such row (rows come from manifests and from other packs).
        """
        if not 0 <= row < len(self.raw_length):
            raise FormatError(
                f"pack {self.pack_id} has {len(self)} rows, row {row} was asked for: a manifest or a delta names a row "
                "that is not there; run `deltastore verify` to see what it breaks"
            )
        if not self._lists:  # two threads may both do this: they make equal lists
            self._lists[:] = (
                self.digest.tobytes(),
                self.fast_digest.tobytes(),
                self.raw_length.tolist(),
                [self.codecs[index] for index in self.codec.tolist()],
                self.offset.tolist(),
                self.stored_length.tolist(),
                self.span.tolist(),
                self.base_pack.tolist(),
                self.base_row.tolist(),
            )
        digest, fast_digest, raw_length, codec, offset, stored_length, span, base_pack, base_row = self._lists
        return StoredEntry(
            self.pack_id,
            row,
            digest[32 * row : 32 * row + 32],
            fast_digest[16 * row : 16 * row + 16],
            raw_length[row],
            codec[row],
            offset[row],
            stored_length[row],
            span[row],
            (self.bases[base_pack[row]], base_row[row]) if span[row] else None,
        )


def _problem(
    pack_id: str, codecs: Sequence[str], bases: Sequence[str], columns: Mapping[str, np.ndarray[Any, np.dtype[Any]]]
) -> str | None:
    """What is wrong with a pack's columns, for writer and reader alike; None when nothing is."""
    if len(codecs) > MAX_CODECS or any(_codec_id.fullmatch(codec) is None for codec in codecs):
        return f"codec ids {shorten(' '.join(codecs))}, expected at most {MAX_CODECS} such as 'raw@1'"
    if not all(is_id(base) for base in bases):
        return "its table of bases holds something else than uuid7"
    if pack_id in bases:
        return "it names itself as a base"
    raw_length, span = columns["raw_length"], columns["span"]
    base_pack, base_row = columns["base_pack"], columns["base_row"]
    full = span == 0
    no_power = (span & (span - 1)) | (span & ~np.uint32(LADDER_BITS))
    wrong = {
        "raw length": (raw_length == 0) | (raw_length > MAX_CHUNK_BYTES),
        "stored length": columns["stored_length"] > MAX_STORED_BYTES,
        "span": ~full & (no_power != 0),
        "base for a full entry": full & ((base_pack != NO_BASE) | (base_row != NO_BASE)),
        "base for a delta": ~full & ((base_pack >= len(bases)) | (base_row == NO_BASE)),
        "codec": columns["codec"] >= len(codecs),
    }
    for name, rows in wrong.items():
        if rows.any():
            return f"row {int(rows.argmax())} has an impossible {name}"
    return None


def _refuse(what: str, found: str) -> NoReturn:
    raise FormatError(f"{what} is malformed: {found}; run `deltastore verify` to see what it breaks")
