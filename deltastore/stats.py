"""What a store takes: logical, stored and unique bytes of the store, its refs and its commits, and for how long there is room.

Logical bytes are those of full copies. Stored bytes are those of all objects that are needed, shared ones counted in full, so
they don't add up. Unique bytes are those that nothing else needs: what forgetting the commit or the ref would set free.
All of it comes from the index and from structures; packs are not read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deltastore.buckets.base import Bucket
from deltastore.dtypes import dtype_of
from deltastore.errors import IntegrityError
from deltastore.formats import StructureDocument, parse_structure
from deltastore.index.index import Index
from deltastore.index.records import CommitShare, RefRecord
from deltastore.space import MIN_FREE
from deltastore.versions import read_object

FORECAST_COMMITS = 16  # a forecast goes by the mean of so many commits


@dataclass(frozen=True, slots=True)
class ObjectStats:
    """Objects of one kind: how many, and their bytes."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """For how many more commits there is room.

    Attributes:
        free_bytes: what may still be written to the bucket; None when nobody knows, as on object storage.
        sampled_commits: how many of the last commits the mean is taken of; first commits, which are full copies, are left out.
        commit_bytes: what these commits added, on average.
        commits_left: commits of that size that fit; None when there is nothing to go by.
    """

    free_bytes: int | None
    sampled_commits: int
    commit_bytes: int | None
    commits_left: int | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store, bytes throughout.

    Attributes:
        logical_bytes: what all versions would take as full copies.
        stored_bytes: what the live objects take in the bucket.
        pending_bytes: objects of commits that are under way or were given up.
        forecast: for how many more commits there is room.
    """

    commits: int
    branches: int
    tags: int
    logical_bytes: int
    stored_bytes: int
    pending_bytes: int
    objects: tuple[ObjectStats, ...]
    forecast: Forecast

    @property
    def ratio(self) -> float:
        """Full copies against what is stored: 20 means a twentieth of the space."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a branch or tag with its history takes, or one commit.

    Attributes:
        kind: "unreachable" are all commits that no branch or tag leads to.
        name: of the ref; the id of the commit; empty for unreachable ones.
        commits: how many they are.
        logical_bytes: their versions as full copies.
        stored_bytes: all objects that they need, also when others need them too.
        unique_bytes: objects that nothing else needs.
        added_bytes: of a commit: objects that came with it; None for refs.
    """

    kind: Literal["branch", "tag", "unreachable", "commit"]
    name: str
    commits: int
    logical_bytes: int
    stored_bytes: int
    unique_bytes: int
    added_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """What parts of a store take. `total_bytes` are all live objects."""

    parts: tuple[Usage, ...]
    total_bytes: int
    forecast: Forecast


def run_stats(bucket: Bucket, index: Index) -> StoreStats:
    """Count. Reads each distinct structure once, no tensor bytes."""
    totals = index.object_totals()
    refs = index.refs()
    shares = index.commit_shares()
    logical = logical_bytes(bucket, index, shares)
    live: dict[str, ObjectStats] = {}
    for total in totals:
        if total.state == "live":
            live[total.kind] = ObjectStats(total.kind, total.count, total.size)
    return StoreStats(
        commits=len(shares),
        branches=sum(ref.kind == "branch" for ref in refs),
        tags=sum(ref.kind == "tag" for ref in refs),
        logical_bytes=sum(logical.values()),
        stored_bytes=sum(each.bytes for each in live.values()),
        pending_bytes=sum(total.size for total in totals if total.state == "pending"),
        objects=tuple(live[kind] for kind in sorted(live)),
        forecast=_forecast(bucket, shares, index.parents()),
    )


