"""Commits on their way: what `commit(wait=False)` returns, and the line they stand in."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from concurrent.futures import Future, InvalidStateError
from typing import Literal

from deltastore.errors import DeltaStoreError, InvalidInputError, StoreFullError, short_name
from deltastore.history import Commit
from deltastore.versions import Version

IN_FLIGHT = 2  # pending commits; one more waits in its call

Phase = Literal["scanned", "encoded", "visible", "failed"]


class PendingCommit:
    """A commit that goes on in the background; the model that was committed may change already.

    Its phases: "scanned" (a private copy is taken), "encoded" (its bytes are on their way), then "visible" (durable, in the
    history, seen by everybody) or "failed" (as if it had never been).

    Attributes:
        branch: what it will move.
        message: its message.
    """

    def __init__(self, branch: str, message: str, *, on_full: Literal["raise", "warn"] = "raise") -> None:
        self.branch = branch
        self.message = message
        self.on_full = on_full
        self._told = False
        self._process = os.getpid()
        self._outcome: Future[tuple[Commit, Version]] = Future()
        self._encoded = threading.Event()
        self._version: Version | None = None

    def __repr__(self) -> str:
        return f"PendingCommit({short_name(self.message, 60)!r} to {self.branch!r}, {self.phase})"

    @property
    def phase(self) -> Phase:
        """How far it is."""
        if self._process == os.getpid() and self._outcome.done():
            return "visible" if self._outcome.exception() is None else "failed"
        return "encoded" if self._encoded.is_set() else "scanned"

    def done(self) -> bool:
        """Whether it is visible or has failed."""
        return self.phase in ("visible", "failed")

    def result(self, timeout: float | None = None) -> Commit:
        """Wait for the commit, durable and visible.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: it is still on its way, and stays so.
            DeltaStoreError: it failed, with the error that a waiting `commit` would have raised; so did the commits after it.
        """
        self._check_process()
        try:
            error = self._outcome.exception(timeout)  # returned, not raised: a failure may be a TimeoutError, too
        except TimeoutError:
            raise TimeoutError(f"commit {short_name(self.message, 60)!r} is still on its way after {timeout} s") from None
        if error is not None:
            self.set_told()
            raise error
        return self._outcome.result()[0]

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise InvalidInputError(
                f"the commit {short_name(self.message, 60)!r} is made by process {self._process}, which this one was forked "
                "from; ask for its result there"
            )

    # -- for the committer ------------------------------------------------------------------------------------------------

    def set_encoded(self, version: Version) -> None:
        """Its content is known, the baseline free for the next commit."""
        self._version = version
        self._encoded.set()

    def set_landed(self, commit: Commit, version: Version) -> None:
        """It is visible."""
        self._outcome.set_result((commit, version))

    def set_failed(self, error: BaseException) -> None:
        """It will never be. The first reason counts."""
        with contextlib.suppress(InvalidStateError):
            self._outcome.set_exception(error)
            if not self._told:
                _untold.add(self)
        self._encoded.set()

    def set_told(self) -> None:
        """Whoever made it knows of its failure, or will in a moment."""
        self._told = True
        _untold.discard(self)

    @property
    def failed_untold(self) -> bool:
        """It has failed, and nobody has been told."""
        return not self._told and self.error() is not None

    def wait_encoded(self) -> Version | None:
        """Wait until the baseline is free; what the version will be, None when it failed."""
        self._encoded.wait()
        return self._version if self.error() is None else None

    def wait(self) -> None:
        """Wait until it is done, however it ends."""
        self._outcome.exception()

    def landed(self) -> Version:
        """Wait for the version. Raises an error with the same cause when it failed."""
        try:
            return self._outcome.result()[1]
        except DeltaStoreError as error:
            raise copy.copy(error) from error

    def error(self) -> BaseException | None:
        """Why it failed, so far as it has."""
        return self._outcome.exception() if self._outcome.done() else None

    def is_cause_of(self, error: BaseException) -> bool:
        """Whether an error is this one's own failure, or what `landed` made of it."""
        own = self.error()
        return own is not None and own in (error, error.__cause__)


class PendingLine:
    """The pending commits of one store, oldest first. One thread adds at a time."""

    def __init__(self) -> None:
        self._line: list[PendingCommit] = []

    def add(self, pending: PendingCommit) -> None:
        """Stand at the end."""
        self._line.append(pending)

    def last(self) -> PendingCommit | None:
        """The newest that is still on its way."""
        return next((each for each in reversed(self._line) if not each.done()), None)

    def wait_for_room(self) -> None:
        """Wait until one more may be on its way: the baseline is free, and fewer than `IN_FLIGHT` are."""
        for each in list(self._line):
            each.wait_encoded()
        waiting = [each for each in self._line if not each.done()]
        for each in waiting[: max(0, len(waiting) - IN_FLIGHT + 1)]:
            each.wait()

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        for each in list(self._line):
            each.wait()

    def take_failure(self) -> tuple[BaseException, bool] | None:
        """The first failure that nobody has been told of, and whether a warning is enough; all that failed count as told."""
        done = [each for each in self._line if each.done()]  # once: more may be done in a moment, and must not be lost
        self._line = [each for each in self._line if each not in done]
        failed = [each for each in done if each.failed_untold]
        for each in failed:
            each.set_told()
        if not failed:
            return None
        error = failed[0].error()
        assert error is not None
        return error, isinstance(error, StoreFullError) and all(each.on_full == "warn" for each in failed)


_untold: set[PendingCommit] = set()  # failures, also of stores that nobody holds any more


def take_untold() -> list[PendingCommit]:
    """Commits of this process that have failed without anybody being told; they count as told from now on."""
    found = [each for each in list(_untold) if each.failed_untold]
    for each in found:
        each.set_told()
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_untold.clear)  # they are the parent's
