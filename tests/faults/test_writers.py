"""Several writers on one store: nothing is lost, nothing is doubled, and who is refused is told so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_probes import commit_expecting, create_together, reset_main, write_many
from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_model import state_at
from tiny_store import prepare
from warm_process import WarmProcess

from deltastore import DeltaStore
from deltastore.errors import RefConflictError, StoreFencedError

COMMITS = 15


def soon() -> float:
    """A moment for processes to begin together."""
    return time.time() + 0.3


def test_two_processes_on_one_branch(warm: WarmProcess, work: Path) -> None:
    folder = work / "store"
    warm.call(prepare, folder=folder, commits=1)
    start = soon()
    writers = [
        {"folder": folder, "branch": "main", "first_step": first, "commits": COMMITS, "start": start} for first in (100, 200)
    ]
    results = warm.call_all(write_many, writers)
    with DeltaStore(folder) as store:
        history = store.list_commits("main")
        assert [commit.parents[0] for commit in history[:-1]] == [commit.id for commit in history[1:]]
        assert len(history) == 1 + 2 * COMMITS
        for result, first in zip(results, (100, 200), strict=True):
            mine = [commit.id for commit in reversed(history) if first <= commit.metadata["step"] < first + COMMITS]
            assert mine == result["ids"]  # in the order of their making, each once
        assert_all_exact(store)
        assert_log_dense(store)
    caught = [result["warnings"] for result in results]
    assert all(len(each) <= 1 for each in caught), "one warning for one other writer is enough"
    assert sum(map(len, caught)) >= 1, "the two never met"
    assert all("another writer" in text and "'main'" in text for each in caught for text in each)


def test_two_processes_that_expect_the_same_head(warm: WarmProcess, work: Path) -> None:
    folder = work / "store"
    warm.call(prepare, folder=folder, commits=1)
    with DeltaStore(folder) as store:
        for round_ in range(6):
            head = store.get_commit("main").id
            start = soon()
            results = warm.call_all(
                commit_expecting,
                [{"folder": folder, "head": head, "step": 10 * round_ + n, "start": start} for n in (1, 2)],
            )
            (winner,) = [result["won"] for result in results if "won" in result]
            assert store.get_commit("main").id == winner
            assert store.get_commit("main").parents == (head,)
            assert [each for each in results if "won" not in each] == [{"name": "main", "expected": head, "actual": winner}]
        assert_all_exact(store)
        assert_log_dense(store)


def test_different_branches_never_conflict(warm: WarmProcess, work: Path) -> None:
    folder = work / "store"
    warm.call(prepare, folder=folder, commits=1)
    start = soon()
    writers = [{"folder": folder, "branch": f"writer-{n}", "first_step": 100 * n, "commits": 5, "start": start} for n in range(4)]
    results = warm.call_all(write_many, writers)
    assert [result["warnings"] for result in results] == [[], [], [], []]
    with DeltaStore(folder) as store:
        for n, result in enumerate(results):
            assert [commit.id for commit in reversed(store.list_commits(f"writer-{n}"))] == result["ids"]
        assert_all_exact(store)
        assert_log_dense(store)


def interrupted_by(action: Any, step: int) -> Iterator[tuple[str, Any]]:
    """The tensors of a step as a stream, in the middle of which something else happens."""
    state = {name: value for name, value in state_at(step).items() if name != "note"}
    for number, (name, tensor) in enumerate(state.items()):
        if number == 2:
            action()
        yield name, tensor


def test_a_reset_during_a_commit_refuses_it(warm: WarmProcess, work: Path) -> None:
    folder = work / "store"
    warm.call(prepare, folder=folder, commits=3)
    with DeltaStore(folder) as store:
        head, target = store.get_commit("main").id, store.get_commit("main~1").id
        reset = interrupted_by(lambda: warm.call(reset_main, folder=folder, revision="main~1"), 7)
        with pytest.raises(RefConflictError) as caught:
            store.commit(reset, metadata={"step": 7})
        assert (caught.value.name, caught.value.expected, caught.value.actual) == ("main", head, target)
        assert store.get_commit("main").id == target
        store.commit(state_at(8), metadata={"step": 8})
        assert assert_exact(store, "main") == 8
        assert store.get_commit("main~1").id == target
        assert_all_exact(store)
        assert_log_dense(store)


def test_a_branch_deleted_during_a_commit_refuses_it(work: Path) -> None:
    folder = work / "store"
    with DeltaStore.create(folder) as store, DeltaStore(folder) as other:
        store.commit(state_at(0), metadata={"step": 0})
        store.create_branch("short", revision="main")
        with pytest.raises(RefConflictError, match="no such ref"):
            store.commit(interrupted_by(lambda: other.delete_branch("short"), 1), branch="short", metadata={"step": 1})
        assert [ref.name for ref in store.list_refs()] == ["main"]
        store.commit(state_at(2), metadata={"step": 2})
        assert_all_exact(store)
        assert_log_dense(store)


def test_a_commit_during_a_commit_becomes_its_parent(work: Path) -> None:
    folder = work / "store"
    with DeltaStore.create(folder) as store, DeltaStore(folder) as other:
        for step in range(6):  # heights 5 and 7 become 6 and 8: a ladder commit that was not encoded as one
            store.commit(state_at(step), metadata={"step": step})
        for step in (6, 8, 10):
            meanwhile = interrupted_by(lambda step=step: other.commit(state_at(step), metadata={"step": step}), step + 1)
            if step == 6:
                with pytest.warns(UserWarning, match="another writer"):
                    store.commit(meanwhile, metadata={"step": step + 1})
            else:
                store.commit(meanwhile, metadata={"step": step + 1})  # it was told once
        assert [commit.metadata["step"] for commit in store.list_commits("main")] == list(range(11, -1, -1))
        for step in range(12, 30):
            store.commit(state_at(step), metadata={"step": step})
        assert_all_exact(store)
        assert_log_dense(store)


def test_eight_processes_create_one_store(warm: WarmProcess, work: Path) -> None:
    folder = work / "store"
    start = soon()
    calls = [{"folder": folder, "number": n, "exist_ok": True, "start": start} for n in range(8)]
    identities = warm.call_all(create_together, calls)
    assert len(set(identities)) == 1
    assert identities[0]
    with DeltaStore(folder) as store:
        assert [ref.name for ref in store.list_refs()] == [f"writer-{n}" for n in range(8)]
        assert_all_exact(store)
        assert assert_log_dense(store) == 8
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".index")], "parts of an index were left"


def test_a_store_that_another_index_took_over(work: Path) -> None:
    folder = work / "store"
    with DeltaStore.create(folder) as store:
        for step in range(2):
            store.commit(state_at(step), metadata={"step": step})
        head = store.get_commit("main").id
        fence = folder / "epochs" / "000002.json"
        fence.write_bytes((folder / "epochs" / "000001.json").read_bytes().replace(b'"epoch":1', b'"epoch":2'))
        for _ in range(2):
            with pytest.raises(StoreFencedError, match=r"epochs/000002\.json"):
                store.create_branch("late")
            assert [ref.name for ref in store.list_refs()] == ["main"]
            with pytest.raises(StoreFencedError, match=r"epochs/000002\.json"):
                store.commit(state_at(2), metadata={"step": 2})
            assert store.get_commit("main").id == head
            assert assert_exact(store, "main") == 1
            assert assert_log_dense(store) == 2
        with pytest.raises(StoreFencedError):
            store.commit(state_at(2), branch="other", metadata={"step": 2})
        assert [ref.name for ref in store.list_refs()] == ["main"]
        fence.unlink()
        store.commit(state_at(2), metadata={"step": 2})
        assert assert_exact(store, "main") == 2
        assert_all_exact(store)
