"""commit(): one pass over the live tensors, then everything that follows from the copy that it took.

    resolve head ─ scan every chunk ─ encode; packs fill and go up meanwhile ─ place ─ publish
                   └── a commit that does not wait ends here for the caller; the rest is done on a thread of its own,
                       one commit after the other

Commits of one store are scanned one at a time, and finished in the order of their calls. The next scan begins when the commit
before is encoded, because until then the baseline is that commit's private copy. If a pending commit fails, those behind it fail
with the same cause: they were made on top of it.
"""

from __future__ import annotations

import atexit
import threading
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from deltastore.baseline import Baseline
from deltastore.buckets.base import Bucket
from deltastore.chunk_reader import ChunkReader
from deltastore.chunk_writer import ChunkWriter
from deltastore.commit_request import CommitRequest
from deltastore.depths import Depths
from deltastore.errors import InvalidInputError, RefConflictError, StoreFullError, short_name
from deltastore.forks import renew_in_children
from deltastore.history import Commit
from deltastore.index.index import Index
from deltastore.manifests import PackRef
from deltastore.pending import PendingCommit, PendingLine, take_untold
from deltastore.placement import NewObject, place
from deltastore.publisher import Draft, Publisher
from deltastore.recent_deltas import RecentDeltas
from deltastore.reflog import RefLog
from deltastore.scanner import Content, Scanner, State, source_bytes
from deltastore.space import estimate_commit_bytes, refuse_if_full
from deltastore.spool import Spool
from deltastore.state import FlatState, path_name
from deltastore.stored_path import FilePath
from deltastore.versions import Version, Versions
from deltastore.workers import run_in_thread

RECENT_COMMITS = 8  # whose size says what the next one may take

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Work:
    """A commit that is being scanned or encoded, on top of `parent`."""

    request: CommitRequest
    parent: Version | None
    session: str
    writer: ChunkWriter
    scanner: Scanner


