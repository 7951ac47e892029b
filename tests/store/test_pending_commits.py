"""`commit(wait=False)`: what is committed is what was there at the call, whatever happens afterwards."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import raw, same

import deltastore.publisher
from deltastore import DeltaStore
from deltastore.buckets.base import Upload
from deltastore.buckets.folder import FolderBucket
from deltastore.errors import (
    AlreadyExistsError,
    DeltaStoreError,
    IncompatibleStateError,
    RefConflictError,
    StorageError,
    StoreFullError,
)

SECONDS = 60.0
WAITING: Any = {"wait": False}


class Gate:
    """Holds back what commits in the background write to their bucket, or lets it fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        self.fail: Callable[[str], BaseException | None] = lambda key: None

    def pass_through(self, keys: Sequence[str]) -> None:
        background = threading.current_thread().name.startswith("deltastore-commit")
        if background and not self.open.is_set():
            self.waiting.set()
            assert self.open.wait(SECONDS)
        for key in keys:
            error = self.fail(key)
            if error is not None:
                raise error


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    put = FolderBucket.put

    def guarded(self: FolderBucket, uploads: Sequence[Upload]) -> None:
        gate.pass_through([upload.key for upload in uploads])
        put(self, uploads)

    monkeypatch.setattr(FolderBucket, "put", guarded)
    return gate


