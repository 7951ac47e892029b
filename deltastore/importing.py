"""Checkpoints on disk into a store, in the order of their steps, each read back and compared with the disk.

An import that was interrupted is repeated: what is in the store already, bit for bit, is skipped.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    short_name,
)
from deltastore.files import Checkpoint
from deltastore.history import Commit
from deltastore.import_plan import Failure, ImportItem, ImportPlan, outside_of, plan_import
from deltastore.open_file import OpenFile
from deltastore.progress import progress_bar
from deltastore.snapshot import Snapshot
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
    """
    plan = outside_of(plan, store.address)
    known = _known_commits(store, branch)
    imported, failures = [], list(plan.failures)
    with progress_bar("import", len(plan.items), unit="checkpoint") as done:
        for at, item in enumerate(plan.items):
            try:
                imported.append(_import(store, item, known[item.name, item.step], branch, author))
            except _HOPELESS as error:
                failures.append(Failure(item.path, error))
                failures.extend(Failure(later.path, error) for later in plan.items[at + 1 :])
                break
            except (DeltaStoreError, OSError) as error:
                failures.append(Failure(item.path, error))
            done(1)
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


def _import(store: DeltaStore, item: ImportItem, known: list[str], branch: str, author: str | None) -> Imported:
    checkpoint = files.open_checkpoint(item.path)
    for commit_id in known:
        there = _fresh_snapshot(store, commit_id)
        if _difference(there, checkpoint) is None:
            _refuse_changed(item, there.commit)
            return Imported(item, there.commit, already=True)
    commit = store.commit(item.path, item.name, branch=branch, metadata=item.metadata, author=author)
    difference = _difference(_fresh_snapshot(store, commit.id), checkpoint)
    _refuse_changed(item, commit)
    if difference is not None:
        raise IntegrityError(
            f"{item.path} is not what commit {commit.short_id} gives back: {difference}; keep the files, and run "
            "`deltastore verify --read-data`"
        )
    return Imported(item, commit, already=False)


def _refuse_changed(item: ImportItem, commit: Commit) -> None:
    change = item.original.change()
    if change is not None:
        raise IntegrityError(
            f"{change} while it was imported: commit {commit.short_id} may hold a mixture; import it again "
            "when nobody writes to it"
        )


# -- comparing --------------------------------------------------------------------------------------------------------


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
    state = files.checkpoint_state(checkpoint)
    version = snapshot._version
    if state.tree != version.structure.tree:
        return "other tensors, or in another order"
    if canonical.pack(state.values) != canonical.pack(snapshot._values()):
        return "other plain values"
    for (path, number), name in zip(state.leaves, version.names, strict=True):
        source, info = state.tensors[number], version.tensors[number]
        if (source.dtype, source.shape) != (info.dtype.name, info.shape):
            return f"{name} is {source.dtype}{list(source.shape)}, not {info.dtype.name}{list(info.shape)} ({path})"
    sizes = {name: path.stat().st_size for name, path in checkpoint.files.items()}
    if sizes != snapshot.files:
        return "other files, or of other sizes"
    total = sum(info.nbytes for info in version.tensors)
    try:
        with progress_bar("compare", total) as done:
            checkout.run(snapshot._reader, _jobs(snapshot, state.tensors, checkpoint), done, total, version.packs())
    except _DifferenceError as error:
        return str(error)
    for file in version.structure.files:
        if file.tensor is None and checkpoint.files[file.name].read_bytes() != (file.data or b""):
            return f"the file {file.name} differs"
    return None


def _jobs(snapshot: Snapshot, tensors: list[TensorSource], checkpoint: Checkpoint) -> Iterator[ReadJob]:
    version = snapshot._version
    for number, source in enumerate(tensors):
        yield from checkout.plan_tensor(version, number, _Comparing(source, f"tensor {short_name(version.label(number))}"))
    for file in version.structure.files:
        if file.tensor is not None:
            path = checkpoint.files[file.name]
            opened = OpenFile(path, os.O_RDONLY)
            size = version.tensors[file.tensor].elements
            yield from checkout.plan_tensor(
                version, file.tensor, _Comparing(_FileBytes(opened, (size,)), f"the file {file.name}")
            )
