"""Manifests: where the chunks of a run of tensors are, in one safetensors file (format 1, docs/FORMAT.md).

Columns by chunk: `pack` U32[n] (index into the pack table), `row` U32[n], `digest` U8[n, 32]. Pack table: `pack_size`
U64[m], `pack_head` U32[m], `pack_id` U8[m, 16]. The table is the transitive closure: every pack that a chain of these
chunks touches.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from deltastore.columns import ColumnSpec, build_head, parse_head
from deltastore.errors import FormatError, InvalidInputError
from deltastore.layout import is_id, shorten
from deltastore.options import MANIFEST_ROWS

if TYPE_CHECKING:
    from deltastore.buffers import Bytes

KIND = "deltastore manifest"
CUT_FROM_ROWS = 1024  # a manifest with this many rows may be cut where the hash of a path says so
CUT_ONE_IN = 8

SPECS = (
    ColumnSpec("pack_size", "U64"),
    ColumnSpec("pack_head", "U32"),
    ColumnSpec("pack", "U32"),
    ColumnSpec("row", "U32"),
    ColumnSpec("digest", "U8", 32),
    ColumnSpec("pack_id", "U8", 16),
)

U8 = np.ndarray[Any, np.dtype[np.uint8]]
U32 = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, slots=True)
class PackRef:
    """A pack that a manifest needs: its id, and the bytes of its head and of the whole file."""

    pack_id: str
    head: int
    size: int


class ChunkRow(NamedTuple):
    """Where a chunk is: an entry of a pack, and the BLAKE3 digest (32 bytes) its bytes must have."""

    pack_id: str
    row: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Where the chunks of a run of tensors are.

    Attributes:
        packs: the pack table.
        pack: uint32[n], index into `packs` of the entry with the widest span.
        row: uint32[n], its row in that pack.
        digest: uint8[n, 32], BLAKE3 of the chunk.
    """

    packs: tuple[PackRef, ...]
    pack: U32
    row: U32
    digest: U8

    def __len__(self) -> int:
        return len(self.pack)

    @classmethod
    def from_rows(cls, packs: Sequence[PackRef], rows: Sequence[ChunkRow]) -> Manifest:
        """A manifest of these chunks; `packs` must name every pack that their chains touch.

        Raises:
            InvalidInputError: the pack of a row is not in `packs`.
        """
        numbers = {ref.pack_id: number for number, ref in enumerate(packs)}
        try:
            pack = np.array([numbers[row.pack_id] for row in rows], np.uint32)
        except KeyError as error:
            raise InvalidInputError(f"new manifest: its pack table lacks {error}; name every pack") from error
        digest = np.frombuffer(b"".join(row.digest for row in rows), np.uint8).reshape(-1, 32)
        return cls(tuple(packs), pack, np.array([row.row for row in rows], np.uint32), digest)

    def rows(self, start: int, stop: int) -> list[ChunkRow]:
        """Rows [start, stop) as plain values."""
        digests = self.digest[start:stop].tobytes()
        packs, rows = self.pack[start:stop].tolist(), self.row[start:stop].tolist()
        return [
            ChunkRow(self.packs[pack].pack_id, row, digests[32 * number : 32 * number + 32])
            for number, (pack, row) in enumerate(zip(packs, rows, strict=True))
        ]

    def build(self) -> bytes:
        """The bytes of the file; equal manifests give equal bytes.

        Raises:
            InvalidInputError: the parts do not fit together.
        """
        rows = len(self.pack)
        if self.pack.shape != (rows,) or self.row.shape != (rows,) or self.digest.shape != (rows, 32):
            raise InvalidInputError(
                f"new manifest: columns of shapes {self.pack.shape}, {self.row.shape} and {self.digest.shape}, "
                "expected (n,), (n,) and (n, 32)"
            )
        if rows and int(self.pack.max()) >= len(self.packs):
            raise InvalidInputError(f"new manifest: pack index {int(self.pack.max())}, the table has {len(self.packs)}")
        if len({ref.pack_id for ref in self.packs}) != len(self.packs):
            raise InvalidInputError("new manifest: a pack stands twice in its table")
        for ref in self.packs:
            if not is_id(ref.pack_id) or not 8 <= ref.head <= min(ref.size, 0xFFFFFFFF) or ref.size >= 1 << 62:
                raise InvalidInputError(f"new manifest: {ref} is not a pack id with the sizes of its head and file")
        columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
            "pack_size": np.array([ref.size for ref in self.packs], np.uint64),
            "pack_head": np.array([ref.head for ref in self.packs], np.uint32),
            "pack": self.pack,
            "row": self.row,
            "digest": self.digest,
            "pack_id": np.frombuffer(b"".join(uuid.UUID(ref.pack_id).bytes for ref in self.packs), np.uint8).reshape(-1, 16),
        }
        return build_head({"format": f"{KIND} 1"}, SPECS, columns)

    @classmethod
    def parse(cls, data: Bytes, key: str = "this manifest") -> Manifest:
        """Parse and validate a manifest; its columns are views of `data`.

        Raises:
            FormatError: this is no manifest; names `key`.
        """
        what = shorten(key)[1:-1]
        columns = parse_head(data, SPECS, KIND, what, payload=False).columns
        if not len(columns["pack"]) == len(columns["row"]) == len(columns["digest"]):
            _refuse(what, "its columns differ in length")
        size, head, ids = columns["pack_size"], columns["pack_head"], columns["pack_id"]
        if not len(size) == len(head) == len(ids):
            _refuse(what, "the columns of its pack table differ in length")
        if np.any((head < 8) | (head > size) | (size >= 1 << 62)):
            _refuse(what, "its pack table has impossible sizes")
        if np.any((ids[:, 6] >> 4 != 7) | (ids[:, 8] >> 6 != 2)):
            _refuse(what, "its pack table holds something else than uuid7")
        if np.any(columns["pack"] >= len(ids)):
            _refuse(what, f"a chunk names a pack beyond the table of {len(ids)}")
        packs = tuple(
            PackRef(str(uuid.UUID(bytes=pack_id.tobytes())), pack_head, pack_size)
            for pack_id, pack_head, pack_size in zip(ids, head.tolist(), size.tolist(), strict=True)
        )
        if len({ref.pack_id for ref in packs}) != len(packs):
            _refuse(what, "a pack stands twice in its table")
        return cls(packs, columns["pack"], columns["row"], columns["digest"])


def cut_manifests(tensors: Sequence[tuple[bytes, int]]) -> list[range]:
    """Say which runs of consecutive tensors share a manifest.

    A tensor is never split. Where to cut depends on the rows since the last cut and on the tensor's own path, so that a
    tensor added or removed moves only the cuts near it, and the manifests behind them stay shared.

    Args:
        tensors: (path as bytes, rows) of each tensor, in order.

    Returns:
        Ranges of positions in `tensors` that cover all of them, in order.
    """
    runs = []
    start = rows = 0
    for position, (path, count) in enumerate(tensors):
        marked = hashlib.sha256(path).digest()[0] < 256 // CUT_ONE_IN
        if position > start and (rows + count > MANIFEST_ROWS or (rows >= CUT_FROM_ROWS and marked)):
            runs.append(range(start, position))
            start, rows = position, 0
        rows += count
    if start < len(tensors):
        runs.append(range(start, len(tensors)))
    return runs


def _refuse(what: str, found: str) -> NoReturn:
    raise FormatError(f"{what} is malformed: {found}; run `deltastore verify` to see what it breaks")
