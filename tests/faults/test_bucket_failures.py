"""An error at every operation of a commit: it surfaces, nothing has changed, and the same store goes on."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
from faulty import Faults
from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_model import state_at

from deltastore import DeltaStore
from deltastore.errors import StorageError

pytestmark = pytest.mark.filterwarnings("ignore:parameters that do not require gradients have changed")  # here they do


def commit(store: DeltaStore, step: int) -> None:
    store.commit(state_at(step), f"step {step}", metadata={"step": step})


def commit_with_fault(store: DeltaStore, step: int) -> tuple[StorageError | None, list[str]]:
    """Commit; returns what was raised, and the warnings."""
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            commit(store, step)
        except StorageError as raised:
            error = raised
    return error, [str(each.message) for each in caught]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_at_every_operation(after: bool, work: Path) -> None:
    faults = Faults("raise")
    only_warned = []
    with faults.installed(), DeltaStore.create(work / "store") as store:
        for step in range(7):
            commit(store, step)
        for number in itertools.count(1):
            step = assert_exact(store, "main") + 1
            head, entries = store.get_commit("main").id, store._index.meta().seq
            faults.rearm(number, after=after)
            error, caught = commit_with_fault(store, step)
            fired, labels = faults.fired, faults.labels
            faults.rearm(0)
            landed = store.get_commit("main").id != head
            assert store._index.meta().seq == entries + landed
            assert assert_exact(store, "main") == step - 1 + landed
            if error is not None:
                assert error.kind == "injected"
                assert not landed, f"the commit landed, yet commit() raised {error}"
                assert not caught
            else:
                assert landed
                assert [text for text in caught if "log entry could not be written" not in text] == []
                assert len(caught) == fired
                only_warned += [labels[number - 1]] if fired else []
            commit(store, step + landed)  # the same store, right away
            assert assert_exact(store, "main") == step + landed
            if number > len(labels):
                break
        assert number > 30
        assert any(label.startswith("put refs/log") for label in only_warned)
        assert any(label.startswith("copy refs/log") for label in only_warned)
        steps = [each.metadata["step"] for each in store.list_commits("main")]
        assert steps == list(range(steps[0], -1, -1))
        assert_all_exact(store)
        assert_log_dense(store)


def test_a_hole_in_the_log_is_filled_first(work: Path) -> None:
    faults = Faults("raise")
    with faults.installed(), DeltaStore.create(work / "store") as store:
        commit(store, 0)
        faults.rearm(1, only="copy refs/log")
        with pytest.warns(UserWarning, match="is committed, but its log entry could not be written"):
            commit(store, 1)
        assert assert_exact(store, "main") == 1
        assert not (work / "store" / "refs" / "log" / "000001" / "000000000" / "000000000002.json").exists()
        faults.rearm(1, only="copy refs/log")
        with pytest.raises(StorageError, match="injected"):
            commit(store, 2)  # not before the hole is filled
        assert assert_exact(store, "main") == 1
        faults.rearm(0)
        commit(store, 2)
        written = [label for label in faults.labels if label.startswith(("copy", "put packs"))]
        assert [label.split("/")[0] for label in written] == ["copy refs", "put packs", "copy refs"]
        assert_all_exact(store)
        assert assert_log_dense(store) == 3


def test_a_ref_moves_only_over_a_whole_log(work: Path) -> None:
    faults = Faults("raise")
    with faults.installed(), DeltaStore.create(work / "store") as store:
        commit(store, 0)
        faults.rearm(1, only="put refs/log")
        with pytest.warns(UserWarning, match="is committed, but its log entry could not be written"):
            store.create_branch("first", revision="main")
        faults.rearm(1, only="put refs/log")
        with pytest.raises(StorageError, match="injected"):
            store.create_branch("second", revision="main")
        assert [ref.name for ref in store.list_refs()] == ["first", "main"]
        faults.rearm(0)
        store.create_branch("second", revision="main")
        assert assert_log_dense(store) == 3


def test_an_error_in_the_middle_of_the_scan(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        for step in range(3):
            commit(store, step)
        head = store.get_commit("main").id
        for broken_at in range(6):
            state = state_at(20 + broken_at)
            del state["note"]

            def stream(broken_at: int = broken_at, state: dict[str, object] = state) -> object:
                for number, pair in enumerate(state.items()):
                    if number == broken_at:
                        raise OSError("the tensor is out of reach")
                    yield pair
                raise OSError("the end is out of reach")

            with pytest.raises(OSError, match="out of reach"):
                store.commit(stream(), metadata={"step": 20 + broken_at})
            assert store.get_commit("main").id == head
            assert assert_exact(store, "main") == 2
        commit(store, 3)  # the baseline has parts of six other states by now
        assert assert_exact(store, "main") == 3
        assert_all_exact(store)
        assert_log_dense(store)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_left_by_a_failed_commit_is_no_base(frozen: bool, work: Path) -> None:
    """The same tensors again after a failure: equal to the baseline, but not to the parent version."""
    faults = Faults("raise")
    with faults.installed(), DeltaStore.create(work / "store") as store:
        commit(store, 0)
        changed = state_at(1)
        if frozen:
            changed["frozen"].data += 1
        faults.rearm(1, only="put packs")
        with pytest.raises(StorageError, match="injected"):
            store.commit(changed)
        faults.rearm(0)
        again = store.commit(changed)
        state = store.checkout(again.id).state()
        assert all(state[name].equal(changed[name]) for name in changed if name != "note")
        store.commit(state_at(0), metadata={"step": 0})  # back again
        assert assert_exact(store, "main") == 0
        assert store.verify(read_data=True)
