"""Work that one thread hands to another: in order, a bounded number of bytes at a time, failing together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Handoff(Generic[T]):
    """A queue of one producer and one consumer.

    Args:
        limit: bytes of items that may wait; the producer then does.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, item: T, nbytes: int) -> None:
        """Hand over an item. Raises the error of the consumer when that has failed."""
        with self._changed:
            self._items.append((item, nbytes))
            self._bytes += nbytes
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._bytes <= self._limit or self._error is not None)
            self._raise()

    def close(self) -> None:
        """The producer is done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Either side gives up: the other one gets the error."""
        with self._changed:
            self._error = self._error or error
            self._items.clear()
            self._changed.notify_all()

    def wait_for_work(self) -> None:
        """Wait until the producer is done or waits itself. Raises its error."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._bytes > self._limit or self._error is not None)
            self._raise()

    def __iter__(self) -> Iterator[T]:
        """The items, until the producer is done. Raises its error."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._items) or self._closed or self._error is not None)
                self._raise()
                if not self._items:
                    return
                item, nbytes = self._items.popleft()
                self._bytes -= nbytes
                self._changed.notify_all()
            yield item

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
