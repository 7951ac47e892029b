"""Everything one does to a store, in any order, against a model of it that is a few dicts.

Own commits that are on their way, crashes, a full disk, forked children and a second open store included. `python
test_store_machine.py EXAMPLES STEPS` looks for faults for as long as one likes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from store_states import raw

import deltastore.store
from deltastore import DeltaStore
from deltastore.buckets import open_bucket
from deltastore.buckets.base import ObjectInfo, Upload
from deltastore.buckets.folder import FolderBucket
from deltastore.errors import StorageError, StoreFullError
from deltastore.history import Commit
from deltastore.layout import log_key
from deltastore.pending import PendingCommit, take_untold

Bits = dict[str, tuple[str, tuple[int, ...], bytes]]
BASELINES = ["ram", "disk", "none", "auto"]
CHILD_SECONDS = 60.0
picks = st.integers(0, 1 << 20)
seeds = st.integers(0, 1 << 30)


class TappedBucket(FolderBucket):
    """A folder that fills up after so many puts, or is cut off altogether."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.puts_left: int | None = None
        self.dead = False

    def _live(self) -> None:
        if self.dead:
            raise StorageError("this process has crashed", "crashed")

    def put(self, uploads: Sequence[Upload]) -> None:
        self._live()
        if self.puts_left is not None:
            if self.puts_left == 0:
                raise StoreFullError("no space left")
            self.puts_left -= 1
        super().put(uploads)

    def get(self, key: str) -> bytes:
        self._live()
        return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._live()
        return super().get_range(key, start, length)

    def stat(self, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
        self._live()
        return super().stat(keys)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._live()
        return super().list(prefix)


class Training:
    """A state that changes in place, and sometimes in its shape."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "weight": torch.zeros(300, dtype=torch.bfloat16),
            "bias": torch.zeros(2, 7),
            "codes": torch.zeros(90, dtype=torch.int8),
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 5),
            "frozen": torch.nn.Parameter(torch.zeros(200, dtype=torch.bfloat16), requires_grad=False),
        }

    def change(self, seed: int) -> None:
        """Change bits in place; one time in eight other things."""
        chance = np.random.default_rng(seed)
        for name, tensor in self.state.items():
            if tensor.numel() and (name != "frozen" or seed % 7 == 0) and chance.random() < 0.7:
                words = tensor.detach().reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
                words[chance.integers(0, len(words), 1 + len(words) // 20)] ^= chance.integers(1, 100)
        if seed % 8 == 1:
            self.state["codes"] = torch.full((int(chance.integers(0, 200)),), seed % 100, dtype=torch.int8)
        elif seed % 8 == 2:
            self.state[f"more{seed % 3}"] = torch.full((20,), float(seed))
        elif seed % 8 == 3:
            self.state.pop(f"more{seed % 3}", None)

    def bits(self) -> Bits:
        return bits_of(self.state)


def bits_of(state: dict[str, Any]) -> Bits:
    """dtype, shape and bytes of each tensor."""
    return {name: (str(tensor.dtype), tuple(tensor.shape), raw(tensor)) for name, tensor in state.items()}


class StoreMachine(RuleBasedStateMachine):
    """A store, and what it should hold.

    `bits` and `ids` are those of each commit by its number, which is in its metadata; `branches` has their histories, oldest
    first; `tags` a number each. `pending` are commits on their way of the first store, in the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Path(tempfile.mkdtemp(prefix="deltastore-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        vars(deltastore.store)["open_bucket"] = TappedBucket
        self.options: dict[str, Any] = {"baseline": "ram", "cache_dir": self.work / "cache", "trust": "none"}
        self.store = DeltaStore.create(self.work / "store", **self.options)
        self.other = DeltaStore(self.work / "store", **self.options)
        self.training = Training()
        self.number = 0
        self.bits: dict[int, Bits] = {}
        self.ids: dict[int, str] = {}
        self.branches: dict[str, tuple[int, ...]] = {}
        self.tags: dict[str, int] = {}
        self.pending: list[tuple[int, PendingCommit]] = []
        self.commit(0, 0, 5, wait=True)

    # -- committing -------------------------------------------------------------------------------------------------------

    def _branch(self, pick: int) -> str:
        names = sorted(self.branches) or ["main"]
        return names[pick % len(names)]

    def _new(self) -> tuple[int, dict[str, Any]]:
        self.number += 1
        self.bits[self.number] = self.training.bits()
        return self.number, {"message": f"{self.number}", "metadata": {"number": self.number}}

    @rule(branch=picks, seed=seeds, after=seeds, wait=st.booleans())
    def commit(self, branch: int, seed: int, after: int, wait: bool) -> None:
        name = self._branch(branch)
        self.training.change(seed)
        number, options = self._new()
        self.branches[name] = (*self.branches.get(name, ()), number)
        if wait:
            self.landed(number, self.store.commit(self.training.state, branch=name, **options))
            self.settle()
        else:
            self.pending.append((number, self.store.commit(self.training.state, branch=name, wait=False, **options)))
        self.training.change(after)

    @rule(branch=picks, seeds=st.lists(seeds, min_size=6, max_size=10))
    def commit_many(self, branch: int, seeds: list[int]) -> None:
        for seed in seeds:
            self.commit(branch, seed, seed + 1, wait=False)

    @rule(branch=picks, seed=seeds, after=seeds, wait=st.booleans())
    def commit_a_stream(self, branch: int, seed: int, after: int, wait: bool) -> None:
        self.training.change(seed)
        state, self.training.state = self.training.state, dict(self.training.state)
        name = self._branch(branch)
        number, options = self._new()
        self.branches[name] = (*self.branches[name], number)
        stream = iter(list(state.items()))
        if wait:
            self.landed(number, self.store.commit(stream, branch=name, **options))
            self.settle()
        else:
            self.pending.append((number, self.store.commit(stream, branch=name, wait=False, **options)))
        self.training.change(after)

    def landed(self, number: int, commit: Commit) -> None:
        assert commit.metadata == {"number": number}
        assert commit.message == f"{number}"
        self.ids[number] = commit.id

    def settle(self) -> None:
        """All that was on its way has landed."""
        for number, pending in self.pending:
            self.landed(number, pending.result(CHILD_SECONDS))
            assert pending.phase == "visible"
        self.pending = []

    @precondition(lambda self: self.pending)
    @rule(pick=picks)
    def result(self, pick: int) -> None:
        number, pending = self.pending[pick % len(self.pending)]
        self.landed(number, pending.result(CHILD_SECONDS))

    @rule(branch=picks, seed=seeds, puts=st.integers(0, 4), count=st.integers(1, 2), wait=st.booleans())
    def commit_to_a_full_store(self, branch: int, seed: int, puts: int, count: int, wait: bool) -> None:
        self.settle()
        name = self._branch(branch)
        self.bucket.puts_left = puts
        tried: list[tuple[int, Any]] = []
        for _ in range(count):
            self.training.change(seed)
            number, options = self._new()
            try:
                tried.append((number, self.store.commit(self.training.state, branch=name, wait=wait, **options)))
            except StoreFullError:
                break
        for number, outcome in tried:
            with contextlib.suppress(StoreFullError):
                self.landed(number, outcome if isinstance(outcome, Commit) else outcome.result(CHILD_SECONDS))
                self.branches[name] = (*self.branches[name], number)
        self.bucket.puts_left = None
        self.check_refs()

    @property
    def bucket(self) -> TappedBucket:
        bucket = self.store._bucket
        assert isinstance(bucket, TappedBucket)
        return bucket

    # -- refs -------------------------------------------------------------------------------------------------------------

    @rule(pick=picks, back=st.integers(0, 3))
    def create_branch(self, pick: int, back: int) -> None:
        source = self._branch(pick)
        history = self.branches[source]
        back = min(back, len(history) - 1)
        name = f"branch-{self.number}"
        if name not in self.branches:
            self.number += 1
            self.branches[name] = history[: len(history) - back]
            self.store.create_branch(name, revision=f"{source}~{back}")

    @precondition(lambda self: len(self.branches) > 1)
    @rule(pick=picks)
    def delete_branch(self, pick: int) -> None:
        name = self._branch(pick)
        if name != "main":
            del self.branches[name]
            self.store.delete_branch(name)

    @rule(pick=picks)
    def create_tag(self, pick: int) -> None:
        source = self._branch(pick)
        name = f"tag-{self.number}"
        if name not in self.tags:
            self.tags[name] = self.branches[source][-1]
            self.store.create_tag(name, revision=source)

    @precondition(lambda self: self.tags)
    @rule(pick=picks)
    def delete_tag(self, pick: int) -> None:
        name = sorted(self.tags)[pick % len(self.tags)]
        del self.tags[name]
        self.store.delete_tag(name)

    @rule(pick=picks, other=picks)
    def reset_branch(self, pick: int, other: int) -> None:
        name, to = self._branch(pick), self._branch(other)
        self.branches[name] = self.branches[to]
        self.store.reset_branch(name, revision=to)

    # -- reading ----------------------------------------------------------------------------------------------------------

    @rule(pick=picks, back=st.integers(0, 12))
    def load(self, pick: int, back: int) -> None:
        name = self._branch(pick)
        history = self.branches[name]
        back = min(back, len(history) - 1)
        snapshot = self.store.checkout(f"{name}~{back}")
        number = history[-1 - back]
        self.landed(number, snapshot.commit)
        assert bits_of(snapshot.load()) == self.bits[number]

    @rule(pick=picks)
    def load_into(self, pick: int) -> None:
        """And go on from there, as a run that starts again."""
        snapshot = self.store.checkout(self._branch(pick))
        number = self.branches[self._branch(pick)][-1]
        state = snapshot.state()
        for tensor in state.values():
            tensor.detach().zero_()
        assert set(snapshot.load_into(state)) == set(state)
        assert bits_of(state) == self.bits[number]
        self.training.state = state

    @rule(first=picks, second=picks)
    def diff(self, first: int, second: int) -> None:
        one, two = self._branch(first), self._branch(second)
        before, after = (self.bits[self.branches[name][-1]] for name in (one, two))
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert {each.name for each in self.store.diff(one, two).tensors} == changed

    @rule()
    def check_refs(self) -> None:
        """Branches, tags and histories are as they should be, and the heads are exact."""
        refs = {ref.name: ref.kind for ref in self.store.list_refs()}
        self.settle()
        assert refs == {**dict.fromkeys(self.branches, "branch"), **dict.fromkeys(self.tags, "tag")}
        for name, history in self.branches.items():
            commits = list(reversed(self.store.list_commits(name)))
            assert [commit.metadata["number"] for commit in commits] == list(history)
            assert [commit.id for commit in commits] == [self.ids[number] for number in history]
            assert bits_of(self.store.checkout(name).load()) == self.bits[history[-1]]
        for name, number in self.tags.items():
            assert self.store.get_commit(name).id == self.ids[number]

    # -- processes --------------------------------------------------------------------------------------------------------

    @rule(baseline=st.sampled_from(BASELINES))
    def close_and_open(self, baseline: str) -> None:
        self.store.close()
        self.settle()
        self.options["baseline"] = baseline
        self.store = DeltaStore(self.work / "store", **self.options)

    @rule(baseline=st.sampled_from(BASELINES))
    def crash(self, baseline: str) -> None:
        """The process is gone; what was on its way is there up to some point."""
        self.bucket.dead = True
        assert self.store._committer is None or self.store._committer.settle() is None
        take_untold()
        self.options["baseline"] = baseline
        self.store = DeltaStore(self.work / "store", **self.options)
        lost = False
        for number, pending in self.pending:
            if pending.phase == "visible":
                assert not lost, "a commit landed though one before it did not"
                self.landed(number, pending.result())
            else:
                lost = True
                self.branches = {name: tuple(n for n in history if n != number) for name, history in self.branches.items()}
        self.pending = []
        self.check_refs()

    @rule(branch=picks, seed=seeds, wait=st.booleans())
    def commit_elsewhere(self, branch: int, seed: int, wait: bool) -> None:
        """A second store on the same folder, while commits of the first are on their way."""
        name = self._branch(branch)
        self.training.change(seed)
        number, options = self._new()
        mine = [each for each, _ in self.pending if each in self.branches[name]]
        if wait:
            commit = self.other.commit(self.training.state, branch=name, **options)
        else:
            commit = self.other.commit(self.training.state, branch=name, wait=False, **options).result(CHILD_SECONDS)
        self.landed(number, commit)
        self.settle()
        found = tuple(each.metadata["number"] for each in reversed(self.store.list_commits(name)))
        assert [each for each in found if each in mine] == mine
        assert tuple(each for each in found if each != number) == self.branches[name]
        assert number in found
        self.branches[name] = found
        self.training.change(seed + 1)

    @rule(pick=picks, seed=seeds, wait=st.booleans())
    def fork(self, pick: int, seed: int, wait: bool) -> None:
        """A child commits with its parent's store, to a branch of its own; the parent goes on meanwhile."""
        name = f"child-{self.number}"
        number, options = self._new()
        history = (number,)
        pid = os.fork()
        if pid == 0:
            self._in_child(lambda: self._commit_in_child(name, number, wait, options))
        self.commit(pick, seed, seed + 1, wait=False)
        self._await(pid)
        self.landed(number, self.store.get_commit(name))
        self.branches[name] = history

    def _commit_in_child(self, name: str, number: int, wait: bool, options: dict[str, Any]) -> None:
        for _, pending in self.pending:
            assert not pending.done()
        self.store.commit(self.training.state, branch=name, wait=wait, **options)
        assert bits_of(self.store.checkout(name).load()) == self.bits[number]
        self.store.close()

    def _in_child(self, function: Callable[[], None]) -> None:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _await(self, pid: int) -> None:
        end = time.monotonic() + CHILD_SECONDS
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                return
            time.sleep(0.002)
        raise AssertionError(f"child {pid} hangs")

    # -- the end ----------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.check_refs()
            self.create_tag(0)  # by now every hole of the log is filled
            for number in {number for history in self.branches.values() for number in history} | set(self.tags.values()):
                assert bits_of(self.store.checkout(self.ids[number]).load()) == self.bits[number], f"commit {number}"
            report = self.store.verify(read_data=True)
            assert report, report.problems
            entries = self.store._index.oplog()
            assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
            for entry in entries:
                assert self.bucket.get(log_key(entry.epoch, entry.seq)) == entry.body
            assert take_untold() == []
        finally:
            self.store.close()
            self.other.close()
            vars(deltastore.store)["open_bucket"] = open_bucket
            shutil.rmtree(self.work)


ordinary = settings(
    max_examples=6,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target],  # a failure says enough as it is
)
quietly = [".*another writer.*", ".*log entry could not be written.*", ".*multi-threaded.*"]


def test_any_order() -> None:
    with warnings.catch_warnings():
        for text in quietly:
            warnings.filterwarnings("ignore", text)
        run_state_machine_as_test(StoreMachine, settings=ordinary)


if __name__ == "__main__":
    warnings.simplefilter("error")
    for each in quietly:
        warnings.filterwarnings("ignore", each)
    run_state_machine_as_test(
        StoreMachine, settings=settings(ordinary, max_examples=int(sys.argv[1]), stateful_step_count=int(sys.argv[2]))
    )
