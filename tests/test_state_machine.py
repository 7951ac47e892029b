r"""Random histories of one store against a plain oracle: writers, readers, crashes, full disks, forks, a second writer.

The oracle keeps, for every version, the bytes of its tensors at the call, and what was said of it. Chunks, packs, manifests and
the distance of ref snapshots are tiny here, so that a few hundred elements run through everything.

Longer by hand: DELTASTORE_MACHINE_EXAMPLES=500 DELTASTORE_MACHINE_STEPS=80 \
    pytest --timeout 0 --hypothesis-seed=1 tests/test_state_machine.py
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, currently_in_test_context, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import deltastore.checkout
import deltastore.commit
import deltastore.digests
import deltastore.manifests
import deltastore.options
import deltastore.reflog
import deltastore.regions
import deltastore.scanner
import deltastore.versions
from deltastore import DeltaStore
from deltastore.chunk_writer import ChunkWriter
from deltastore.errors import AlreadyExistsError, RevisionNotFoundError, StorageError, StoreFullError
from deltastore.history import Commit
from deltastore.pending import PendingCommit
from deltastore.snapshot import LazyTensor, Snapshot

sys.path.append(str(Path(__file__).with_name("faults")))

from store_checks import assert_log_dense

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:another writer:UserWarning"),
    pytest.mark.filterwarnings("ignore:parameters that do not require gradients have changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:the change is committed, but its log entry:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]

EXAMPLES = int(os.environ.get("DELTASTORE_MACHINE_EXAMPLES", "4"))
STEPS = int(os.environ.get("DELTASTORE_MACHINE_STEPS", "16"))

CHUNK = 64  # elements
SECONDS = 60.0  # after which something hangs
BRANCHES = ("main", "left", "right")
TAGS = ("v1", "v2", "v3")
FORKS = 2  # per run
CRASHED, FULL = "the machine has crashed", "no room in the test"

Bits = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes

seeds = st.integers(0, 1 << 16)  # never a range that depends on the state: threads may make that differ from run to run
branches = st.sampled_from(BRANCHES)
tags = st.sampled_from(TAGS)


@dataclass(eq=False)
class Version:
    """A version as the oracle knows it; `id` is known when it has landed."""

    tensors: dict[str, Bits]
    count: int
    message: str
    metadata: dict[str, Any]
    branch: str
    parent: Version | None
    id: str | None = None

    def history(self) -> Iterator[Version]:
        """It and its ancestors, newest first."""
        found: Version | None = self
        while found is not None:
            yield found
            found = found.parent


def bits(tensor: torch.Tensor) -> Bits:
    """What a tensor holds now."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def tensor_of(kept: Bits) -> torch.Tensor:
    """A new tensor that holds such bits."""
    dtype, shape, data = kept
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape) if data else empty_of(kept)


def empty_of(kept: Bits) -> torch.Tensor:
    """A tensor of zeros with such dtype and shape."""
    return torch.zeros(kept[1], dtype=getattr(torch, kept[0]))


def first_state() -> dict[str, Any]:
    """What is trained: several chunks, one, a part of one, none; dense and strided; trained and frozen."""
    return {
        "model": {
            "bf16": torch.arange(5 * 61, dtype=torch.float32).view(5, 61).to(torch.bfloat16),
            "turned": torch.arange(13 * 11, dtype=torch.float32).view(13, 11).t(),
            "frozen": torch.nn.Parameter(torch.ones(70, dtype=torch.bfloat16), requires_grad=False),
            "int8": torch.arange(150, dtype=torch.int8),
            "step": torch.tensor(0),
            "empty": torch.empty(0, 3),
        },
        "count": 0,
    }


