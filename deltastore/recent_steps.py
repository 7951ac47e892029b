"""The steps that a writer encoded last, in memory: what the next folds sum, without fetching and decompressing it again.

A cache and nothing else: what is not here is read from the store. A fold takes the steps of the entries it stands for out of
the cache, since no later fold sums them; the oldest leave first when there are too many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from deltastore.codecs import Steps
from deltastore.options import RECENT_STEPS_BYTES

Place = tuple[str, int]  # pack id, row


class RecentSteps:
    """Steps by the place of the entry that holds them, at most `RECENT_STEPS_BYTES` in all. Thread-safe."""

    def __init__(self) -> None:
        self._steps: dict[Place, tuple[Steps, int]] = {}  # and their bytes
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, place: Place, steps: Steps) -> None:
        """Remember the steps of an entry that was just written."""
        size = steps.nbytes
        with self._lock:
            self._steps[place] = steps, size
            self._bytes += size
            while self._bytes > RECENT_STEPS_BYTES:
                self._bytes -= self._steps.pop(next(iter(self._steps)))[1]

    def get(self, place: Place) -> Steps | None:
        """The steps of an entry, None when they are not here."""
        found = self._steps.get(place)
        return None if found is None else found[0]

    def remove(self, places: Iterable[Place]) -> None:
        """Forget entries that a fold now stands for."""
        with self._lock:
            for place in places:
                found = self._steps.pop(place, None)
                if found is not None:
                    self._bytes -= found[1]
