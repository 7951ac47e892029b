"""The deltas that a writer encoded last, uncompressed and in memory: what the next folds sum, without fetching it again.

A cache and nothing else: what is not here is read from the store. A fold takes the entries it stands for out of the cache,
since no later fold sums them; the oldest leave first when there are too many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from deltastore.forks import renew_in_children
from deltastore.options import RECENT_DELTAS_BYTES
from deltastore.packs import Place

Delta = tuple[str, bytes]  # codec id, payload


class RecentDeltas:
    """Deltas by the place of the entry that holds the same steps, at most `RECENT_DELTAS_BYTES` in all. Thread-safe."""

    def __init__(self) -> None:
        self._deltas: dict[Place, Delta] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """See `deltastore.forks`: another thread may have been in the middle of a change."""
        self._lock = threading.Lock()
        self._deltas = {}
        self._bytes = 0

    def add(self, place: Place, delta: Delta) -> None:
        """Remember the steps of an entry that was just written."""
        with self._lock:
            self._deltas[place] = delta
            self._bytes += len(delta[1])
            while self._bytes > RECENT_DELTAS_BYTES:
                self._bytes -= len(self._deltas.pop(next(iter(self._deltas)))[1])

    def get(self, place: Place) -> Delta | None:
        """The steps of an entry, None when they are not here."""
        return self._deltas.get(place)

    def remove(self, places: Iterable[Place]) -> None:
        """Forget entries that a fold now stands for."""
        with self._lock:
            for place in places:
                delta = self._deltas.pop(place, None)
                if delta is not None:
                    self._bytes -= len(delta[1])
