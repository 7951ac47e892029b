"""Stop at chosen operations of a real store: hold them, or fail there, while the rest of it goes on.

moments = Moments()
with moments.installed(), DeltaStore(folder) as store, moments.held("put packs") as arrived:
    pending = store.commit(state, wait=False)
    arrived.wait(60)           # the commit stands before its first pack
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from faulty import Faults

SECONDS = 120.0  # nothing here waits that long unless it hangs


class Moments(Faults):
    """Actions that are called with the label of each operation that is about to be done, on the thread that does it."""

    def __init__(self) -> None:
        super().__init__("raise")
        self.actions: list[Callable[[str], None]] = []

    def begin(self, label: str) -> int:
        """See `Faults.begin`."""
        for action in list(self.actions):
            action(label)
        return super().begin(label)

    @contextmanager
    def held(self, prefix: str, error: BaseException | None = None) -> Iterator[threading.Event]:
        """Operations whose label begins so wait until the block ends; yields what is set when the first one waits.

        Args:
            error: what those that waited raise then.
        """
        arrived, released = threading.Event(), threading.Event()

        def hold(label: str) -> None:
            if label.startswith(prefix):
                arrived.set()
                assert released.wait(SECONDS), f"{label} was never released"
                if error is not None:
                    raise error

        self.actions.append(hold)
        try:
            yield arrived
        finally:
            self.rest()
            released.set()

    def fail(self, prefix: str, error: BaseException) -> None:
        """The next operation whose label begins so raises an error."""

        def act(label: str) -> None:
            if label.startswith(prefix) and act in self.actions:
                self.actions.remove(act)
                raise error

        self.actions.append(act)

    def rest(self) -> None:
        """Let operations pass, those aside that wait already."""
        self.actions = [action for action in self.actions if action.__name__ != "hold"]
