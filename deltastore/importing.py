"""Checkpoints on disk into a store, in the order of their steps, each read back and compared with the disk.

An import that was interrupted is repeated: what is in the store already, bit for bit, is skipped.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from deltastore import canonical, checkout, files, originals
from deltastore.chunk_reader import ChunkReader, ReadJob
from deltastore.errors import (
    AuthenticationError,
    DeltaStoreError,
    IntegrityError,
    ReadOnlyError,
    RevisionNotFoundError,
    StoreFencedError,
    StoreFullError,
)
from deltastore.files import Checkpoint
from deltastore.history import Commit, check_ref_name
from deltastore.import_plan import Failure, ImportItem, ImportPlan, outside_of, plan_import
from deltastore.open_file import OpenFile
from deltastore.progress import progress_bar
from deltastore.snapshot import Snapshot
from deltastore.sources import checkpoint_state
from deltastore.state import Array, TensorSource
from deltastore.store import DeltaStore
from deltastore.versions import Versions

__all__ = [
    "Deletion",
    "Failure",
    "ImportItem",
    "ImportPlan",
    "ImportReport",
    "Imported",
    "delete_originals",
    "outside_of",
    "plan_import",
    "run_import",
]

T = TypeVar("T")

GROUP = 8  # checkpoints that are committed, then compared together
_HOPELESS = (StoreFullError, StoreFencedError, ReadOnlyError, AuthenticationError)  # the next checkpoint would fail, too


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that is in the store: every byte was read back and compared with the disk.

    Attributes:
        already: it was there before, and was only compared.
    """

    item: ImportItem
    commit: Commit
    already: bool


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did, in the order of the plan."""

    imported: tuple[Imported, ...]
    failures: tuple[Failure, ...]

    @property
    def deletable(self) -> tuple[Imported, ...]:
        """Those whose originals may be deleted."""
        return tuple(each for each in self.imported if each.item.original.obstacle is None)


@dataclass(frozen=True, slots=True)
class Deletion:
    """Which originals were deleted, and which were not, with the reason."""

    deleted: tuple[Path, ...]
    kept: tuple[tuple[Path, str], ...]
    freed_bytes: int


def run_import(store: DeltaStore, plan: ImportPlan, *, branch: str = "main", author: str | None = None) -> ImportReport:
    """Commit every checkpoint of a plan that is not there yet, and compare what the store gives back with the disk.

    A commit of the branch with the same message and step, and the same tensors and files bit for bit, counts as there. One
    checkpoint that fails stops no other, unless the store itself can't take more.

    Args:
        branch: moves to each new commit; made when it does not exist.
        author: by default user@host.

    Returns:
        What was imported, and what failed: nothing is raised for a single checkpoint.

    Raises:
        InvalidInputError: no branch can have this name.
    """
    check_ref_name(branch)
    plan = outside_of(plan, store.address)
    failures = list(plan.failures)
    with progress_bar("import", len(plan.items), unit="checkpoint") as done:
        there = _find(store, plan.items, branch, done)
        found = dict(there)
        missing = [item for item in plan.items if item.path not in there]
        for group in _groups(missing):
            commits = _commit(store, group, branch, author, failures)
            for item, commit, error in _compare_all(store, commits):
                if error is None:
                    found[item.path] = commit
                else:
                    failures.append(Failure(item.path, error))
                done(1)
            hopeless = next((failure.error for failure in failures if isinstance(failure.error, _HOPELESS)), None)
            if hopeless is not None:
                tried = {*found, *(failure.path for failure in failures)}
                failures += [Failure(item.path, hopeless) for item in missing if item.path not in tried]
                break
    imported = [Imported(item, found[item.path], item.path in there) for item in plan.items if item.path in found]
    return ImportReport(tuple(imported), tuple(failures))


def delete_originals(report: ImportReport) -> Deletion:
    """Delete the files that were imported. Whatever changed since it was compared stays, and so does what has an obstacle."""
    deleted, kept, freed = [], [], 0
    for each in report.imported:
        original = each.item.original
        reason = original.obstacle or original.change()
        if reason is None:
            try:
                originals.delete(original)
            except (DeltaStoreError, OSError) as error:
                reason = str(error)
        if reason is None:
            deleted.append(original.path)
            freed += original.nbytes
        else:
            kept.append((original.path, reason))
    return Deletion(tuple(deleted), tuple(kept), freed)


def _groups(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + GROUP] for at in range(0, len(items), GROUP))


def _known_commits(store: DeltaStore, branch: str) -> defaultdict[tuple[str, object], list[str]]:
    """Ids of the commits of a branch by message and step."""
    known: defaultdict[tuple[str, object], list[str]] = defaultdict(list)
    try:
        commits = store.list_commits(branch)
    except RevisionNotFoundError:
        return known
    for commit in commits:
        step = commit.metadata.get("step")
        if step is None or type(step) is int:
            known[commit.message, step].append(commit.id)
    return known


def _find(store: DeltaStore, items: Iterable[ImportItem], branch: str, done: Callable[[int], None]) -> dict[Path, Commit]:
    """The commits that hold a checkpoint already, by its path."""
    known = _known_commits(store, branch)
    found = {}
    candidates = [(item, store.get_commit(ids[0])) for item in items if (ids := known[item.name, item.step])]
    for group in _groups(candidates):
        for item, newest, problem in _compare_all(store, group):
            older = (store.get_commit(id_) for id_ in known[item.name, item.step][1:])
            commit = newest if problem is None else next((each for each in older if _problem(store, item, each) is None), None)
            if commit is not None:
                found[item.path] = commit
                done(1)
    return found


def _commit(
    store: DeltaStore, items: Iterable[ImportItem], branch: str, author: str | None, failures: list[Failure]
) -> list[tuple[ImportItem, Commit]]:
    """Commit some checkpoints; adds what fails to `failures`."""
    commits = []
    for item in items:
        try:
            commit = store.commit(item.path, item.name, branch=branch, metadata=item.metadata, author=author)
        except (DeltaStoreError, OSError) as error:
            failures.append(Failure(item.path, error))
            if isinstance(error, _HOPELESS):
                break
        else:
            commits.append((item, commit))
    return commits


# -- comparing --------------------------------------------------------------------------------------------------------


def _compare_all(
    store: DeltaStore, pairs: Sequence[tuple[ImportItem, Commit]]
) -> Iterator[tuple[ImportItem, Commit, DeltaStoreError | OSError | None]]:
    """Each pair with what is wrong with it. Versions of one structure are read together: one full read, then the deltas."""
    if len(pairs) > 1 and _are_equal(store, pairs):
        for item, commit in pairs:
            yield item, commit, _changed(item, commit)
        return
    for item, commit in pairs:
        yield item, commit, _problem(store, item, commit)


def _are_equal(store: DeltaStore, pairs: Sequence[tuple[ImportItem, Commit]]) -> bool:
    """Whether versions are what is on the disk; False, too, when that can't be found out for all of them together."""
    try:
        reader = ChunkReader(store._bucket)
        versions = Versions(store._bucket, store._index, reader)
        both = [(Snapshot(commit, versions.get(commit.id), reader), files.open_checkpoint(item.path)) for item, commit in pairs]
        if any(_surface_difference(*each) for each in both):
            return False
        states = [checkpoint_state(checkpoint).tensors for _, checkpoint in both]
        if any(
            [(each.dtype, each.shape) for each in state] != [(each.dtype, each.shape) for each in states[0]] for state in states
        ):
            return False
        lines = [_tensor_jobs(snapshot, state) for (snapshot, _), state in zip(both, states, strict=True)]
        with progress_bar("compare", sum(snapshot.nbytes for snapshot, _ in both)) as done:
            reader.read_successions(zip(*lines, strict=True), done)
        for snapshot, checkpoint in both:
            checkout.run(reader, _file_jobs(snapshot, checkpoint))
    except (_DifferenceError, DeltaStoreError, OSError):
        return False
    return True


