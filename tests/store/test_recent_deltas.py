"""The cache of deltas: what it gives back, and what leaves it."""

from __future__ import annotations

import pytest

from deltastore import recent_deltas
from deltastore.recent_deltas import RecentDeltas

SIZE = 100


def delta(size: int = SIZE) -> tuple[str, bytes]:
    return "sparse-ulp@1", bytes(size)


def test_gives_back_what_was_added_until_a_fold_stands_for_it() -> None:
    recent = RecentDeltas()
    first, second = delta(), delta()
    recent.add(("p", 0), first)
    recent.add(("p", 1), second)
    assert recent.get(("p", 0)) is first
    assert recent.get(("p", 2)) is None
    recent.remove([("p", 0), ("never", 7)])
    assert recent.get(("p", 0)) is None
    assert recent.get(("p", 1)) is second


def test_the_oldest_leave_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_deltas, "RECENT_DELTAS_BYTES", 3 * SIZE)
    recent = RecentDeltas()
    for row in range(5):
        recent.add(("p", row), delta())
    assert [recent.get(("p", row)) is not None for row in range(5)] == [False, False, True, True, True]
    recent.remove([("p", 3)])
    recent.add(("p", 5), delta())
    assert recent.get(("p", 2)) is not None
    recent.add(("p", 6), delta(5 * SIZE))  # larger than everything: nothing is kept, itself included
    assert [recent.get(("p", row)) for row in range(7)] == [None] * 7