class Model(torch.nn.Module):
    """Several dtypes, a tied pair, a frozen parameter, a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(300, 16, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(16, 300, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.body = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Parameter(torch.randn(40), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("packed", torch.zeros(50, dtype=torch.int8))

    @torch.no_grad()
    def train_step(self, step: int) -> None:
        self.embedding.weight.view(torch.int16).view(-1)[step % 97 :: 97] += 1
        self.body.weight += 1e-4 * step
        self.steps += 1
        self.packed[step % 50] += 1

    @torch.no_grad()
    def ruin(self) -> None:
        """What must never be in any version."""
        for tensor in (self.embedding.weight, self.body.weight, self.body.bias, self.steps, self.packed):
            tensor.zero_()


def content(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: raw(value) for name, value in model.state_dict().items()}


def restore(model: Model, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name != "frozen":
                value.copy_(values[name])


def assert_history(store: DeltaStore, expected: list[dict[str, bytes]], revision: str = "main") -> None:
    commits = store.list_commits(revision)[::-1]
    assert [commit.message for commit in commits] == [str(step) for step in range(len(expected))]
    for commit, values in zip(commits, expected, strict=True):
        assert {name: raw(value) for name, value in store.checkout(commit.id).load().items()} == values, commit.message
    for parent, commit in itertools.pairwise(commits):
        assert commit.parents == (parent.id,)
    assert store.verify(read_data=True)


@pytest.mark.parametrize(("baseline", "steps"), [("ram", 200), ("disk", 12), ("none", 12)])
def test_every_version_is_what_was_there_at_the_call(folder: Path, tmp_path: Path, baseline: Any, steps: int) -> None:
    model, expected = Model(), []
    with DeltaStore.create(folder, baseline=baseline, cache_dir=tmp_path / "cache") as store:
        for step in range(steps):
            model.train_step(step)
            expected.append(content(model))
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            store.commit(model, str(step), metadata={"step": step}, wait=False)
            model.ruin()
            restore(model, kept)
        assert_history(store, expected)


@pytest.mark.parametrize("baseline", ["ram", "none"])
def test_another_thread_writes_from_the_moment_of_the_return(folder: Path, baseline: Any) -> None:
    tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, 2_300_000, np.uint16).view(np.int16)).view(
        torch.bfloat16
    )
    words = tensor.view(torch.int16)
    returned, stop, expected = threading.Event(), threading.Event(), []

    def hammer() -> None:
        while not stop.is_set():
            if returned.wait(0.01):
                words[::3] ^= 0x5A5A

    thread = threading.Thread(target=hammer)
    with DeltaStore.create(folder, baseline=baseline) as store:
        thread.start()
        try:
            for step in range(6):
                words[step::700] += 1
                kept = words.clone()
                expected.append({"w": raw(tensor)})
                store.commit({"w": tensor}, str(step), wait=False)
                returned.set()
                stop.wait(0.05)
                returned.clear()
                words.copy_(kept)
                store.list_refs()  # nothing is written to while the next call reads
                words.copy_(kept)
        finally:
            stop.set()
            thread.join()
        assert_history(store, expected)


def test_two_are_on_their_way_and_a_third_call_waits(store: DeltaStore, gate: Gate) -> None:
    state = {"w": torch.zeros(1000)}
    store.commit(state, "0")
    gate.open.clear()
    first = store.commit(state, "1", wait=False)
    second = store.commit(state, "2", wait=False)
    assert gate.waiting.wait(SECONDS)
    assert not first.done()
    assert not second.done()
    assert repr(first) in ("PendingCommit('1' to 'main', scanned)", "PendingCommit('1' to 'main', encoded)")
    with pytest.raises(TimeoutError, match=r"'1' is still on its way after 0\.01 s"):
        first.result(timeout=0.01)
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(store.commit(state, "3", wait=False)))
    thread.start()
    thread.join(0.3)
    assert not third
    gate.open.set()
    thread.join(SECONDS)
    assert third[0].result(SECONDS).message == "3"
    assert first.phase == second.phase == "visible"
    assert repr(second) == "PendingCommit('2' to 'main', visible)"
    assert [commit.message for commit in store.list_commits()] == ["3", "2", "1", "0"]
    assert second.result() == store.get_commit("main~1")
    assert second.result().parents == (first.result().id,)


ERRORS = [StorageError("the disk is gone", "io"), StoreFullError("no room"), MemoryError("no memory")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("told_by", ["result", "commit", "waiting commit", "close"])
def test_a_failure_takes_those_behind_it_along_and_is_told_once(
    folder: Path, gate: Gate, error: BaseException, told_by: str
) -> None:
    model = Model()
    store = DeltaStore.create(folder)
    expected = []
    for step in range(2):
        model.train_step(step)
        expected.append(content(model))
        store.commit(model, str(step))
    before = store.list_refs()
    gate.open.clear()
    gate.fail = lambda key: error if key.startswith("packs/") else None
    model.train_step(2)
    first = store.commit(model, "lost", wait=False)
    model.train_step(3)
    second = store.commit(model, "lost, too", wait=False)
    model.train_step(4)
    gate.open.set()
    if told_by == "result":
        for pending in (first, second, first):
            with pytest.raises(type(error), match=str(error)):
                pending.result(SECONDS)
            assert pending.phase == "failed"
        gate.fail = lambda key: None
    else:
        assert store.list_refs() == before  # waits
        gate.fail = lambda key: None
        with pytest.raises(type(error), match=str(error)):
            if told_by == "close":
                store.close()
            else:
                store.commit(model, "not begun", **(WAITING if told_by == "commit" else {}))
    if told_by == "close":
        store.close()
        store = DeltaStore(folder)
    expected.append(content(model))
    pending = store.commit(model, "2", wait=False)
    model.ruin()
    pending.result(SECONDS)
    assert_history(store, expected)
    store.close()


def test_a_with_block_tells_of_a_failure_but_hides_no_other_error(folder: Path, gate: Gate) -> None:
    def fail(key: str) -> BaseException | None:
        return StorageError("the disk is gone", "io") if key.startswith("packs/") else None

    with pytest.raises(StorageError, match="the disk is gone"), DeltaStore.create(folder) as store:
        gate.fail = fail
        store.commit({"w": torch.ones(9)}, wait=False)
    gate.fail = lambda key: None

    def leave_by_an_error() -> None:
        with DeltaStore(folder) as store:
            gate.fail = fail
            store.commit({"w": torch.ones(9)}, wait=False)
            raise ZeroDivisionError

    said = "a commit in the background has failed, too: the disk is gone"
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match=said):
        leave_by_an_error()


def test_a_full_store_may_be_a_warning(store: DeltaStore, gate: Gate) -> None:
    state = {"w": torch.zeros(1000)}
    store.commit(state, "0")
    gate.fail = lambda key: StoreFullError("no room") if key.startswith("commits/") else None
    store.commit(state, "lost", wait=False, on_full="warn")
    asked = store.commit(state, "lost", wait=False, on_full="warn")
    with pytest.raises(StoreFullError, match="no room"):
        asked.result(SECONDS)
    with pytest.warns(UserWarning, match="an earlier commit could not be stored: no room"):
        unseen = store.commit(state, "lost", wait=False, on_full="warn")
    store.list_refs()
    gate.fail = lambda key: None
    with pytest.warns(UserWarning, match="could not be stored: no room"):
        store.commit(state, "1")
    assert unseen.phase == "failed"
    gate.fail = lambda key: StoreFullError("no room") if key.startswith("commits/") else None
    with pytest.warns(UserWarning, match="'?lost'? was not committed: no room"):
        assert store.commit(state, "lost", on_full="warn") is None
    gate.fail = lambda key: None
    assert [commit.message for commit in store.list_commits()] == ["1", "0"]


def test_a_log_entry_that_fails_leaves_the_commit_standing(
    store: DeltaStore, gate: Gate, recwarn: pytest.WarningsRecorder
) -> None:
    state = {"w": torch.zeros(1000)}
    store.commit(state, "0")
    gate.fail = lambda key: StorageError("the disk is gone", "io") if key.startswith("refs/") else None
    warnings.simplefilter("always")
    pending = store.commit(state, "1", wait=False)
    assert pending.result(SECONDS).message == "1"
    assert "its log entry could not be written" in str(recwarn.pop(UserWarning).message)
    gate.fail = lambda key: None
    store.commit(state, "2", wait=False).result(SECONDS)
    entries = store._index.oplog()
    assert [entry.seq for entry in entries] == [1, 2, 3]
    assert all(store._bucket.get(f"refs/log/{e.epoch:06}/{0:09}/{e.seq:012}.json") == e.body for e in entries)


# -- other writers ----------------------------------------------------------------------------------------------------


def test_another_writer_meanwhile_rebases_both(store: DeltaStore, folder: Path, gate: Gate) -> None:
    model, expected = Model(), []
    store.commit(model, "first")
    gate.open.clear()
    pending = []
    for step in range(2):
        model.train_step(step)
        expected.append(content(model))
        pending.append(store.commit(model, f"step {step}", wait=False))
    with DeltaStore(folder) as other:
        elsewhere = other.commit(other.checkout("main").load(), "from elsewhere")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gate.open.set()
        commits = [each.result(SECONDS) for each in pending]
    assert ["another writer" in str(each.message) for each in caught] == [True]
    assert [commit.message for commit in store.list_commits()] == ["step 1", "step 0", "from elsewhere", "first"]
    assert [commit.parents for commit in commits] == [(elsewhere.id,), (commits[0].id,)]
    for commit, values in zip(commits, expected, strict=True):
        assert {name: raw(value) for name, value in store.checkout(commit.id).load().items()} == values
    assert store.verify(read_data=True)


def test_a_branch_that_was_reset_meanwhile_refuses_both(store: DeltaStore, folder: Path, gate: Gate) -> None:
    state = {"w": torch.zeros(1000)}
    ids = [store.commit(state, str(step)).id for step in range(3)]
    gate.open.clear()
    pending = [store.commit(state, "late", wait=False), store.commit(state, "later", wait=False)]
    with DeltaStore(folder) as other:
        other.reset_branch("main", revision=ids[0])
    gate.open.set()
    for each in pending:
        with pytest.raises(RefConflictError) as caught:
            each.result(SECONDS)
        assert (caught.value.name, caught.value.expected, caught.value.actual) == ("main", ids[2], ids[0])
    store.commit(state, "goes on", wait=False)
    assert [commit.message for commit in store.list_commits()] == ["goes on", "0"]
    assert store.verify(read_data=True)


def test_a_tag_that_exists_fails_the_commit(store: DeltaStore) -> None:
    store.commit({"w": torch.zeros(9)}, "0")
    first = store.commit({"w": torch.zeros(9)}, "1", tag="best", wait=False)
    second = store.commit({"w": torch.zeros(9)}, "2", tag="best", wait=False) if not first.done() else None
    assert first.result(SECONDS) == store.get_commit("best")
    if second is not None:
        with pytest.raises(AlreadyExistsError, match="best"):
            second.result(SECONDS)
    with pytest.raises(AlreadyExistsError, match="best"):
        store.commit({"w": torch.zeros(9)}, tag="best", wait=False)
    assert store.commit({"w": torch.zeros(9)}, "3").message == "3"


def test_an_expected_head_is_that_of_landed_commits(store: DeltaStore) -> None:
    state = {"w": torch.zeros(9)}
    head = store.commit(state, "0").id
    store.commit(state, "1", expected_head=head, wait=False)
    with pytest.raises(RefConflictError):
        store.commit(state, "2", expected_head=head, wait=False)
    assert store.commit(state, "2", expected_head=store.get_commit("main").id, wait=False).result(SECONDS).message == "2"


def test_branches_take_turns(store: DeltaStore) -> None:
    model, expected = Model(), dict[str, list[dict[str, bytes]]](a=[], b=[], c=[])
    for step in range(30):
        branch = "abc"[step % 3]
        model.train_step(step)
        expected[branch].append(content(model))
        if step % 7 == 6:
            store.commit(model, str(step // 3), branch=branch)
        else:
            store.commit(model, str(step // 3), branch=branch, wait=False)
    for branch, values in expected.items():
        assert_history(store, values, branch)


def test_many_threads_commit_to_branches_of_their_own(store: DeltaStore) -> None:
    def work(number: int) -> None:
        for step in range(5):
            store.commit({"w": torch.full((500,), 100.0 * number + step)}, str(step), branch=f"b{number}", wait=False)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for number in range(6):
        values = [store.checkout(f"b{number}~{back}")["w"][0].load().item() for back in range(5)]
        assert values == [100.0 * number + step for step in range(4, -1, -1)]
    assert store.verify(read_data=True)


# -- what can go wrong in the call -------------------------------------------------------------------------------------


def failing_stream(error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.randn(2_000_000)
    yield "b", torch.ones(5)
    raise error


def test_a_stream_is_read_in_the_call(store: DeltaStore) -> None:
    tensors = {name: torch.randn(5) for name in "abc"}
    seen = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            seen.append(name)
            yield name, tensor

    pending = store.commit(stream(), wait=False)
    assert seen == ["a", "b", "c"]
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    pending.result(SECONDS)
    assert same(store.checkout().load(), kept)


@pytest.mark.parametrize("error", [ValueError("no more"), KeyboardInterrupt()])
def test_a_call_that_fails_leaves_nothing_behind(store: DeltaStore, error: BaseException) -> None:
    threads = threading.active_count()
    store.commit({"a": torch.ones(2_000_000), "b": torch.ones(5)}, "0")
    for wait in (False, True):
        with pytest.raises(type(error)):
            store.commit(failing_stream(error), wait=wait)
        assert len(store.list_refs()) == 1  # waits
        for thread in threading.enumerate():
            if thread.name.startswith("deltastore"):
                thread.join(SECONDS)
        assert threading.active_count() == threads
    with pytest.raises(IncompatibleStateError):
        store.commit({"x": object()}, wait=False)
    assert [commit.message for commit in store.list_commits()] == ["0"]
    after = {"a": torch.full((2_000_000,), 3.0), "b": torch.ones(5)}
    store.commit(after, "1", wait=False).result(SECONDS)
    assert same(store.checkout().load(), after)
    assert store.verify(read_data=True)


def test_a_clock_that_is_set_back(store: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(["2031-01-01T00:00:00.000000Z", "2030-01-01T00:00:00.000000Z", "2029-01-01T00:00:00.000000Z"])
    monkeypatch.setattr(deltastore.publisher.canonical, "utc_now", lambda: next(times))
    for step in range(3):
        store.commit({"w": torch.full((9,), float(step))}, str(step), metadata={"step": step}, wait=False)
    assert [commit.message for commit in store.list_commits()] == ["2", "1", "0"]
    assert [commit.created_at.year for commit in store.list_commits()] == [2029, 2030, 2031]
    assert store.checkout("main~1")["w"][0].load().item() == 1.0
    assert store.checkout("main@{step=0}")["w"][0].load().item() == 0.0
    assert store.verify(read_data=True)


def test_a_closed_store_takes_no_commits(folder: Path) -> None:
    store = DeltaStore.create(folder)
    pending = store.commit({"w": torch.ones(4)}, "last", wait=False)
    store.close()
    assert pending.phase == "visible"
    assert pending.result().message == "last"
    with pytest.raises(DeltaStoreError, match="closed"):
        store.commit({"w": torch.ones(4)}, wait=False)
    with DeltaStore(folder) as again:
        assert again.get_commit().message == "last"
