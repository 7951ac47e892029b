"""What a store holds and takes: counts, logical bytes of all versions, stored bytes by kind of object."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deltastore.buckets.base import Bucket
from deltastore.dtypes import dtype_of
from deltastore.formats import StructureDocument, parse_structure
from deltastore.index.index import Index
from deltastore.versions import read_object


@dataclass(frozen=True, slots=True)
class ObjectStats:
    """Objects of one kind: how many, and their bytes."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store, bytes throughout.

    Attributes:
        logical_bytes: what all versions would take as full copies.
        stored_bytes: what the live objects take in the bucket.
        pending_bytes: objects of commits that are under way or were given up.
    """

    commits: int
    branches: int
    tags: int
    logical_bytes: int
    stored_bytes: int
    pending_bytes: int
    objects: tuple[ObjectStats, ...]

    @property
    def ratio(self) -> float:
        """Full copies against what is stored: 20 means a twentieth of the space."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0


def run_stats(bucket: Bucket, index: Index) -> StoreStats:
    """Count. Reads each distinct structure once, no tensor bytes."""
    totals = index.object_totals()
    refs = index.refs()
    logical = commits = 0
    for key, count in index.structure_use():
        commits += count
        logical += count * _raw_bytes(parse_structure(read_object(bucket, key), key))
    live: dict[str, ObjectStats] = {}
    for total in totals:
        if total.state == "live":
            live[total.kind] = ObjectStats(total.kind, total.count, total.size)
    return StoreStats(
        commits=commits,
        branches=sum(ref.kind == "branch" for ref in refs),
        tags=sum(ref.kind == "tag" for ref in refs),
        logical_bytes=logical,
        stored_bytes=sum(each.bytes for each in live.values()),
        pending_bytes=sum(total.size for total in totals if total.state == "pending"),
        objects=tuple(live[kind] for kind in sorted(live)),
    )


def _raw_bytes(structure: StructureDocument) -> int:
    """Raw bytes of all tensors and files of a version."""
    inline = sum(file.size for file in structure.files if file.tensor is None)
    return inline + sum(math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize for tensor in structure.tensors)
