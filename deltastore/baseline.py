"""The writer's private copy of what it committed last: what the next commit is compared with.

A chunk of the baseline serves as the base of a delta only when its recorded digest is that of the parent version's chunk and
its bytes still hash to it. So a failed commit, another branch, a rebase or a flipped bit need no bookkeeping: such a chunk is
read from the store instead. Frozen tensors keep a fingerprint per chunk and no copy; so do all when no baseline is wanted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np

from deltastore.baseline_file import BaselineFile, Fingerprint, KeptTensor
from deltastore.errors import StorageError, StoreFullError
from deltastore.options import available_memory
from deltastore.stored_path import StoredPath, path_bytes

Array = np.ndarray[tuple[int], np.dtype[np.uint8]]
Place = Literal["ram", "disk", "none"]

MEMORY_SHARE = 0.5  # of the available memory that a copy may take when nobody said where it goes


class TensorBaseline:
    """The copy, or the fingerprints, of one tensor.

    Attributes:
        data: uint8[nbytes], or None when no copy is kept.
        frozen: whether the tensor is said not to change.
        changed: whether one without a copy has changed since the last scan.
    """

    __slots__ = ("_chunk_bytes", "_fingerprints", "changed", "data", "frozen")

    def __init__(self, data: Array | None, chunk_bytes: int, fingerprints: list[Fingerprint | None], *, frozen: bool) -> None:
        self.data = data
        self.frozen = frozen
        self.changed = False
        self._chunk_bytes = chunk_bytes
        self._fingerprints = fingerprints

    def fits(self, nbytes: int, chunk_bytes: int, chunks: int, *, copied: bool, frozen: bool) -> bool:
        """Whether this baseline has the shape that a tensor needs."""
        size = nbytes if self.data is None else len(self.data)
        has_copy = self.data is not None
        return (
            self.frozen == frozen
            and has_copy == copied
            and size == nbytes
            and self._chunk_bytes == chunk_bytes
            and len(self._fingerprints) == chunks
        )

    def chunk(self, index: int) -> Array | None:
        """The private copy of a chunk, to compare with and to overwrite; None when none is kept."""
        if self.data is None:
            return None
        start = index * self._chunk_bytes
        return self.data[start : start + self._chunk_bytes]

    def fingerprint(self, index: int, digest: bytes) -> bytes | None:
        """The xxh3-128 of a chunk if the baseline knows it under this BLAKE3 digest. Its bytes are yet to be hashed."""
        known = self._fingerprints[index]
        return known[1] if known is not None and known[0] == digest else None

    def forget(self, index: int) -> None:
        """Call before the copy is overwritten, so that an interrupted scan leaves a chunk that is not trusted."""
        self._fingerprints[index] = None

    def record(self, index: int, digest: bytes, fingerprint: bytes) -> None:
        """What the copy of a chunk, or a chunk without a copy, is now."""
        self._fingerprints[index] = (digest, fingerprint)

    def kept(self, path: StoredPath) -> KeptTensor:
        """This tensor for the table of a baseline file."""
        return KeptTensor(path_bytes(path).decode(), self.data, self._chunk_bytes, tuple(self._fingerprints))


_parents: list[Baseline] = []  # of a forked child: never unmapped or unlocked by it


class Baseline:
    """Baselines of all tensors of the last commit, by the path of their first leaf.

    Args:
        place: where copies go; "auto" is memory while they fit into half of what is available, else disk.
        open_file: opens the file for copies on disk, that of a commit where there is one.
    """

    def __init__(self, place: Literal["auto"] | Place, open_file: Callable[[str | None], BaselineFile] | None = None) -> None:
        self._wanted = place
        self._open_file = open_file
        self._file: BaselineFile | None = None
        self._head: str | None = None
        self._tensors: dict[StoredPath, TensorBaseline] = {}
        self.place: Place = "ram" if place == "auto" else place

    def begin(self, head: str | None) -> None:
        """A commit on top of `head` begins: an earlier process may have left the copy of that."""
        self._head = head

    def expect(self, nbytes: int) -> None:
        """Tensors of so many bytes in all will want a copy: decides where new copies go, and says so when that is not memory.

        Raises:
            StoreFullError: the copy was asked to be on disk, and there is no room.
        """
        more = nbytes - self.nbytes()
        if self._wanted == "auto" and self.place == "ram" and more > 0:
            available = available_memory()
            if available is not None and more > MEMORY_SHARE * available:
                self.place = "disk" if self._open_file is not None else "none"
                where = "on disk" if self.place == "disk" else "nowhere, so the next commits compare with the store"
                warnings.warn(
                    f"a copy of the committed tensors ({more >> 20} MiB) would take over half of the available memory "
                    f"({available >> 20} MiB), so it is kept {where}; baseline='ram', 'disk' or 'none' decides otherwise",
                    stacklevel=2,
                )
        if self.place == "disk" and self._file is None:
            assert self._open_file is not None
            try:
                self._file = self._open_file(self._head)
            except (StoreFullError, StorageError) as error:
                self._give_up_disk(error)

    def tensor(self, path: StoredPath, nbytes: int, chunk_bytes: int, chunks: int, *, frozen: bool) -> TensorBaseline:
        """The baseline of a tensor, made empty when there is none of this size."""
        copied = not frozen and self.place != "none"
        found = self._tensors.get(path) or self._left_over(path, frozen=frozen)
        if found is None or not found.fits(nbytes, chunk_bytes, chunks, copied=copied, frozen=frozen):
            self._tensors.pop(path, None)
            data = self._allocate(nbytes) if copied else None
            found = TensorBaseline(data, chunk_bytes, [None] * chunks, frozen=frozen)
        found.changed = False
        self._tensors[path] = found
        return found

    def changed_frozen(self) -> list[StoredPath]:
        """Tensors that are said not to change, and have since the last commit."""
        return [path for path, each in self._tensors.items() if each.frozen and each.changed]

    def retain(self, paths: set[StoredPath]) -> None:
        """Drop the copies of tensors that the last commit did not have."""
        for path in self._tensors.keys() - paths:
            del self._tensors[path]

    def nbytes(self) -> int:
        """Bytes of memory, or of mapped disk, that the copies take."""
        return sum(0 if each.data is None else len(each.data) for each in self._tensors.values())

    def close(self, commit: str | None) -> None:
        """Leave a copy on disk for the process that goes on from `commit`."""
        file, self._file = self._file, None
        tensors, self._tensors = self._tensors, {}
        if file is not None:
            file.close(commit, [each.kept(path) for path, each in tensors.items()])

    def in_child(self) -> Baseline:
        """The baseline of a forked child: copies in memory are its own, those in a file are still the parent's."""
        if self._file is None:
            return self
        _parents.append(self)
        return Baseline(self._wanted, self._open_file)

    # -- memory ---------------------------------------------------------------------------------------------------------

    def _left_over(self, path: StoredPath, *, frozen: bool) -> TensorBaseline | None:
        """What an earlier process left of a tensor."""
        kept = None if self._file is None else self._file.take(path_bytes(path).decode())
        return None if kept is None else TensorBaseline(kept.data, kept.chunk_bytes, list(kept.fingerprints), frozen=frozen)

    def _allocate(self, nbytes: int) -> Array | None:
        if self._file is not None:
            try:
                return self._file.allocate(nbytes)
            except (StoreFullError, StorageError) as error:
                self._give_up_disk(error)
        return np.empty(nbytes, np.uint8) if self.place == "ram" else None

    def _give_up_disk(self, error: Exception) -> None:
        """No room for the file: an error when it was asked for, else there are no more copies."""
        if self._wanted == "disk":
            raise error
        self.place = "none"
        warnings.warn(
            f"there is no room for a copy of the committed tensors on disk either, so none is kept ({error})", stacklevel=3
        )