def _problem(store: DeltaStore, item: ImportItem, commit: Commit) -> DeltaStoreError | OSError | None:
    """Why a commit can't stand for a checkpoint."""
    try:
        difference = _difference(_fresh_snapshot(store, commit.id), files.open_checkpoint(item.path))
    except (DeltaStoreError, OSError) as error:
        return error
    changed = _changed(item, commit)
    if difference is None or changed is not None:
        return changed
    return IntegrityError(
        f"{item.path} is not what commit {commit.short_id} gives back: {difference}; keep the files, and run "
        "`deltastore verify --read-data`"
    )


def _changed(item: ImportItem, commit: Commit) -> IntegrityError | None:
    change = item.original.change()
    if change is None:
        return None
    return IntegrityError(
        f"{change} while it was imported: commit {commit.short_id} may hold a mixture; import it again when nobody writes to it"
    )


def _fresh_snapshot(store: DeltaStore, commit_id: str) -> Snapshot:
    """A version as another process would read it: nothing that this one remembers may hide damage."""
    reader = ChunkReader(store._bucket)
    return Snapshot(store.get_commit(commit_id), Versions(store._bucket, store._index, reader).get(commit_id), reader)


class _DifferenceError(Exception):
    """A chunk is not what is on the disk."""


@dataclass(frozen=True, slots=True)
class _Comparing:
    """A `TensorSink` that keeps nothing: what arrives must be what the source holds."""

    source: TensorSource
    label: str

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in storage elements."""
        return self.source.shape

    def view(self, start: int, stop: int) -> None:
        """None: there is no memory to write to."""

    def write(self, start: int, stop: int, data: Array) -> None:
        """Raises _DifferenceError."""
        if not np.array_equal(self.source.read(start, stop), data):
            raise _DifferenceError(f"{self.label} differs in the elements {start} to {stop - 1}")


@dataclass(frozen=True, slots=True)
class _FileBytes:
    """The bytes of a file as a `TensorSource`."""

    file: OpenFile
    shape: tuple[int, ...]
    dtype: str = "uint8"
    frozen: bool = False

    def read(self, start: int, stop: int) -> Array:
        """Bytes [start, stop)."""
        return self.file.read(start, stop - start)


def _difference(snapshot: Snapshot, checkpoint: Checkpoint) -> str | None:
    """The first thing in which a version and a checkpoint on disk differ, bit for bit; None when they are the same."""
    found = _surface_difference(snapshot, checkpoint)
    if found is not None:
        return found
    tensors = checkpoint_state(checkpoint).tensors
    total = sum(info.nbytes for info in snapshot._version.tensors)
    try:
        with progress_bar("compare", total) as done:
            jobs = chain(_tensor_jobs(snapshot, tensors), _file_jobs(snapshot, checkpoint))
            checkout.run(snapshot._reader, jobs, done, total, snapshot._version.packs())
    except _DifferenceError as error:
        return str(error)
    return None


def _surface_difference(snapshot: Snapshot, checkpoint: Checkpoint) -> str | None:
    """The first difference in names, order, dtypes, shapes, plain values, and in small files."""
    state = checkpoint_state(checkpoint)
    version = snapshot._version
    if state.tree != version.structure.tree:
        return "other tensors, or in another order"
    if canonical.pack(state.values) != canonical.pack(snapshot._values()):
        return "other plain values"
    for (_, number), name in zip(state.leaves, version.names, strict=True):
        source, info = state.tensors[number], version.tensors[number]
        if (source.dtype, source.shape) != (info.dtype.name, info.shape):
            return f"{name} is {source.dtype}{list(source.shape)}, not {info.dtype.name}{list(info.shape)}"
    sizes = {name: path.stat().st_size for name, path in checkpoint.files.items()}
    if sizes != snapshot.files:
        return "other files, or of other sizes"
    for file in version.structure.files:
        if file.tensor is None and checkpoint.files[file.name].read_bytes() != (file.data or b""):
            return f"the file {file.name} differs"
    return None


def _tensor_jobs(snapshot: Snapshot, tensors: list[TensorSource]) -> Iterator[ReadJob]:
    version = snapshot._version
    for number, source in enumerate(tensors):
        yield from checkout.plan_tensor(version, number, _Comparing(source, version.label(number)))


def _file_jobs(snapshot: Snapshot, checkpoint: Checkpoint) -> Iterator[ReadJob]:
    version = snapshot._version
    for file in version.structure.files:
        if file.tensor is not None:
            source = _FileBytes(OpenFile(checkpoint.files[file.name], os.O_RDONLY), version.tensors[file.tensor].shape)
            yield from checkout.plan_tensor(version, file.tensor, _Comparing(source, f"the file {file.name}"))
