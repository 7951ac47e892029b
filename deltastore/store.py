"""DeltaStore: the facade. Opens a store, wires its parts, and offers what people do with it.

What only one use case needs is imported by it, so that looking at the history starts fast.
"""

from __future__ import annotations

import getpass
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, overload

from deltastore import display, layout
from deltastore.buckets import open_bucket
from deltastore.canonical import utc_now
from deltastore.errors import (
    AlreadyExistsError,
    InvalidInputError,
    ReadOnlyError,
    RefConflictError,
    RevisionNotFoundError,
    StoreFullError,
)
from deltastore.forks import renew_in_children
from deltastore.history import Commit, History, check_ref_name
from deltastore.index.records import RefMovement, RefRecord
from deltastore.opening import make_store, open_index
from deltastore.options import MAX_SPOOL_BYTES
from deltastore.progress import progress_bar

if TYPE_CHECKING:
    from deltastore.chunk_reader import ChunkReader
    from deltastore.commit import Committer
    from deltastore.diff import Diff
    from deltastore.layers import LayerHistory
    from deltastore.pending import PendingCommit
    from deltastore.reflog import RefLog
    from deltastore.snapshot import Snapshot
    from deltastore.stats import DiskUsage, StoreStats
    from deltastore.verify import VerifyReport
    from deltastore.versions import Versions


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or tag and the commit it names."""

    name: str
    kind: Literal["branch", "tag"]
    commit_id: str


class _CommitOptions(TypedDict, total=False):
    """What `DeltaStore.commit` takes besides what decides the type of its result."""

    branch: str
    metadata: Mapping[str, Any] | None
    cast: Mapping[str, Any] | None
    files: Mapping[str, str | os.PathLike[str] | bytes] | None
    tag: str | None
    author: str | None
    expected_head: str | None
    base: str | None
    resolver: Callable[[str], Any] | None


class DeltaStore:
    """A store of model versions. A context manager; thread-safe; pickles as its address.

    Args:
        address: a folder.
        read_only: refuse every write.
        trust: "store" checks the xxh3-128 of every chunk that is read, "none" its BLAKE3 digest too.
        profile: which codecs new commits use; "fast" is the only one so far.
        baseline: where the private copy of the last committed tensors is, which lets the next commit find its changes in one
            pass: in memory ("ram"), or in a file of the cache folder that a later process can go on with ("disk"); "auto" is
            memory while the copy fits into half of what is available, else disk, and says so; with "none" the parent version
            is read from the store where a chunk has changed.
        cache_dir: the cache folder; by default DELTASTORE_CACHE, else `$HF_HOME/deltastore`.
        max_spool: bytes of packs that may wait on disk, in the cache folder, for a bucket slower than the encoder.

    Raises:
        StoreNotFoundError: there is no store at this address.
        IndexSchemaError: the index is newer than this version of deltastore, or that of another store.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        read_only: bool = False,
        trust: Literal["store", "none"] = "store",
        profile: Literal["fast"] = "fast",
        baseline: Literal["auto", "ram", "disk", "none"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        max_spool: int = MAX_SPOOL_BYTES,
    ) -> None:
        _check_option("trust", trust, ("store", "none"))
        _check_option("profile", profile, ("fast",))
        _check_option("baseline", baseline, ("auto", "ram", "disk", "none"))
        self.address = os.fspath(address)
        self._options: dict[str, Any] = {
            "read_only": read_only,
            "trust": trust,
            "profile": profile,
            "baseline": baseline,
            "cache_dir": None if cache_dir is None else os.fspath(cache_dir),
            "max_spool": max_spool,
        }
        self._bucket = open_bucket(self.address)
        self._index = open_index(self._bucket, self.address, read_only=read_only)
        self._history = History(self._index)
        self._committer: Committer | None = None
        self._lock = threading.Lock()
        self._closed = False
        renew_in_children(self)

    @classmethod
    def create(cls, address: str | os.PathLike[str], *, exist_ok: bool = False, **options: Any) -> Self:
        """Make a store and open it.

        Args:
            exist_ok: open the store that is there, if there is one.
            options: as for opening.

        Raises:
            AlreadyExistsError: a store is there.
            InvalidInputError: the place is inside or around another store.
        """
        if options.get("read_only"):
            raise ReadOnlyError("a store can't be created read-only; create it, then open it with read_only=True")
        bucket = open_bucket(os.fspath(address))
        if bucket.stat([layout.STORE_KEY])[layout.STORE_KEY] is not None:
            if not exist_ok:
                raise AlreadyExistsError(f"{os.fspath(address)} is a deltastore already; open it, or pass exist_ok=True")
            return cls(address, **options)
        make_store(bucket)
        return cls(address, **options)

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for pending commits, then give back connections and memory. Harmless when called twice.

        Raises:
            DeltaStoreError: a pending commit had failed, and nobody had asked for its result.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._committer is not None:
                self._committer.close()
        finally:
            self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            warnings.warn(f"a commit in the background has failed, too: {failure}", stacklevel=2)

    def renew_after_fork(self) -> None:
        """See `deltastore.forks`."""
        self._lock = threading.Lock()

    @cached_property
    def _reader(self) -> ChunkReader:
        from deltastore.chunk_reader import ChunkReader

        return ChunkReader(self._bucket, verify_digests=self._options["trust"] == "none")

    @cached_property
    def _versions(self) -> Versions:
        from deltastore.versions import Versions

        return Versions(self._bucket, self._index, self._reader)

    @cached_property
    def _log(self) -> RefLog:
        from deltastore.reflog import RefLog

        return RefLog(self._bucket, self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self.address, self._options)

    def __repr__(self) -> str:
        return f"DeltaStore({self.address!r})"

    def _repr_html_(self) -> str:
        if self._closed:
            return display.card(repr(self), [("state", "closed")])
        refs = self._index.refs()
        heads = self._index.commits(ref.commit_id for ref in refs[: display.ROWS])
        messages = {id_: head.message.split("\n", 1)[0] for id_, head in heads.items()}
        rows = ((ref.kind, ref.name, ref.commit_id[:12], messages.get(ref.commit_id)) for ref in refs)
        return display.card(repr(self), [], display.table(("", "name", "commit", "message"), rows, len(refs)))

    # -- committing ---------------------------------------------------------------------------------------------------

    @overload
    def commit(
        self,
        source: Any,
        message: str = "",
        *,
        wait: Literal[True] = True,
        on_full: Literal["raise"] = "raise",
        **options: Unpack[_CommitOptions],
    ) -> Commit: ...

    @overload
    def commit(
        self,
        source: Any,
        message: str = "",
        *,
        wait: Literal[True] = True,
        on_full: Literal["warn"],
        **options: Unpack[_CommitOptions],
    ) -> Commit | None: ...

    @overload
    def commit(
        self,
        source: Any,
        message: str = "",
        *,
        wait: Literal[False],
        on_full: Literal["raise", "warn"] = "raise",
        **options: Unpack[_CommitOptions],
    ) -> PendingCommit: ...

    def commit(
        self,
        source: Any,
        message: str = "",
        *,
        branch: str = "main",
        metadata: Mapping[str, Any] | None = None,
        cast: Mapping[str, Any] | None = None,
        files: Mapping[str, str | os.PathLike[str] | bytes] | None = None,
        tag: str | None = None,
        author: str | None = None,
        expected_head: str | None = None,
        base: str | None = None,
        resolver: Callable[[str], Any] | None = None,
        wait: bool = True,
        on_full: Literal["raise", "warn"] = "raise",
    ) -> Commit | PendingCommit | None:
        """Commit a version: only what changed against the head of the branch is stored, bit for bit.

        Args:
            source: a module, a nested state of dicts, lists and tuples with tensors and plain values, an iterator of
                (name, tensor) pairs that is read one tensor at a time, or the path of a `.safetensors` file, of a
                `.pt`, `.pth` or `.bin` file of `torch.save` that holds nothing but data (nothing in it is called), or of a
                folder with one (all its other files are kept). Any part of a state may be an object with `state_dict()`,
                such as an optimizer or a scheduler.
            branch: moves to the new commit; made when it does not exist.
            metadata: plain values to find the commit by, such as {"step": 100, "loss": 1.7}.
            cast: {name pattern: torch dtype}; floating tensors are converted before they are committed.
            files: {name: path or bytes} of what else belongs to the version, up to 64 MiB each.
            tag: made at the new commit.
            author: by default user@host.
            expected_head: a commit id; refuse when the branch is not there any more.
            base: the revision that this version is an adapter of; its commit id goes into the metadata as "base".
            resolver: gives, for the name of a tensor that is on the meta device because its values are offloaded, a
                torch tensor with them. Called when the tensor is read; one result is held at a time.
            wait: False returns as soon as the source may change again, and finishes in the background. At most two commits
                are on their way; a third call waits for the first.
            on_full: "warn" lets a run go on without this commit when the store is full.

        Returns:
            The commit, durable and visible; with `wait=False` a `PendingCommit`; None when the store was full and `on_full` is
            "warn": nothing was committed then.

        Raises:
            RefConflictError: the branch is not at `expected_head`, or was reset meanwhile.
            IncompatibleStateError: something in the state can't be stored; names it; nothing was written.
            StoreFullError: no space left; everything is as it was.
            DeltaStoreError: an earlier commit with `wait=False` had failed, and nobody had asked for its result.
        """
        _check_option("on_full", on_full, ("raise", "warn"))
        self._check_writable()
        if tag is not None:
            self._check_new_ref(tag)
        from deltastore.commit_request import CommitRequest
        from deltastore.sources import file_bytes, flattened

        pinned = self._with_base(dict(metadata or {}), base)
        state, own_files = flattened(source, cast, resolver)
        contents = {**own_files, **{name: file_bytes(name, value) for name, value in (files or {}).items()}}
        request = CommitRequest(
            message=message,
            branch=branch,
            metadata=pinned,
            files=contents,
            author=_default_author() if author is None else author,
            expected_head=expected_head,
            tag=tag,
        )
        committer = self._open_committer()
        try:
            with progress_bar("commit", None) as done:
                if wait:
                    return committer.commit(request, state, done)
                return committer.begin(request, state, done, on_full=on_full)
        except StoreFullError as error:
            if on_full == "raise":
                raise
            if not wait:
                return committer.failed(request, error)
            warnings.warn(f"{message or 'this version'} was not committed: {error}", stacklevel=2)
            return None

    def _with_base(self, metadata: dict[str, Any], base: str | None) -> dict[str, Any]:
        """Metadata with the id of the commit that an adapter belongs to."""
        if base is None:
            return metadata
        self._settle(tell=True)  # the base may be a commit that is on its way
        commit_id = self._history.resolve(base)
        if metadata.get("base", commit_id) != commit_id:
            raise InvalidInputError(
                f"metadata has the base {metadata['base']!r}, but base={base!r} is commit {commit_id}; give one of them"
            )
        return {**metadata, "base": commit_id}

    def _open_committer(self) -> Committer:
        """The committer, made for the first commit."""
        from deltastore.baseline import Baseline
        from deltastore.baseline_file import BaselineFile
        from deltastore.cache_folder import cache_root, entry_folder
        from deltastore.commit import Committer
        from deltastore.spool import Spool

        with self._lock:
            if self._committer is None:
                root, uuid = cache_root(self._options["cache_dir"]), self._index.meta().store_uuid
                baselines = entry_folder(root, uuid, "baseline", "0").parent
                spool = entry_folder(root, uuid, "spool", "0").parent
                self._committer = Committer(
                    self._bucket,
                    self._index,
                    self._versions,
                    self._reader,
                    self._log,
                    Baseline(self._options["baseline"], lambda head: BaselineFile.open(baselines, head)),
                    Spool(spool, self._options["max_spool"]),
                )
            return self._committer

    # -- reading ------------------------------------------------------------------------------------------------------

    def checkout(self, revision: str = "main") -> Snapshot:
        """Open a version: a lazy mapping of its tensors. Reads no tensor bytes.

        Raises:
            RevisionNotFoundError: no branch, tag or commit answers to `revision`.
        """
        from deltastore.snapshot import Snapshot

        self._settle()
        commit = self._history.commit(revision)
        return Snapshot(commit, self._versions.get(commit.id), self._reader)

    def list_commits(self, revision: str = "main", limit: int | None = None) -> list[Commit]:
        """First-parent history of a revision, newest first."""
        self._settle()
        return self._history.log(revision, limit)

    def list_history(self, *revisions: str, limit: int | None = None) -> list[Commit]:
        """Commits of some revisions, or of all branches and tags, with all their ancestors, newest first, each once."""
        self._settle()
        return self._history.graph(revisions, limit)

    def get_commit(self, revision: str = "main") -> Commit:
        """The commit that a revision names."""
        self._settle()
        return self._history.commit(revision)

    def list_refs(self) -> list[Ref]:
        """All branches and tags, by name."""
        self._settle()
        return [Ref(ref.name, ref.kind, ref.commit_id) for ref in self._index.refs()]

    def diff(self, before: str, after: str) -> Diff:
        """What changed from one revision to another, per tensor. Reads only chunks that differ."""
        self._settle()
        from deltastore.diff import run_diff

        first, second = self._history.commit(before), self._history.commit(after)
        return run_diff(self._reader, (first, self._versions.get(first.id)), (second, self._versions.get(second.id)))

    def verify(self, revision: str | None = None, *, read_data: bool = False) -> VerifyReport:
        """Check every object that a revision, or all branches and tags, need. Changes nothing.

        Args:
            read_data: decode every stored chunk once and compare its digests, too.
        """
        self._settle()
        from deltastore.chunk_reader import ChunkReader
        from deltastore.verify import run_verify
        from deltastore.versions import Versions

        if revision is None:
            heads = sorted({ref.commit_id for ref in self._index.refs()})
            ids = list(dict.fromkeys(each.id for head in heads for each in self._index.ancestors(head)))
        else:
            ids = [self._history.resolve(revision)]
        with progress_bar("verify", len(ids), unit="commit") as done:
            reader = ChunkReader(self._bucket)  # nothing that this process remembers may hide damage
            versions = Versions(self._bucket, self._index, reader)
            return run_verify(self._bucket, self._index, versions, reader, ids, read_data=read_data, progress=done)

    def stats(self) -> StoreStats:
        """Counts, and logical against stored bytes."""
        self._settle()
        from deltastore.stats import run_stats

        return run_stats(self._bucket, self._index)

    def du(self, *revisions: str, limit: int | None = None) -> DiskUsage:
        """What branches and tags take, each with its history; with revisions: each commit of their first-parent histories.

        Args:
            limit: at most so many commits of each revision.
        """
        self._settle()
        from deltastore.stats import run_du

        ids = [commit.id for revision in revisions for commit in self._history.log(revision, limit)]
        return run_du(self._bucket, self._index, ids if revisions else None)

    def layer_history(self, revision: str = "main", *, limit: int = 50, seconds: float = 60) -> LayerHistory:
        """Which share of each layer changed with each of the last commits.

        Args:
            limit: at most so many commits.
            seconds: stop going back in the history after this time.
        """
        self._settle()
        from deltastore.layers import run_layer_history

        commits = self._history.log(revision, limit)
        with progress_bar("compare", len(commits), unit="commit") as done:
            return run_layer_history(self._reader, self._versions, commits, seconds=seconds, progress=done)

    # -- branches and tags ----------------------------------------------------------------------------------------------

    def create_branch(self, name: str, *, revision: str = "main") -> Ref:
        """Make a branch at a revision. Raises AlreadyExistsError."""
        return self._create_ref("branch", name, revision)

    def create_tag(self, name: str, *, revision: str = "main") -> Ref:
        """Make a tag at a revision; tags never move. Raises AlreadyExistsError."""
        return self._create_ref("tag", name, revision)

    def delete_branch(self, name: str) -> None:
        """Delete a branch. Its commits stay reachable by id. Raises RevisionNotFoundError."""
        self._delete_ref("branch", name)

    def delete_tag(self, name: str) -> None:
        """Delete a tag. Raises RevisionNotFoundError."""
        self._delete_ref("tag", name)

    def reset_branch(self, name: str, *, revision: str, expected: str | None = None) -> Ref:
        """Move a branch to any revision.

        Args:
            expected: the revision that the branch must be at now.

        Raises:
            RefConflictError: the branch is not at `expected`.
        """
        current = self._existing("branch", name)
        if expected is not None and current.commit_id != self._history.resolve(expected):
            raise RefConflictError(name, self._history.resolve(expected), current.commit_id)
        new = self._history.resolve(revision)
        self._move("branch", name, "move", current.commit_id, new)
        return Ref(name, "branch", new)

    def _create_ref(self, kind: Literal["branch", "tag"], name: str, revision: str) -> Ref:
        self._settle(tell=True)
        self._check_new_ref(name)
        commit_id = self._history.resolve(revision)
        self._move(kind, name, "create", None, commit_id)
        return Ref(name, kind, commit_id)

    def _delete_ref(self, kind: Literal["branch", "tag"], name: str) -> None:
        self._move(kind, name, "delete", self._existing(kind, name).commit_id, None)

    def _existing(self, kind: Literal["branch", "tag"], name: str) -> RefRecord:
        self._settle(tell=True)
        self._check_writable()
        ref = self._index.ref(name)
        if ref is None or ref.kind != kind:
            found = f"; {name!r} is a {ref.kind}" if ref is not None else ""
            raise RevisionNotFoundError(f"no {kind} {name!r}{found}; see `deltastore {kind}`")
        return ref

    def _check_new_ref(self, name: str) -> None:
        self._check_writable()
        check_ref_name(name)
        ref = self._index.ref(name)
        if ref is not None:
            raise AlreadyExistsError(
                f"{ref.kind} {name!r} exists already, at {ref.commit_id[:12]}; delete it first or choose another name"
            )

    def _move(
        self,
        kind: Literal["branch", "tag"],
        name: str,
        action: Literal["create", "move", "delete"],
        old: str | None,
        new: str | None,
    ) -> None:
        from deltastore.formats import RefEntry, to_bytes

        entry = RefEntry(action=action, ref_kind=kind, name=name, old=old, new=new, author=_default_author(), time=utc_now())
        fence = self._log.fence_key
        self._log.refuse_fenced(self._bucket.stat([fence])[fence])
        self._log.fill_holes()
        self._index.move_ref(
            RefMovement(
                name=name,
                kind=kind,
                action=action,
                expected=old,
                new=new,
                body=to_bytes(entry),
                mirrored=self._log.pending_marks(),
            )
        )
        self._log.moved()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("this store is closed; open it anew")

    def _check_writable(self) -> None:
        self._check_open()
        if self._options["read_only"]:
            raise ReadOnlyError(f"{self.address} was opened read-only; open it without read_only to write")

    def _settle(self, *, tell: bool = False) -> None:
        """What is asked of an open store sees its own pending commits: they are waited for.

        Args:
            tell: raise the failure of one, because what follows was meant for it, as a tag would be.
        """
        self._check_open()
        if self._committer is not None:
            self._committer.settle(tell=tell)


def _reopen(cls: type[DeltaStore], address: str, options: dict[str, Any]) -> DeltaStore:
    return cls(address, **options)


def _check_option(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInputError(f"{name}={value!r}; expected one of {', '.join(map(repr, allowed))}")


def _default_author() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"
