"""Depths of the entries that the current head is read through, and the packs that their chains touch."""

from __future__ import annotations

from collections.abc import Sequence

from deltastore.chunk_reader import ChunkReader
from deltastore.ladder import Depth, DepthBook
from deltastore.manifests import ChunkRow
from deltastore.packs import PackEntry, Place


class Depths:
    """Depth of every entry in the chains of the current head, so that chains are walked once and not at every commit."""

    def __init__(self, reader: ChunkReader) -> None:
        self._reader = reader
        self._book = DepthBook()
        self._known: dict[Place, tuple[Depth, Place | None]] = {}  # and the place of the base

    def of(self, pack_id: str, row: int) -> Depth:
        """The depth of an entry; walks its chain as far as it isn't known."""
        found = self._known.get((pack_id, row))
        if found is None:
            for entry in reversed(self._reader.chain(pack_id, row, self._known)):
                self._learn((entry.pack_id, entry.row), entry.span, entry.base, entry.stored_length)
            found = self._known[pack_id, row]
        return found[0]

    def add(self, place: Place, entry: PackEntry) -> None:
        """Record the depth of an entry that was just written."""
        if entry.base is not None:
            self.of(*entry.base)
        self._learn(place, entry.span, entry.base, len(entry.payload))

    def _learn(self, place: Place, span: int, base: Place | None, stored_length: int) -> None:
        if base is None:
            self._known[place] = self._book.full(place[0], stored_length), None
        else:
            self._known[place] = self._book.on(self._known[base][0], span, place[0]), base

    def retain(self, rows: Sequence[Sequence[ChunkRow]]) -> None:
        """Forget entries that no chain of the head passes, once they may be the most."""
        if len(self._known) <= 32 * sum(map(len, rows)) + 1024:
            return
        kept: dict[Place, tuple[Depth, Place | None]] = {}
        for chunks in rows:
            for row in chunks:
                place: Place | None = (row.pack_id, row.row)
                while place is not None and place not in kept and place in self._known:
                    kept[place] = self._known[place]
                    place = kept[place][1]
        self._known = kept


def chain_packs(depths: Depths, rows: Sequence[ChunkRow]) -> list[str]:
    """Ids of all packs that the chains of these rows touch, sorted: the closure that a manifest names."""
    distinct: dict[int, frozenset[str]] = {}
    for row in rows:
        packs = depths.of(row.pack_id, row.row).packs
        distinct[id(packs)] = packs
    union: set[str] = set()
    for packs in distinct.values():
        union |= packs
    return sorted(union)
