"""What has locks or threads starts anew in a forked child, where the threads that held the locks are gone."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something that a forked child must not use as it was."""

    def renew_after_fork(self) -> None:
        """Called in the child, right after the fork: take new locks, drop what other threads were at."""


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Have `thing.renew_after_fork()` called in every child that this process forks while `thing` is in use."""
    _renewables.add(thing)


def _renew_all() -> None:
    for thing in list(_renewables):
        thing.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
