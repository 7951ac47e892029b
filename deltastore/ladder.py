"""The ladder: how far a delta reaches back, so that every chain stays short without full copies.

Besides its delta to the version before (span 1), a commit brings folded deltas of span 8, 64, 512 … at heights that are
multiples of these. A cold read then follows the widest entry of each version: at most seven deltas per span lie between an
entry and a full one. A follower uses the spans that fit the version it holds.

The rule is evaluated on the chain of a chunk alone (the spans of its entries, widest first, as pack columns give them), so it
holds for rebased commits too, whose height is not the one they were encoded for:

* a fold of span 8^k is due when the height is a multiple of 8^k, or when the chain would hold more than seven deltas of
  span 8^(k-1);
* it sums every delta on top of the chain whose span is below 8^k, and is based on the entry below them, which is wider or full.

This module is pure: it knows spans and counts, no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltastore.options import LADDER_BASE

FULL_SPAN = 0  # the span of an entry that needs no base
STEP_SPAN = 1


@dataclass(frozen=True, slots=True)
class Depth:
    """What a writer must know of the chain below an entry, without walking it.

    `counts[k]` is the number of deltas of span 8^k in the chain, `root_stored` the stored length in bytes of its full entry,
    `packs` the ids of all packs that the chain touches.
    """

    counts: tuple[int, ...]
    root_stored: int
    packs: frozenset[str]

    @property
    def deltas(self) -> int:
        """How many deltas are decoded to read the entry."""
        return sum(self.counts)

    def fold_due(self, height: int, *, changed: bool) -> bool:
        """Whether `folds` would yield anything for a chunk of this depth, seen before its own new delta is added."""
        counts = self.counts
        if changed:
            return (height > 0 and height % LADDER_BASE == 0) or (bool(counts) and counts[0] + 1 >= LADDER_BASE)
        level = 0
        while height > 0 and height % LADDER_BASE == 0:
            height //= LADDER_BASE
            level += 1
        return any(counts[:level])


class DepthBook:
    """Depths of entries, remembered with one shared set of pack ids per distinct chain."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, str], frozenset[str]] = {}
        self._alive: dict[int, frozenset[str]] = {}

    def _with(self, packs: frozenset[str], pack_id: str) -> frozenset[str]:
        if pack_id in packs:
            return packs
        key = (id(packs), pack_id)
        found = self._sets.get(key)
        if found is None:
            if len(self._sets) >= 4096:  # forget: sharing is only thrift
                self._sets.clear()
                self._alive.clear()
            found = packs | {pack_id}
            self._sets[key] = found
            self._alive[id(packs)] = packs  # keeps the id of the key meaningful
        return found

    def full(self, pack_id: str, stored_length: int) -> Depth:
        """The depth of a full entry."""
        return Depth((), stored_length, self._with(_NO_PACKS, pack_id))

    def on(self, base: Depth, span: int, pack_id: str) -> Depth:
        """The depth of a delta of this span based on an entry of depth `base`."""
        level = level_of_span(span)
        counts = list(base.counts) + [0] * (level + 1 - len(base.counts))
        counts[level] += 1
        return Depth(tuple(counts), base.root_stored, self._with(base.packs, pack_id))


_NO_PACKS: frozenset[str] = frozenset()


def level_of_span(span: int) -> int:
    """k of a span 8^k."""
    level = 0
    while span > 1:
        span //= LADDER_BASE
        level += 1
    return level


@dataclass(frozen=True, slots=True)
class Fold:
    """One fold that is due: its span, and how many entries on top of the *original* chain it sums."""

    span: int
    entries: int


def folds(spans: Sequence[int], height: int) -> Iterator[Fold]:
    """Which folds a commit at `height` owes for a chunk whose chain has these spans.

    Args:
        spans: of the chain's entries, newest and widest first, the full entry (span 0) last. A new delta of this very
            commit stands first.
        height: first-parent height of the commit.

    Yields folds from narrow to wide. Each sums a prefix of the chain; a wider one sums a longer prefix.
    """
    depth = len(spans)
    folded_span, folded_entries = None, 0  # the newest fold stands for the first `folded_entries` entries
    level = 1
    while True:
        span = LADDER_BASE**level
        due_by_height = height > 0 and height % span == 0
        narrow = spans[folded_entries:].count(span // LADDER_BASE) + (folded_span == span // LADDER_BASE)
        if not due_by_height and narrow < LADDER_BASE:
            return
        stop = folded_entries
        while stop < depth and spans[stop] != FULL_SPAN and spans[stop] < span:
            stop += 1
        if stop > 0 and (folded_span is not None or spans[0] < span) and spans[0] != FULL_SPAN:
            yield Fold(span, stop)
            folded_span, folded_entries = span, stop
        level += 1