def run_du(bucket: Bucket, index: Index, commits: Sequence[str] | None) -> DiskUsage:
    """What each of these commits takes, given by id; with None what each branch and tag takes, with all it leads to."""
    refs = index.refs()  # before the commits, so that what they name is among them
    shares, parents = index.commit_shares(), index.parents()
    if commits is None:
        parts = _usage_of_refs(bucket, index, refs, parents)
    else:
        ids = list(dict.fromkeys(commits))
        logical, stored = logical_bytes(bucket, index, ids), index.stored_bytes(ids)
        parts = [Usage("commit", id_, 1, logical[id_], stored[id_], shares[id_].unique, shares[id_].added) for id_ in ids]
    total = sum(each.size for each in index.object_totals() if each.state == "live")
    return DiskUsage(tuple(parts), total, _forecast(bucket, shares, parents))


def logical_bytes(bucket: Bucket, index: Index, ids: Iterable[str]) -> dict[str, int]:
    """Raw bytes of all tensors and files of each commit, in the order given. Reads each distinct structure once."""
    structures = index.structures()
    sizes: dict[str, int] = {}
    found = {}
    for id_ in ids:
        if id_ not in structures:
            raise IntegrityError(f"the index knows no structure of commit {id_}; see `deltastore verify {id_[:12]}`")
        key = structures[id_]
        if key not in sizes:
            sizes[key] = _raw_bytes(parse_structure(read_object(bucket, key), key))
        found[id_] = sizes[key]
    return found


def _usage_of_refs(
    bucket: Bucket, index: Index, refs: Sequence[RefRecord], parents: Mapping[str, tuple[str, ...]]
) -> list[Usage]:
    """Commits that the same refs lead to are looked at together, so the work grows with the edges, not with the pairs."""
    groups: defaultdict[int, list[str]] = defaultdict(list)  # by the set of refs that lead there, one bit each
    for id_, mask in _reached_from([ref.commit_id for ref in refs], parents).items():
        groups[mask].append(id_)
    users: defaultdict[int, int] = defaultdict(int)  # by object; one more bit stands for commits that no ref leads to
    sizes: dict[int, int] = {}
    nobody = 1 << len(refs)
    for mask, ids in groups.items():
        needed = index.needed_objects(ids)
        sizes |= needed
        for number in needed:
            users[number] |= mask or nobody
    by_users: defaultdict[int, int] = defaultdict(int)
    for number, mask in users.items():
        by_users[mask] += sizes[number]
    logical = logical_bytes(bucket, index, parents)

    def usage(kind: Literal["branch", "tag", "unreachable"], name: str, bit: int) -> Usage:
        own = [id_ for mask, ids in groups.items() if (mask or nobody) & bit for id_ in ids]
        stored = sum(size for mask, size in by_users.items() if mask & bit)
        return Usage(kind, name, len(own), sum(logical[id_] for id_ in own), stored, by_users.get(bit, 0))

    found = [usage(ref.kind, ref.name, 1 << at) for at, ref in enumerate(refs)]
    return [*found, usage("unreachable", "", nobody)] if 0 in groups else found


def _reached_from(heads: Sequence[str], parents: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """For each commit the set of heads that lead to it, as bits. `parents` is in the order of the log."""
    reached = dict.fromkeys(parents, 0)
    for at, head in enumerate(heads):
        reached[head] |= 1 << at
    for id_ in reversed(list(parents)):  # children come later in the log than their parents
        for parent in parents[id_]:
            if parent in reached:  # not forgotten
                reached[parent] |= reached[id_]
    return reached


def _forecast(bucket: Bucket, shares: Mapping[str, CommitShare], parents: Mapping[str, tuple[str, ...]]) -> Forecast:
    free = bucket.free_bytes()
    sample = [shares[id_].added for id_ in shares if parents[id_]][-FORECAST_COMMITS:]
    if not sample:
        return Forecast(free, 0, None, None)
    mean = -(-sum(sample) // len(sample))
    left = None if free is None else max(0, free - MIN_FREE) // max(1, mean)
    return Forecast(free, len(sample), mean, left)


def _raw_bytes(structure: StructureDocument) -> int:
    """Raw bytes of all tensors and files of a version."""
    inline = sum(file.size for file in structure.files if file.tensor is None)
    return inline + sum(math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize for tensor in structure.tensors)
