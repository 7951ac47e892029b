"""The writer's private copy of what it committed last: what the next commit is compared with.

A chunk of the baseline serves as the base of a delta only when its recorded digest is that of the parent version's chunk and
its bytes still hash to it. So a failed commit, another branch, a rebase or a flipped bit need no bookkeeping: such a chunk is
read from the store instead. Frozen tensors keep a fingerprint per chunk and no copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.digests import fast_digest

Array = np.ndarray[tuple[int], np.dtype[np.uint8]]


class TensorBaseline:
    """The copy, or the fingerprints, of one tensor.

    Attributes:
        data: uint8[nbytes], or None for a frozen tensor.
    """

    __slots__ = ("_chunk_bytes", "_fingerprints", "data")

    def __init__(self, nbytes: int, chunk_bytes: int, chunks: int, *, frozen: bool) -> None:
        self.data: Array | None = None if frozen else np.empty(nbytes, np.uint8)
        self._chunk_bytes = chunk_bytes
        self._fingerprints: list[tuple[bytes, bytes] | None] = [None] * chunks  # (BLAKE3, xxh3-128)

    def fits(self, nbytes: int, chunks: int, *, frozen: bool) -> bool:
        """Whether this baseline has the shape that a tensor needs."""
        size = 0 if self.data is None else len(self.data)
        return (self.data is None) == frozen and (frozen or size == nbytes) and len(self._fingerprints) == chunks

    def chunk(self, index: int) -> Array | None:
        """The private copy of a chunk, to compare with and to overwrite; None for a frozen tensor."""
        if self.data is None:
            return None
        start = index * self._chunk_bytes
        return self.data[start : start + self._chunk_bytes]

    def fingerprint(self, index: int, digest: bytes) -> bytes | None:
        """The xxh3-128 of a chunk if the baseline knows it under this BLAKE3 digest."""
        known = self._fingerprints[index]
        return known[1] if known is not None and known[0] == digest else None

    def holds(self, index: int, digest: bytes) -> bool:
        """Whether the copy of a chunk is exactly the content of this digest, its bytes re-hashed just now."""
        chunk = self.chunk(index)
        expected = self.fingerprint(index, digest)
        return chunk is not None and expected is not None and fast_digest(chunk) == expected

    def forget(self, index: int) -> None:
        """Call before the copy is overwritten, so that an interrupted scan leaves a chunk that is not trusted."""
        self._fingerprints[index] = None

    def record(self, index: int, digest: bytes, fingerprint: bytes) -> None:
        """What the copy of a chunk, or a frozen tensor's chunk, is now."""
        self._fingerprints[index] = (digest, fingerprint)


class Baseline:
    """Baselines of all tensors of the last commit, by the path of their first leaf."""

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._tensors: dict[Any, TensorBaseline] = {}

    def tensor(self, path: Any, nbytes: int, chunk_bytes: int, chunks: int, *, frozen: bool) -> TensorBaseline | None:
        """The baseline of a tensor, made empty when there is none of this size; None when no baseline is kept."""
        if not self._keep:
            return None
        found = self._tensors.get(path)
        if found is None or not found.fits(nbytes, chunks, frozen=frozen):
            found = self._tensors[path] = TensorBaseline(nbytes, chunk_bytes, chunks, frozen=frozen)
        return found

    def retain(self, paths: set[Any]) -> None:
        """Drop the copies of tensors that the last commit did not have."""
        for path in self._tensors.keys() - paths:
            del self._tensors[path]

    def nbytes(self) -> int:
        """Bytes of memory that the copies take."""
        return sum(0 if each.data is None else len(each.data) for each in self._tensors.values())