class Fuse:
    """Lets the bucket and the index of one open store fail: every operation from a certain one on."""

    def __init__(self, store: DeltaStore) -> None:
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}
        self._once = False
        self._may_put = threading.Event()
        self._may_put.set()
        self._error: Callable[[], Exception] = lambda: StorageError(CRASHED, "injected")
        bucket, database = store._bucket, store._index._database
        for name in ("put", "get", "get_range", "stat", "list"):
            setattr(bucket, name, self._guarded(name, getattr(bucket, name)))
        transaction = database._transaction

        @contextlib.contextmanager
        def guarded(begin: str) -> Iterator[Any]:
            self._burn("sql")
            with transaction(begin) as connection:
                yield connection
            self._burn("sql")

        database._transaction = guarded  # type: ignore[method-assign]

    def blow(self, kind: str, number: int, error: Callable[[], Exception], *, once: bool = False) -> None:
        """Fail at operation `number` of a kind ("any": of all kinds), and at all later ones until `mend` unless `once`."""
        with self._lock:
            self._error, self._left, self._once = error, {kind: number}, once

    def mend(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._left = {}

    @contextlib.contextmanager
    def slow_puts(self) -> Iterator[None]:
        """What is put meanwhile waits for the end of the block, or a while."""
        self._may_put.clear()
        try:
            yield
        finally:
            self._may_put.set()

    def renew_lock(self) -> None:
        """In a forked child: another thread may have held it."""
        self._lock = threading.Lock()

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def guarded(*arguments: Any) -> Any:
            self._burn(name)
            return call(*arguments)

        return guarded

    def _burn(self, name: str) -> None:
        if name == "put":
            self._may_put.wait(0.3)
        with self._lock:
            for kind in (name, "any"):
                if kind in self._left:
                    if self._left[kind] == 0:
                        if self._once:
                            del self._left[kind]
                        raise self._error()
                    self._left[kind] -= 1


def tell(what: str) -> None:
    """For `--hypothesis-show-statistics`."""
    if currently_in_test_context():
        event(what)


class StoreMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm"
        self.folder = Path(tempfile.mkdtemp(prefix="deltastore-", dir=memory if os.access(memory, os.W_OK) else None))
        self.patch = pytest.MonkeyPatch()
        self.random = random.Random(0)  # for what is checked after each step
        self.state = first_state()
        self.branches: dict[str, Version] = {}
        self.tags: dict[str, Version] = {}
        self.landed: list[Version] = []
        self.pending: list[tuple[PendingCommit, Version]] = []
        self.commits = 0
        self.forks = 0
        self.store: DeltaStore | None = None
        self.other: DeltaStore | None = None
        self.watcher: DeltaStore | None = None

    @initialize(
        baseline=st.sampled_from(["ram", "disk", "none"]),
        pack_bytes=st.sampled_from([600, 64 << 20]),
        manifest_rows=st.sampled_from([4, 4096]),
        staging=st.sampled_from([1000, 256 << 20]),
    )
    def create(self, baseline: str, pack_bytes: int, manifest_rows: int, staging: int) -> None:
        for module in (
            deltastore.checkout,
            deltastore.digests,
            deltastore.options,
            deltastore.regions,
            deltastore.scanner,
            deltastore.versions,
        ):
            self.patch.setattr(module, "CHUNK_ELEMENTS", CHUNK)
        self.patch.setattr(deltastore.manifests, "MANIFEST_ROWS", manifest_rows)
        self.patch.setattr(deltastore.scanner, "STAGING_BYTES", staging)
        self.patch.setattr(deltastore.reflog, "SNAPSHOT_INTERVAL", 16)
        self.patch.setattr(deltastore.commit, "ChunkWriter", functools.partial(ChunkWriter, pack_bytes=pack_bytes))
        DeltaStore.create(self.folder / "store").close()
        self.open(baseline, "store")
        self.watcher = DeltaStore(self.folder / "store", read_only=True)

    def open(self, baseline: str, trust: str) -> None:
        self.store = self.opened(baseline, trust)
        self.fuse = Fuse(self.store)

    def opened(self, baseline: str, trust: str = "store") -> DeltaStore:
        cache = self.folder / "cache"
        return DeltaStore(self.folder / "store", baseline=baseline, trust=trust, cache_dir=cache)  # type: ignore[arg-type]

    # -- the oracle -----------------------------------------------------------------------------------------------------

    def change(self, seed: int) -> None:
        """Train: change some tensors a little or wholly, take back an old one, let one come and go."""
        rng = np.random.default_rng(seed)
        model = self.state["model"]
        self.state["count"] += int(rng.integers(2))
        kind = rng.integers(8)
        if kind == 0:
            model.pop("extra", None)
        elif kind == 1:
            shape = tuple(int(size) for size in rng.integers(0, 15, int(rng.integers(0, 3))))
            model["extra"] = torch.zeros(shape, dtype=[torch.float32, torch.bfloat16, torch.int8][int(rng.integers(3))])
        for name, tensor in model.items():
            how = rng.integers(6)
            if name == "frozen" and rng.integers(8):
                continue
            self._change_one(rng, int(how), f"model.{name}", tensor)

    def _change_one(self, rng: np.random.Generator, how: int, name: str, tensor: torch.Tensor) -> None:
        dtype, shape, data = bits(tensor)
        itemsize = tensor.element_size()
        words = np.frombuffer(data, f"<u{itemsize}").copy()
        if how == 0 or not len(words):
            return
        if how in (1, 2, 3):  # a few elements by a step
            for at in rng.integers(0, len(words), 1 + len(words) // 40):
                words[at] ^= np.array(1 << int(rng.integers(3)), words.dtype)
        elif how == 4:  # everything
            words = np.frombuffer(rng.bytes(len(data)), words.dtype).copy()
        elif self.landed:  # as it was once
            old = self.landed[int(rng.integers(len(self.landed)))].tensors.get(name)
            if old is not None and old[:2] == (dtype, shape):
                words = np.frombuffer(old[2], words.dtype).copy()
        with torch.no_grad():
            new = tensor_of((dtype, shape, words.tobytes()))
            if tensor.dtype == torch.int64 or tensor.dtype == torch.int8:
                tensor.copy_(new)
            else:  # bit for bit, whatever NaN it is
                tensor.view(torch.int16 if itemsize == 2 else torch.int32).copy_(
                    new.view(torch.int16 if itemsize == 2 else torch.int32)
                )
        assert bits(tensor)[2] == words.tobytes()

    def expected(self, branch: str) -> Version:
        """The version that a commit of the state as it is now makes."""
        self.commits += 1
        return Version(
            tensors={f"model.{name}": bits(tensor) for name, tensor in self.state["model"].items()},
            count=self.state["count"],
            message=f"commit {self.commits}",
            metadata={"step": self.commits // 2, "loss": self.commits / 8},
            branch=branch,
            parent=self.branches.get(branch),
        )

    def land(self, version: Version, commit: Commit) -> None:
        """A commit of the store is that of the oracle."""
        assert (commit.message, commit.metadata) == (version.message, version.metadata)
        assert commit.parents == (() if version.parent is None else (version.parent.id,))
        version.id = commit.id
        self.branches[version.branch] = version
        self.landed.append(version)

    def begin(self, store: DeltaStore, branch: str) -> Version:
        """Commit in the background."""
        version = self.expected(branch)
        pending = store.commit(self.state, version.message, branch=branch, metadata=version.metadata, wait=False)
        self.branches[branch] = version
        self.pending.append((pending, version))
        return version

    def commit_now(self, store: DeltaStore, branch: str, **options: Any) -> Version:
        """Commit and wait."""
        version = self.expected(branch)
        commit = store.commit(self.state, version.message, branch=branch, metadata=version.metadata, **options)
        self.settle()
        self.land(version, commit)
        return version

    def settle(self) -> None:
        """Everything pending has landed, in order."""
        heads = dict(self.branches)
        waiting, self.pending = self.pending, []
        for pending, version in waiting:
            self.land(version, pending.result(SECONDS))
        assert self.branches == heads

    def version(self, seed: int) -> Version | None:
        """One that has landed."""
        return self.landed[seed % len(self.landed)] if self.landed else None

    @property
    def main(self) -> DeltaStore:
        assert self.store is not None
        return self.store

    def writer(self, second: bool) -> DeltaStore:
        """The store, or another object of it, as another process would have."""
        if not second:
            return self.main
        self.settle()
        if self.other is None:
            self.other = self.opened("ram")
        return self.other

    # -- commits ----------------------------------------------------------------------------------------------------------

    @rule(seed=seeds, branch=branches)
    def commit(self, seed: int, branch: str) -> None:
        self.change(seed)
        self.commit_now(self.main, branch)

    @rule(seed=seeds, branch=branches)
    def commit_in_background(self, seed: int, branch: str) -> None:
        self.change(seed)
        self.begin(self.main, branch)
        self.change(seed + 1)

    @rule(seed=seeds, branch=branches, number=st.integers(3, 9), wait=st.booleans())
    def commit_many(self, seed: int, branch: str, number: int, wait: bool) -> None:
        for each in range(number):
            self.change(seed + each)
            if wait:
                self.commit_now(self.main, branch)
            else:
                self.begin(self.main, branch)

    @rule()
    def result(self) -> None:
        if self.pending:
            pending, version = self.pending[-1]
            commit = pending.result(SECONDS)
            assert pending.phase == "visible"
            assert commit.message == version.message
            self.settle()

    @rule(branch=branches)
    def read_what_is_pending(self, branch: str) -> None:
        if branch in self.branches:
            version = self.branches[branch]
            self.check(self.main.checkout(branch), version)
            assert all(pending.done() for pending, _ in self.pending)
            self.settle()

    @rule(
        seed=seeds,
        branch=branches,
        baseline=st.sampled_from(["ram", "none", "disk"]),
        background=st.integers(0, 2),
        slow=st.booleans(),
    )
    def commit_by_another(self, seed: int, branch: str, baseline: str, background: int, slow: bool) -> None:
        """Perhaps while the store has pending commits to the same branch: they come before or after it."""
        if self.other is None:
            self.other = self.opened(baseline)
        if slow:
            self.settle()
        with self.fuse.slow_puts() if slow else contextlib.nullcontext():
            for each in range(background):
                self.change(seed + each)
                self.begin(self.main, branch)
            self.change(seed + background)
            version = self.expected(branch)
            commit = self.other.commit(self.state, version.message, branch=branch, metadata=version.metadata)
        made = [(version, commit)] + [(each, waiting.result(SECONDS)) for waiting, each in self.pending]
        in_order = [each for _, each in self.pending]
        self.pending = []
        self._arrange(made, in_order)
        place = self.landed.index(version) - len(self.landed) + len(made)
        tell(f"two writers: {len(in_order)} were pending, the other's commit became number {place}")

    def _arrange(self, made: list[tuple[Version, Commit]], in_order: list[Version]) -> None:
        """Find out in which order the commits of two writers have landed: their parents say so."""
        landed: list[Version] = []
        for branch in sorted({version.branch for version, _ in made}):
            by_parent = {commit.parents: (version, commit) for version, commit in made if version.branch == branch}
            count = sum(version.branch == branch for version, _ in made)
            assert len(by_parent) == count, "two commits with one parent"
            head = next((each for each in self._before(branch, made)), None)
            for _ in range(count):
                version, commit = by_parent[() if head is None else (str(head.id),)]
                version.parent = head
                self.land(version, commit)
                landed.append(version)
                head = version
            assert [each for each in landed if each in in_order and each.branch == branch] == [
                each for each in in_order if each.branch == branch
            ]

    def _before(self, branch: str, made: list[tuple[Version, Commit]]) -> Iterator[Version]:
        """The head of a branch before commits were made, and its ancestors."""
        new = {version for version, _ in made}
        return (each for each in self.branches[branch].history() if each not in new) if branch in self.branches else iter(())

    # -- refs -------------------------------------------------------------------------------------------------------------

    @rule(seed=seeds, name=branches, second=st.booleans())
    def create_branch(self, seed: int, name: str, second: bool) -> None:
        store, at = self.writer(second), self.version(seed)
        if at is None:
            return
        if name in self.branches:
            with pytest.raises(AlreadyExistsError):
                store.create_branch(name, revision=str(at.id))
            self.settle()
            return
        store.create_branch(name, revision=str(at.id))
        self.settle()
        self.branches[name] = at

    @rule(name=tags, branch=branches, second=st.booleans())
    def create_tag(self, name: str, branch: str, second: bool) -> None:
        store = self.writer(second)
        if branch not in self.branches:
            return
        if name in self.tags:
            with pytest.raises(AlreadyExistsError):
                store.create_tag(name, revision=branch)
            self.settle()
            return
        ref = store.create_tag(name, revision=branch)  # at what is pending, if there is something
        self.settle()
        self.tags[name] = self.branches[branch]
        assert ref.commit_id == self.tags[name].id

    @rule(name=branches, second=st.booleans())
    def delete_branch(self, name: str, second: bool) -> None:
        store = self.writer(second)
        if name in self.branches:
            store.delete_branch(name)
            self.settle()
            del self.branches[name]
        else:
            with pytest.raises(RevisionNotFoundError):
                store.delete_branch(name)
            self.settle()

    @rule(name=tags, second=st.booleans())
    def delete_tag(self, name: str, second: bool) -> None:
        store = self.writer(second)
        if name in self.tags:
            store.delete_tag(name)
            self.settle()
            del self.tags[name]

    @rule(seed=seeds, name=branches, second=st.booleans())
    def reset_branch(self, seed: int, name: str, second: bool) -> None:
        store, to = self.writer(second), self.version(seed)
        if to is not None and name in self.branches:
            store.reset_branch(name, revision=str(to.id), expected=name)
            self.settle()
            self.branches[name] = to

    # -- reading ------------------------------------------------------------------------------------------------------------

    def check(self, snapshot: Snapshot, version: Version) -> None:
        """A snapshot is, bit for bit, a version."""
        assert snapshot.commit.message == version.message
        assert snapshot.commit.metadata == version.metadata
        assert set(snapshot) == set(version.tensors)
        for name, lazy in snapshot.items():
            assert (lazy.dtype_name, lazy.shape, lazy.tobytes()) == version.tensors[name], (version.message, name)

    @rule(first=seeds, second=seeds)
    def diff(self, first: int, second: int) -> None:
        before, after = self.version(first), self.version(second)
        if before is None or after is None:
            return
        found = self.main.diff(str(before.id), str(after.id))
        self.settle()
        expected: dict[str, tuple[str, int | None]] = {}
        for name in before.tensors.keys() | after.tensors.keys():
            old, new = before.tensors.get(name), after.tensors.get(name)
            if old is None or new is None:
                expected[name] = ("added" if old is None else "removed", None)
            elif old[:2] != new[:2]:
                expected[name] = ("reshaped", None)
            elif old[2] != new[2]:
                word = f"<u{len(new[2]) // math.prod(new[1])}"
                expected[name] = ("changed", int(np.count_nonzero(np.frombuffer(old[2], word) != np.frombuffer(new[2], word))))
        assert {each.name: (each.status, each.changed_elements) for each in found.tensors} == expected
        assert bool(found) == bool(expected)

    @rule(seed=seeds)
    def load(self, seed: int) -> None:
        version = self.version(seed)
        if version is None:
            return
        snapshot = self.main.checkout(str(version.id))
        self.settle()
        loaded = snapshot.load()
        assert {name: bits(tensor) for name, tensor in loaded.items()} == version.tensors

    @rule(seed=seeds)
    def slices(self, seed: int) -> None:
        version = self.version(seed)
        if version is None:
            return
        snapshot = self.main.checkout(str(version.id))
        self.settle()
        rng = np.random.default_rng(seed)
        for name, kept in version.tensors.items():
            if 0 in kept[1] or not kept[1]:
                continue
            lazy: LazyTensor = snapshot[name]
            whole = tensor_of(kept)
            index: list[Any] = []
            for size in kept[1]:
                start, stop = sorted(int(at) for at in rng.integers(0, size + 1, 2))
                index.append(slice(start, stop, int(rng.integers(1, 4))) if rng.integers(4) else int(rng.integers(size)))
            assert bits(lazy[tuple(index)].load()) == bits(whole[tuple(index)]), (version.message, name, index)

    @rule(seed=seeds, into=st.booleans())
    def go_on_from(self, seed: int, into: bool) -> None:
        """A trainer that resumes from an old version."""
        version = self.version(seed)
        if version is None:
            return
        snapshot = self.main.checkout(str(version.id))
        self.settle()
        if into:
            target = first_state()["model"]
            target.pop("extra", None)
            if "model.extra" in version.tensors:
                target["extra"] = empty_of(version.tensors["model.extra"])
            state = {"model": target, "count": -1}
            restored = snapshot.load_into(state)
            assert set(restored.names) == set(version.tensors)
            assert restored.values == 1
            assert state["count"] == version.count
            self.state = state
        else:
            self.state = snapshot.state()
            assert list(self.state) == ["model", "count"]
            assert self.state["count"] == version.count
        assert {f"model.{name}": bits(tensor) for name, tensor in self.state["model"].items()} == version.tensors

    @rule(branch=branches, steps=st.integers(0, 12), step=st.integers(0, 40))
    def revisions(self, branch: str, steps: int, step: int) -> None:
        if branch not in self.branches:
            return
        self.main.list_refs()
        self.settle()
        history = list(self.branches[branch].history())
        with_step = next((each for each in history if each.metadata["step"] == step), None)
        for revision, version in (
            (f"{branch}~{steps}", history[steps] if steps < len(history) else None),
            (f"{branch}@{{step={step}}}", with_step),
        ):
            if version is None:
                with pytest.raises(RevisionNotFoundError):
                    self.main.get_commit(revision)
            else:
                assert self.main.get_commit(revision).id == version.id, revision

    # -- what can go wrong ----------------------------------------------------------------------------------------------------

    @rule(baseline=st.sampled_from(["ram", "disk", "none"]), trust=st.sampled_from(["store", "none"]), both=st.booleans())
    def reopen(self, baseline: str, trust: str, both: bool) -> None:
        self.main.close()
        self.settle()
        if both and self.other is not None:
            self.other.close()
            self.other = None
        self.open(baseline, trust)

    @rule(seed=seeds, number=st.integers(0, 70), commits=st.integers(0, 3), baseline=st.sampled_from(["ram", "disk"]))
    def crash(self, seed: int, number: int, commits: int, baseline: str) -> None:
        """Everything fails from some operation on; a new process finds the first few commits, or none."""
        self.settle()
        heads = dict(self.branches)
        self.fuse.blow("any", number, lambda: StorageError(CRASHED, "injected"))
        rng = random.Random(seed)
        called: list[tuple[PendingCommit | None, Version]] = []
        refused: Version | None = None
        for each in range(max(1, commits)):
            self.change(seed + each)
            version = self.expected(rng.choice(BRANCHES))
            try:
                if commits:
                    pending = self.main.commit(
                        self.state, version.message, branch=version.branch, metadata=version.metadata, wait=False
                    )
                    called.append((pending, version))
                else:
                    called.append((None, version))
                    self.main.commit(self.state, version.message, branch=version.branch, metadata=version.metadata)
            except StorageError as error:
                check_cause(error, CRASHED)
                refused = None if not commits else version
                break
            self.branches[version.branch] = version
        sure = []
        for waiting, version in called:
            if waiting is not None:
                with contextlib.suppress(StorageError):
                    waiting.result(SECONDS)
                    sure.append(version)
        self.fuse.blow("any", 0, lambda: StorageError(CRASHED, "injected"))
        self.abandon()
        self.branches = heads
        self.open(baseline, "store")
        found = {commit.message: commit for commit in self.main.list_history()}
        there = [version.message in found for _, version in called]
        assert there == sorted(there, reverse=True), "a commit landed, one before it did not"
        tell(f"crash: {sum(there)} of {len(called)} pending commits there" if commits else f"crash: the commit there: {there}")
        assert all(version.message in found for version in sure)
        assert refused is None or refused.message not in found
        for (_, version), landed in zip(called, there, strict=True):
            if landed:
                self.land(version, found[version.message])

    def abandon(self) -> None:
        """Take away what ends with a process: its locks and open files."""
        committer = self.main._committer
        if committer is not None:
            deltastore.commit._open.discard(committer)
            committer._baseline.close(None)
        self.main._index.close()
        self.store = None

    @rule(seed=seeds, number=st.integers(0, 6), branch=branches, on_full=st.sampled_from(["raise", "warn"]))
    def full_disk(self, seed: int, number: int, branch: str, on_full: Any) -> None:
        self.settle()
        self.change(seed)
        version = self.expected(branch)
        self.fuse.blow("put", number, lambda: StoreFullError(FULL))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # also that a log entry is yet to be written
                commit = self.main.commit(self.state, version.message, branch=branch, metadata=version.metadata, on_full=on_full)
        except StoreFullError as error:
            check_cause(error, FULL)
            refused = True
        else:
            refused = commit is None
        finally:
            self.fuse.mend()
        tell(f"full disk: refused: {refused}")
        if not refused:
            self.land(version, commit)
        self.check_refs(self.main)
        self.commit_now(self.main, branch)

    @rule(seed=seeds, number=st.integers(0, 15), commits=st.integers(1, 4), after=branches, once=st.booleans())
    def full_disk_in_background(self, seed: int, number: int, commits: int, after: str, once: bool) -> None:
        """Those behind the one that found no room fail, too, even when there is room again."""
        self.settle()
        heads = dict(self.branches)
        rng = random.Random(seed)
        called: list[tuple[PendingCommit, Version]] = []
        self.fuse.blow("put", number, lambda: StoreFullError(FULL), once=once)
        try:
            for each in range(commits):
                self.change(seed + each)
                version = self.expected(rng.choice(BRANCHES))
                try:
                    pending = self.main.commit(
                        self.state, version.message, branch=version.branch, metadata=version.metadata, wait=False
                    )
                except StoreFullError as error:
                    check_cause(error, FULL)
                    break
                self.branches[version.branch] = version
                called.append((pending, version))
                self.change(seed + 100 + each)
            outcomes: list[Commit | StoreFullError] = []
            for pending, _ in called:
                try:
                    outcomes.append(pending.result(SECONDS))
                except StoreFullError as error:
                    outcomes.append(error)
        finally:
            self.fuse.mend()
        self.branches = heads
        failed = False
        for (_, version), outcome in zip(called, outcomes, strict=True):
            if isinstance(outcome, Commit):
                assert not failed, "a commit landed, one before it did not"
                self.land(version, outcome)
            else:
                failed = True
                assert str(outcome) == FULL
        tell(f"full disk: {sum(isinstance(each, Commit) for each in outcomes)} of {len(called)} pending commits, {commits} calls")
        self.check_refs(self.main)
        self.commit_now(self.main, after)

    @rule(name=tags, seed=seeds)
    def full_disk_for_a_tag(self, name: str, seed: int) -> None:
        self.settle()
        at = self.version(seed)
        if at is None or name in self.tags:
            return
        self.fuse.blow("put", seed % 2, lambda: StoreFullError(FULL))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.main.create_tag(name, revision=str(at.id))
        except StoreFullError:
            pass
        else:
            self.tags[name] = at
        finally:
            self.fuse.mend()

    @rule(seed=seeds, branch=branches, background=st.booleans())
    def fork(self, seed: int, branch: str, background: bool) -> None:
        """A child commits to a branch of its own and reads, while the parent goes on."""
        if self.forks == FORKS:
            return
        self.forks += 1
        known = self.version(seed)
        if background:
            self.change(seed)
            self.begin(self.main, branch)
            self.change(seed + 1)
        child = self.expected(f"child-{self.forks}")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._in_fork(child, known)
        self.change(seed + 2)
        self.begin(self.main, branch)
        _await(pid)
        self.settle()
        self.land(child, self.main.get_commit(child.branch))

    def _in_fork(self, version: Version, known: Version | None) -> None:
        code = 1
        try:
            self.fuse.renew_lock()
            self.main.commit(self.state, version.message, branch=version.branch, metadata=version.metadata)
            self.check(self.main.checkout(version.branch), version)
            if known is not None:
                self.check(self.main.checkout(str(known.id)), known)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    # -- what always holds ------------------------------------------------------------------------------------------------

    def check_refs(self, store: DeltaStore) -> None:
        refs = {ref.name: (ref.kind, ref.commit_id) for ref in store.list_refs()}
        expected = {name: ("branch", version.id) for name, version in self.branches.items()}
        assert refs == expected | {name: ("tag", version.id) for name, version in self.tags.items()}

    @invariant()
    def holds(self) -> None:
        if self.watcher is None:
            return
        if not self.pending:
            self.check_refs(self.random.choice([self.main, self.watcher]))
            if self.branches:
                branch = self.random.choice(sorted(self.branches))
                found = [(commit.id, commit.message) for commit in self.watcher.list_commits(branch)]
                assert found == [(version.id, version.message) for version in self.branches[branch].history()]
        if self.landed:
            version = self.random.choice(self.landed)
            store = self.watcher if self.pending else self.random.choice([self.main, self.watcher])
            self.check(store.checkout(str(version.id)), version)

    def check_all(self) -> None:
        """At the end: everything that ever landed, from a new process' point of view."""
        self.settle()
        with contextlib.suppress(AlreadyExistsError):
            if self.landed:
                self.main.create_tag("end", revision=str(self.landed[-1].id))  # fills the last hole of the log
                self.tags["end"] = self.landed[-1]
        self.main.close()
        self.store = self.opened("none", "none")
        self.check_refs(self.store)
        for version in self.landed:
            self.check(self.store.checkout(str(version.id)), version)
        if self.landed:
            tensors = self.store._versions.get(str(self.landed[-1].id)).tensors
            assert max(each.chunks for each in tensors) == -(-5 * 61 // CHUNK), "the small chunks are not in use"
        tell(f"commits: {len(self.landed) // 10}0 or more")
        report = self.store.verify(read_data=True)
        assert report, report.problems
        assert_log_dense(self.store)

    def teardown(self) -> None:
        try:
            if self.store is not None and sys.exc_info()[0] is None:
                self.check_all()
        finally:
            for store in (self.store, self.other, self.watcher):
                if store is not None:
                    with contextlib.suppress(Exception):
                        store.close()
            self.patch.undo()
            shutil.rmtree(self.folder, ignore_errors=True)


def check_cause(error: Exception, cause: str) -> None:
    """An error is the one that was injected."""
    assert cause in str(error)


def _await(pid: int) -> None:
    """Wait for a child that must succeed, and soon."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
            return
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child was still at work after {SECONDS} s")


class TestStore(StoreMachine.TestCase):
    """Run by pytest."""

    settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck))


def test_every_rule() -> None:
    """One history that has everything in it, whatever hypothesis chooses."""
    state = StoreMachine()
    try:
        state.create(baseline="disk", pack_bytes=600, manifest_rows=4, staging=1000)
        state.commit_many(seed=1, branch="main", number=9, wait=True)
        state.commit_many(seed=11, branch="main", number=9, wait=False)
        state.read_what_is_pending(branch="main")
        state.create_branch(seed=4, name="left", second=False)
        state.commit_in_background(seed=30, branch="left")
        state.create_tag(name="v1", branch="left", second=False)
        for slow in (False, True):
            state.commit_by_another(seed=40, branch="main", baseline="none", background=2, slow=slow)
            state.commit_by_another(seed=50, branch="right", baseline="none", background=int(slow), slow=slow)
            state.holds()
        for number in range(0, 70, 10):
            state.crash(seed=number, number=number, commits=number // 10 % 4, baseline="disk")
            state.holds()
        for number in range(0, 7, 2):
            state.full_disk(seed=number, number=number, branch="left", on_full=("raise", "warn")[number // 2 % 2])
            state.full_disk_in_background(seed=number, number=2 * number, commits=3, after="main", once=number % 4 == 0)
            state.holds()
        state.full_disk_for_a_tag(name="v2", seed=0)
        state.full_disk_for_a_tag(name="v3", seed=1)
        for background in (False, True):
            state.fork(seed=60, branch="left", background=background)
            state.holds()
        state.go_on_from(seed=3, into=True)
        state.reset_branch(seed=5, name="main", second=True)
        state.commit(seed=70, branch="main")
        state.result()
        state.go_on_from(seed=20, into=False)
        state.reopen(baseline="disk", trust="none", both=True)
        state.commit(seed=80, branch="main")
        for number in range(0, 60, 12):
            state.diff(first=number, second=7 * number)
            state.load(seed=number)
            state.slices(seed=number)
            state.revisions(branch="main", steps=number // 4, step=number // 2)
        state.delete_tag(name="v1", second=True)
        state.delete_branch(name="right", second=False)
        state.holds()
    finally:
        state.teardown()