class Committer:
    """The writer's side of one open store. Thread-safe.

    Args:
        baseline: keeps the copies to compare with.
        spool: for packs that wait for a slow bucket, where there is one.
    """

    def __init__(
        self,
        bucket: Bucket,
        index: Index,
        versions: Versions,
        reader: ChunkReader,
        log: RefLog,
        baseline: Baseline,
        spool: Spool | None = None,
    ) -> None:
        self._bucket = bucket
        self._index = index
        self._versions = versions
        self._reader = reader
        self._log = log
        self._baseline = baseline
        self._spool = spool
        self._depths = Depths(reader)
        self._recent = RecentDeltas()
        self._publisher = Publisher(bucket, index, versions, reader, log)
        self._pending = PendingLine()
        self._recent_bytes: dict[str, deque[int]] = {}  # of packs that the last commits to a branch brought
        self._newest: str | None = None  # the last commit that landed: that of the baseline
        self._lock = threading.Lock()
        self._busy: int | None = None  # the thread that has the lock
        _open.add(self)
        renew_in_children(self)

    # -- the two ways -----------------------------------------------------------------------------------------------------

    def commit(self, request: CommitRequest, state: State, progress: Progress | None = None) -> Commit:
        """Commit a flattened state, or a stream of named tensors of which one at a time is read.

        Args:
            progress: called with the raw bytes of each chunk that was scanned.

        Raises:
            RefConflictError: the branch is not at `expected_head`, or moved to something that does not descend from it.
            IncompatibleStateError, InvalidInputError: before anything is written.
            DeltaStoreError: a pending commit had failed, and nobody had been told.
        """
        request = request.checked()
        with self._alone():
            self._pending.settle()
            self._report_failure()
            self._log.fill_holes()
            work = self._work(request, None, progress)
            self._check_space(work, state)
            try:
                content = work.scanner.run(state, request.files)
                self._warn_of_changed_frozen()
                return self._publish(work, content, lambda _: None)[0]
            except BaseException:
                work.writer.abandon()
                raise

    def begin(
        self,
        request: CommitRequest,
        state: State,
        progress: Progress | None = None,
        *,
        on_full: Literal["raise", "warn"] = "raise",
    ) -> PendingCommit:
        """Scan as `commit` does, and finish in the background. See `commit` for the errors; later ones are `PendingCommit`'s."""
        request = request.checked()
        with self._alone():
            self._pending.wait_for_room()
            if request.expected_head is not None:  # the id of a pending commit is known to nobody
                self._pending.settle()
            self._report_failure()
            before = self._pending.last()
            if before is None:
                self._log.fill_holes()
            work = self._work(request, before, progress)
            self._check_space(work, state)
            pending = PendingCommit(request.branch, request.message, on_full=on_full)
            name = f"deltastore-commit-{request.branch}"
            started = False
            try:
                run_in_thread(lambda: self._finish(work, pending, before), name, background=True)
                started = True
                work.scanner.take(state, request.files, lambda: _wait_for(before))
            except BaseException as error:
                work.scanner.give_up(error)
                pending.set_told()
                if not started:
                    pending.set_failed(error)
                if before is not None and before.is_cause_of(error):
                    before.set_told()  # by this call
                raise
            finally:
                self._pending.add(pending)  # not before: a source may read from this store, which waits for pending commits
            self._warn_of_changed_frozen()
            if _at_exit.is_set():
                pending.wait()  # nobody else will
                _warn_of_untold()
            return pending

    def failed(self, request: CommitRequest, error: StoreFullError) -> PendingCommit:
        """A commit that found no room before it could begin, and about which a warning is enough."""
        pending = PendingCommit(request.branch, request.message, on_full="warn")
        pending.set_failed(error)
        with self._alone():
            self._pending.add(pending)
        return pending

    def _work(self, request: CommitRequest, before: PendingCommit | None, progress: Progress | None) -> _Work:
        """What a commit is made with. `before`: the pending one that may be its parent."""
        parent = before.wait_encoded() if before is not None and before.branch == request.branch else None
        if parent is None:
            head = self._head(request)
            parent = None if head is None else self._versions.get(head)
            self._baseline.begin(head)
        session = self._publisher.open_session()
        writer = ChunkWriter(
            self._bucket,
            lambda key, size: self._index.register(session, [(key, "pack", size)]),
            self._reader.add_columns,
            spool=None if self._bucket.capabilities.local else self._spool,
        )
        scanner = Scanner(self._reader, self._index, self._depths, self._recent, self._baseline, writer, parent, progress)
        return _Work(request, parent, session, writer, scanner)

    def _check_space(self, work: _Work, state: State) -> None:
        """Refuse before anything is written what will not fit, as far as that can be told."""
        free = self._bucket.free_bytes()
        recent = self._recent_bytes.get(work.request.branch, ())
        if free is None or not isinstance(state, FlatState) or (work.parent is not None and not recent):
            return
        sizes: dict[str, int] = {}
        for source in state.tensors:
            sizes[source.dtype] = sizes.get(source.dtype, 0) + source_bytes(source)
        what = f"a commit to {work.request.branch!r}"
        refuse_if_full(free, estimate_commit_bytes(sizes, recent), what, self._bucket.url)

    def _head(self, request: CommitRequest) -> str | None:
        ref = self._index.ref(request.branch)
        if ref is not None and ref.kind != "branch":
            raise InvalidInputError(f"{request.branch!r} is a tag, and tags don't move; commit to a branch")
        head = None if ref is None else ref.commit_id
        if request.expected_head is not None and head != request.expected_head:
            raise RefConflictError(request.branch, request.expected_head, head)
        return head

    # -- finishing --------------------------------------------------------------------------------------------------------

    def _finish(self, work: _Work, pending: PendingCommit, before: PendingCommit | None) -> None:
        """The second half of a commit in the background, on its own thread. Whatever happens, `pending` is told."""
        try:
            try:
                landed = _wait_for(before)
                work.scanner.wait_for_work()
                if before is not None:
                    self._log.fill_holes()
                    if before.branch == work.request.branch:  # it may have been rebased: same content, another id
                        work = replace(work, parent=landed)
                content = work.scanner.finish()
                commit, version = self._publish(work, content, pending.set_encoded)
            except BaseException as error:
                work.scanner.give_up(error)
                work.writer.abandon()
                raise
        except BaseException as error:
            pending.set_failed(error)
        else:
            pending.set_landed(commit, version)

    def _publish(self, work: _Work, content: Content, encoded: Callable[[Version], None]) -> tuple[Commit, Version]:
        """From the encoded content to the commit point and past it."""
        packs, unsent = work.writer.finish()
        self._reader.learn(PackRef(pack.pack_id, pack.head, pack.size) for pack in packs)
        draft = Draft(
            request=work.request,
            parent=work.parent,
            write_id=str(uuid.uuid4()),
            session=work.session,
            content=content,
            placed=place(content, packs, work.parent, self._depths, self._reader),
            packs=tuple(packs),
            unsent=tuple(NewObject("pack", pack.size, upload) for pack, upload in unsent),
        )

        def before(version: Version) -> None:
            encoded(version)
            work.writer.join()

        commit, version = self._publisher.publish(draft, before)
        self._depths.retain(content.rows)
        if work.parent is not None:
            recent = self._recent_bytes.setdefault(work.request.branch, deque(maxlen=RECENT_COMMITS))
            recent.append(sum(pack.size for pack in packs))
        self._newest = commit.id
        return commit, version

    def _warn_of_changed_frozen(self) -> None:
        """A base model under adapters drifts when these are merged into it and taken out again: nobody would notice."""
        changed = self._baseline.changed_frozen()
        if changed:
            names = ", ".join(short_name(path_name(path)) for path in changed[:3] if not isinstance(path, FilePath))
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            warnings.warn(
                f"parameters that do not require gradients have changed since the last commit: {names}{more}; they are "
                "committed as they are now. Adapters that were merged into them and taken out again leave such changes",
                stacklevel=4,
            )

    # -- pending commits --------------------------------------------------------------------------------------------------

    def settle(self, *, tell: bool = False) -> None:
        """Wait until no commit is on its way.

        Args:
            tell: raise a failure that nobody has been told of; else that comes later.
        """
        self._pending.settle()
        if tell:
            with self._alone():
                self._report_failure()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time, and none within another."""
        if self._busy == threading.get_ident():
            raise InvalidInputError(
                "this thread is in the middle of a commit to the same store, whose source or whose signal handler called this; "
                "have the handler set a flag, and commit or close when the first commit has returned"
            )
        with self._lock:
            self._busy = threading.get_ident()
            try:
                yield
            finally:
                self._busy = None

    def _report_failure(self) -> None:
        failure = self._pending.take_failure()
        if failure is None:
            return
        error, warn = failure
        if not warn:
            raise error
        warnings.warn(f"an earlier commit could not be stored: {error}", stacklevel=4)

    def close(self) -> None:
        """Wait for pending commits, then give back the lease and the baseline.

        Raises:
            DeltaStoreError: a pending commit had failed, and nobody had been told; everything is closed all the same.
        """
        with self._alone():
            self._close()
            self._report_failure()

    def close_at_exit(self) -> None:
        """As `close`, at the end of the process: nobody can handle an error, and failures are told by `_close_all`."""
        try:
            with self._alone():
                self._close()
        except Exception as error:
            warnings.warn(f"a store could not be closed: {short_name(str(error), 1000)}", stacklevel=1)

    def _close(self) -> None:
        self._pending.settle()
        self._publisher.close()
        self._baseline.close(self._newest)
        _open.discard(self)

    def renew_after_fork(self) -> None:
        """See `forks`: a child has no pending commits and no share in the parent's lease and baseline file."""
        self._lock = threading.Lock()
        self._busy = None
        self._pending = PendingLine()
        self._baseline = self._baseline.in_child()


def _wait_for(before: PendingCommit | None) -> Version | None:
    return None if before is None else before.landed()


_open: weakref.WeakSet[Committer] = weakref.WeakSet()
_at_exit = threading.Event()  # set when the process no longer waits for threads


@atexit.register
def _close_all() -> None:
    _at_exit.set()
    for committer in list(_open):
        committer.close_at_exit()
    _warn_of_untold()


def _warn_of_untold() -> None:
    """Nobody can handle an error any more; this is also of stores that were forgotten before the end."""
    for pending in take_untold():
        warnings.warn(f"{pending!r}: {short_name(str(pending.error()) or repr(pending.error()), 1000)}", stacklevel=1)
