"""The cache of steps: what it gives back, and what leaves it."""

from __future__ import annotations

import numpy as np
import pytest

from deltastore import recent_steps
from deltastore.codecs import Steps, Word, kernel
from deltastore.recent_steps import RecentSteps


def steps_of(count: int) -> Steps:
    return kernel.collect(np.ones(2 * count, np.uint8), Word(2, True))


def test_gives_back_what_was_added_until_a_fold_stands_for_it() -> None:
    recent = RecentSteps()
    first, second = steps_of(10), steps_of(20)
    recent.add(("p", 0), first)
    recent.add(("p", 1), second)
    assert recent.get(("p", 0)) is first
    assert recent.get(("p", 2)) is None
    recent.remove([("p", 0), ("never", 7)])
    assert recent.get(("p", 0)) is None
    assert recent.get(("p", 1)) is second


def test_the_oldest_leave_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    size = steps_of(100).nbytes
    assert size == 300  # a gap and two bytes of step for each change
    monkeypatch.setattr(recent_steps, "RECENT_STEPS_BYTES", 3 * size)
    recent = RecentSteps()
    for row in range(5):
        recent.add(("p", row), steps_of(100))
    assert [recent.get(("p", row)) is not None for row in range(5)] == [False, False, True, True, True]
    recent.remove([("p", 3)])
    recent.add(("p", 5), steps_of(100))
    assert recent.get(("p", 2)) is not None
    recent.add(("p", 6), steps_of(500))  # larger than everything: nothing is kept, itself included
    assert [recent.get(("p", row)) for row in range(7)] == [None] * 7
