"""Commits in the background that fail: as if they had never been, and whoever made them is told, once."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moments import SECONDS, Moments
from pending_steps import in_thread, later, steps
from store_checks import assert_all_exact, assert_log_dense
from tiny_model import state_at

import deltastore.commit
import deltastore.encoder
import deltastore.workers
from deltastore import DeltaStore
from deltastore.buckets.base import Upload
from deltastore.chunk_writer import ChunkWriter
from deltastore.errors import (
    AlreadyExistsError,
    IncompatibleStateError,
    InvalidInputError,
    RefConflictError,
    StorageError,
    StoreFullError,
)
from deltastore.packs import PackEntry
from deltastore.pending import PendingCommit, PendingLine, take_untold
from deltastore.spool import Spool
from deltastore.workers import BACKGROUND_NICENESS, Workers, run_in_thread

ERRORS = [StorageError("the bucket is gone", "io"), TimeoutError("too slow")]


def fail_two(moments: Moments, store: DeltaStore, error: BaseException, **options: Any) -> list[PendingCommit]:
    """Steps 1 and 2 on their way, the first of which fails when both are scanned; returned when both have failed."""
    with moments.held("put packs", error) as arrived:
        pending = [later(store, step, **options) for step in (1, 2)]
        assert arrived.wait(SECONDS)
    assert store._committer is not None
    store._committer.settle()
    assert [each.phase for each in pending] == ["failed", "failed"]
    return pending


def assert_as_before(store: DeltaStore) -> None:
    """Step 0 and nothing else; the next commit works and is exact."""
    assert steps(store) == [0]
    later(store, 1).result()
    store.commit(state_at(2), metadata={"step": 2})
    later(store, 3)
    assert steps(store) == [0, 1, 2, 3]
    assert_all_exact(store)
    assert_log_dense(store)


def close_quietly(store: DeltaStore) -> None:
    """Nothing is left to be told."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.close()
    assert take_untold() == []


# -- who is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("told", ["result", "commit", "later", "close"])
def test_the_first_of_two_fails(told: str, error: BaseException, moments: Moments, work: Path) -> None:
    store = DeltaStore.create(work / "store")
    store.commit(state_at(0), metadata={"step": 0})
    first, second = fail_two(moments, store, error)
    assert repr(second) == "PendingCommit('step 2' to 'main', failed)"
    if told == "result":
        for each in (first, second, first):
            with pytest.raises(type(error), match=str(error)):
                each.result()
    elif told == "commit":
        with pytest.raises(type(error), match=str(error)):
            store.commit(state_at(1))
    elif told == "later":
        with pytest.raises(type(error), match=str(error)):
            later(store, 1)
    else:
        with pytest.raises(type(error), match=str(error)):
            store.close()
        store = DeltaStore(work / "store")
    assert_as_before(store)
    close_quietly(store)


def test_both_have_the_same_cause(moments: Moments, work: Path) -> None:
    error = StorageError("the bucket is gone", "io")
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        first, second = fail_two(moments, store, error)
        with pytest.raises(StorageError) as caught:
            first.result()
        assert caught.value is error
        with pytest.raises(StorageError) as caught:
            second.result()
        assert caught.value is not error, "two callers would share a traceback"
        assert caught.value.__cause__ is error
        assert_as_before(store)


def test_a_failure_while_the_scan_waits_for_the_encoder(moments: Moments, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DeltaStore.create(work / "store")
    store.commit(state_at(0), metadata={"step": 0})
    monkeypatch.setattr("deltastore.scanner.STAGING_BYTES", 1)
    failing = contextlib.ExitStack()
    arrived = failing.enter_context(moments.held("put packs", StorageError("the bucket is gone", "io")))
    first = later(store, 1)
    assert arrived.wait(SECONDS)
    thread, outcome = in_thread(lambda: later(store, 2))
    thread.join(0.2)
    assert thread.is_alive(), "there was room for it all"
    failing.close()
    thread.join(SECONDS)
    assert str(outcome[0]) == "the bucket is gone"
    assert first.phase == "failed"
    assert_as_before(store)
    close_quietly(store)


def test_a_failure_during_the_next_scan_is_told_by_it_alone(moments: Moments, work: Path) -> None:
    """The scan of the second is at work when the first fails: that call raises, or its commit has failed; no later one again."""
    store = DeltaStore.create(work / "store")
    store.commit(state_at(0), metadata={"step": 0})
    assert store._committer is not None
    committer = store._committer
    failing = contextlib.ExitStack()
    arrived = failing.enter_context(moments.held("put packs", StorageError("the bucket is gone", "io")))
    first = later(store, 1)

    def stream() -> Iterator[tuple[str, Any]]:
        tensors = {name: tensor for name, tensor in state_at(2).items() if name != "note"}
        yield from tensors.items()
        assert arrived.wait(SECONDS)
        failing.close()
        committer.settle()
        yield "more", tensors["weight"] + 1

    with pytest.raises(StorageError, match="the bucket is gone"):
        store.commit(stream(), wait=False).result()
    with contextlib.suppress(StorageError):  # told already, if the call was the one that raised
        first.result()
    assert first.phase == "failed"
    assert_as_before(store)
    close_quietly(store)


def test_a_call_that_fails_by_itself_tells_of_no_other_failure(moments: Moments, work: Path) -> None:
    store = DeltaStore.create(work / "store")
    store.commit(state_at(0), metadata={"step": 0})
    assert store._committer is not None
    committer = store._committer
    failing = contextlib.ExitStack()
    arrived = failing.enter_context(moments.held("put packs", StorageError("the bucket is gone", "io")))
    first = later(store, 1)

    def stream() -> Iterator[tuple[str, Any]]:
        assert arrived.wait(SECONDS)
        failing.close()
        committer.settle()
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        store.commit(stream(), wait=False)
    assert first.phase == "failed"
    with pytest.raises(StorageError, match="the bucket is gone"):
        store.commit(state_at(1), metadata={"step": 1})
    assert_as_before(store)
    close_quietly(store)


def test_the_store_is_full_and_a_warning_is_enough(moments: Moments, work: Path) -> None:
    store = DeltaStore.create(work / "store")
    store.commit(state_at(0), metadata={"step": 0})
    for tell in ("commit", "later", "close"):
        first, _ = fail_two(moments, store, StoreFullError("no room"), on_full="warn")
        with pytest.warns(UserWarning, match="an earlier commit could not be stored: no room"):  # noqa: PT031
            if tell == "commit":
                assert store.commit(state_at(0), metadata={"step": 0}) is not None
            elif tell == "later":
                later(store, 0).result()
            else:
                store.close()
        with pytest.raises(StoreFullError, match="no room"):
            first.result()
    with DeltaStore(work / "store") as store:
        fail_two(moments, store, StorageError("gone"), on_full="warn")
        with pytest.raises(StorageError, match="gone"):  # that is no full store
            store.commit(state_at(1))
        assert steps(store) == [0, 0, 0]
        assert_all_exact(store)


def test_an_error_in_the_with_block_comes_first(moments: Moments, work: Path) -> None:
    with pytest.warns(UserWarning, match="failed, too: the bucket is gone"), pytest.raises(ZeroDivisionError):  # noqa: PT031, SIM117
        with DeltaStore.create(work / "store") as store:
            store.commit(state_at(0), metadata={"step": 0})
            fail_two(moments, store, StorageError("the bucket is gone", "io"))
            raise ZeroDivisionError
    with DeltaStore(work / "store") as store:
        assert_as_before(store)


def test_a_failure_between_two_looks_is_not_lost() -> None:
    """It fails while the line is asked for failures: told now or the next time."""
    line = PendingLine()

    class FailsWhenAsked(PendingCommit):
        def done(self) -> bool:
            self.set_failed(StorageError("gone"))
            return super().done()

    for number in range(3):
        pending = FailsWhenAsked("main", f"{number}")
        line.add(pending)
        found = [line.take_failure(), line.take_failure()]
        assert [each is not None for each in found].count(True) == 1
    assert take_untold() == []


def test_a_failure_just_after_the_timeout_is_not_counted_as_told() -> None:
    pending = PendingCommit("main", "late")

    class Late:
        """A future that fails right after somebody gave up waiting for it."""

        def __init__(self, outcome: Any) -> None:
            self._outcome = outcome

        def result(self, timeout: float | None = None) -> Any:
            return self.exception(timeout)

        def exception(self, timeout: float | None = None) -> Any:
            if timeout is not None:
                pending.set_failed(StorageError("gone"))
                raise TimeoutError
            return self._outcome.exception()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._outcome, name)

    line = PendingLine()
    line.add(pending)
    pending._outcome = Late(pending._outcome)  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="still on its way"):
        pending.result(0.01)
    failure = line.take_failure()
    assert failure is not None
    assert str(failure[0]) == "gone"


def test_a_store_that_nobody_holds_any_more(moments: Moments, work: Path) -> None:
    """Its last commit fails when it is gone: at the end of the process somebody must be told."""

    def script() -> None:
        store = DeltaStore.create(work / "store")
        with moments.held("put packs", StorageError("the bucket is gone", "io")) as arrived:
            later(store, 0)
            assert arrived.wait(SECONDS)

    script()
    for thread in threading.enumerate():
        if thread.name.startswith("deltastore-commit"):
            thread.join(SECONDS)
    gc.collect()
    (pending,) = take_untold()
    assert repr(pending) == "PendingCommit('step 0' to 'main', failed)"


# -- where it fails ---------------------------------------------------------------------------------------------------


def test_an_error_while_encoding(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        with monkeypatch.context() as patch:

            def fail(*arguments: Any) -> None:
                raise MemoryError("no memory")

            patch.setattr(deltastore.encoder, "chunk_digest", fail)
            pending = [later(store, 1)]
            with contextlib.suppress(MemoryError):  # the first may have failed already
                pending.append(later(store, 2))
            for each in pending:
                with pytest.raises(MemoryError, match="no memory"):
                    each.result()
        assert_as_before(store)


@pytest.mark.slow
def test_an_error_at_every_operation(moments: Moments, work: Path) -> None:
    """Of the second half of a commit, up to the log entry, about which there is a warning: then the commit stands."""
    caller = threading.get_ident()
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        failed, warned = [], []
        untouched = 0
        for number in itertools.count():
            step = steps(store)[-1]
            labels: list[str] = []

            def act(label: str, number: int = number, labels: list[str] = labels) -> None:
                if threading.get_ident() != caller:
                    labels.append(label)
                    if len(labels) == number + 1:
                        raise StorageError(f"injected at {label}", "injected")

            moments.actions = [act]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pending = later(store, step + 1)
                assert store._committer is not None
                store._committer.settle()
            moments.actions = []
            landed = pending.phase == "visible"
            assert steps(store)[-1] == step + landed
            if landed:
                assert all("log entry could not be written" in str(each.message) for each in caught)
                warned += [labels[number]] if caught else []
            else:
                assert not caught
                with pytest.raises(StorageError, match="injected at"):
                    pending.result()
                failed.append(labels[number])
            untouched = untouched + 1 if len(labels) <= number else 0
            if untouched == 6:  # a commit after one that failed has more operations
                break
        assert any(label.startswith("put packs") for label in failed)
        assert any(label.startswith("sql INSERT INTO") for label in failed)
        assert "sql COMMIT" in failed
        assert warned
        found = steps(store)
        assert found == list(range(len(found)))
        assert_all_exact(store)
        assert_log_dense(store)


@pytest.mark.parametrize("error", [StorageError("injected", "io"), MemoryError("no memory"), OSError("odd")])
@pytest.mark.parametrize("wait", [True, False])
def test_the_log_entry_fails(wait: bool, error: BaseException, moments: Moments, work: Path) -> None:
    """After the commit point nothing makes a commit fail: a warning, and the next writer fills the hole."""
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        moments.fail("copy refs/log", error)
        with pytest.warns(UserWarning, match="is committed, but its log entry could not be written"):  # noqa: PT031
            if wait:
                store.commit(state_at(1), metadata={"step": 1})
            else:
                later(store, 1).result()
        assert steps(store) == [0, 1]
        later(store, 2)
        assert steps(store) == [0, 1, 2]
        assert_all_exact(store)
        assert assert_log_dense(store) == 3


@pytest.mark.parametrize("wait", [True, False])
def test_the_log_entry_fails_where_warnings_are_errors(wait: bool, moments: Moments, work: Path) -> None:
    """An error would mean that nothing has changed."""
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        moments.fail("copy refs/log", StorageError("injected", "io"))
        if wait:
            store.commit(state_at(1), metadata={"step": 1})
        else:
            later(store, 1).result()
        later(store, 2).result()  # fills the hole
        moments.fail("put refs/log", StorageError("injected", "io"))
        store.create_branch("other")
        assert steps(store, "other") == [0, 1, 2]
        store.create_tag("last")
        assert assert_log_dense(store) == 5


def test_a_hole_between_two_on_their_way(moments: Moments, work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        with pytest.warns(UserWarning, match="log entry could not be written"):  # noqa: PT031
            with moments.held("put packs") as arrived:
                pending = [later(store, step) for step in (1, 2)]
                assert arrived.wait(SECONDS)
                moments.fail("copy refs/log", StorageError("injected", "io"))
            assert [each.result().metadata["step"] for each in pending] == [1, 2]
        assert assert_log_dense(store) == 3


def test_a_tag_that_exists(moments: Moments, work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        first = store.commit(state_at(1), metadata={"step": 1}, tag="best", wait=False)
        assert store.create_tag("other").commit_id == first.result().id
        with pytest.raises(AlreadyExistsError):
            later(store, 2, tag="best")
        with moments.held("put packs") as arrived:
            pending = [later(store, step, tag="again") for step in (2, 3)]
            assert arrived.wait(SECONDS)
        assert pending[0].result().metadata["step"] == 2
        with pytest.raises(AlreadyExistsError, match="again"):
            pending[1].result()
        later(store, 3)
        assert steps(store) == [0, 1, 2, 3]
        assert_all_exact(store)
        assert_log_dense(store)


def test_a_branch_by_the_name_of_a_tag_on_its_way(moments: Moments, work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        with moments.held("put packs") as arrived:
            first = later(store, 0, tag="name")
            second = store.commit({"weight": state_at(1)["weight"]}, branch="name", wait=False)
            assert arrived.wait(SECONDS)
        assert first.result().metadata["step"] == 0
        with pytest.raises((AlreadyExistsError, InvalidInputError, RefConflictError), match="name"):
            second.result()
        assert [(ref.name, ref.kind) for ref in store.list_refs()] == [("main", "branch"), ("name", "tag")]
        later(store, 1)
        assert_all_exact(store)


# -- the branch moves -------------------------------------------------------------------------------------------------


def test_a_reset_meanwhile(moments: Moments, work: Path) -> None:
    with DeltaStore.create(work / "store") as store, DeltaStore(work / "store") as other:
        for step in range(3):
            store.commit(state_at(step), metadata={"step": step})
        with moments.held("put packs") as arrived:
            pending = [later(store, step) for step in (3, 4)]
            assert arrived.wait(SECONDS)
            other.reset_branch("main", revision="main~1")
        for each in pending:
            with pytest.raises(RefConflictError) as caught:
                each.result()
            assert caught.value.name == "main"
        assert steps(store) == [0, 1]
        later(store, 2)
        assert steps(store) == [0, 1, 2]
        assert_all_exact(store)
        assert_log_dense(store)


@pytest.mark.parametrize("before", [1, 6, pytest.param(62, marks=pytest.mark.slow)])
def test_another_writer_meanwhile(before: int, moments: Moments, work: Path) -> None:
    """Both that are on their way go on top of what came between, also across a ladder height."""
    with DeltaStore.create(work / "store") as store, DeltaStore(work / "store") as other:
        for step in range(before):
            later(store, step)
        store.get_commit()
        for round_ in range(3):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*another writer.*")
                step = before + 3 * round_
                with moments.held("put packs") as arrived:
                    pending = [later(store, each) for each in (step + 1, step + 2)]
                    assert arrived.wait(SECONDS)
                    moments.rest()  # only for those that come from now on
                    thread, outcome = in_thread(lambda step=step: other.commit(state_at(step), metadata={"step": step}))
                    thread.join(SECONDS)
                    assert outcome[0].metadata["step"] == step
                assert [each.result().metadata["step"] for each in pending] == [step + 1, step + 2]
        assert steps(store) == list(range(before + 9))
        later(store, before + 9)
        assert_all_exact(store)
        assert_log_dense(store)


def test_two_stores_on_one_folder(work: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*another writer.*")
        with DeltaStore.create(work / "store") as one, DeltaStore(work / "store") as two:
            pending = [later(store, 100 * number + step) for step in range(12) for number, store in ((1, one), (2, two))]
            ids = [each.result().id for each in pending]
            assert len(set(ids)) == 24
            assert {commit.id for commit in one.list_commits()} == set(ids)
            found = steps(two)
            assert [step for step in found if step < 200] == list(range(100, 112))
            assert [step for step in found if step >= 200] == list(range(200, 212))
            assert_all_exact(one)
            assert_log_dense(two)


# -- calls that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken_at", [0, 2, 5])
def test_a_stream_that_raises(broken_at: int, moments: Moments, work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})

        def stream() -> Iterator[tuple[str, Any]]:
            tensors = [(name, value) for name, value in state_at(9).items() if name != "note"]
            yield from tensors[:broken_at]
            raise OSError("out of reach")

        with pytest.raises(OSError, match="out of reach"):
            store.commit(stream(), wait=False)
        with moments.held("put packs") as arrived:
            before = later(store, 1)
            assert arrived.wait(SECONDS)
            with pytest.raises(OSError, match="out of reach"):
                store.commit(stream(), wait=False)
            behind, outcome = in_thread(lambda: later(store, 2))
        assert before.result().metadata["step"] == 1
        behind.join(SECONDS)
        assert outcome[0].result().metadata["step"] == 2
        assert steps(store) == [0, 1, 2]
        assert_all_exact(store)
        assert_log_dense(store)


def test_a_state_that_cannot_be_stored(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        with pytest.raises(IncompatibleStateError):
            store.commit({"weight": state_at(1)["weight"], "function": lambda: 0}, wait=False)
        with pytest.raises(InvalidInputError):
            store.commit(state_at(1), branch="no such name~", wait=False)
        assert_as_before(store)


@pytest.mark.parametrize("behind", [False, True])
def test_a_keyboard_interrupt_during_the_scan(behind: bool, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        if behind:
            later(store, 0)

        def interrupted(*arguments: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(deltastore.commit.Scanner, "_report", interrupted)  # on the thread of the caller
            with pytest.raises(KeyboardInterrupt):
                later(store, 1)
        assert steps(store) == [0] * (1 + behind)
        later(store, 1)
        assert steps(store) == [0] * (1 + behind) + [1]
        assert_all_exact(store)


@pytest.mark.timeout(120)
def test_no_more_threads(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a thread can't be started, the call fails and nothing waits for ever."""
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        start = threading.Thread.start
        alive = threading.active_count()
        for allowed in range(20):
            left = [None] * allowed

            def limited(thread: threading.Thread, left: list[None] = left) -> None:
                if not left:
                    raise RuntimeError("can't start new thread")
                left.pop()
                start(thread)

            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", limited)
                try:
                    later(store, 1).result(SECONDS)
                except RuntimeError as error:
                    assert str(error) == "can't start new thread"  # noqa: PT017
                else:
                    break
            assert steps(store) == [0]
        assert 2 <= allowed < 20
        assert steps(store) == [0, 1]
        assert threading.active_count() <= alive
        assert_all_exact(store)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_what_failed_leaves_no_trace_in_the_spool(work: Path) -> None:
    class Broken:
        def put(self, uploads: list[Upload]) -> None:
            del uploads
            released.wait(SECONDS)
            raise StorageError("gone")

    released = threading.Event()
    spool = Spool(work / "spool", 1 << 20)
    writer = ChunkWriter(Broken(), lambda *_: None, lambda _: None, pack_bytes=1, spool=spool)  # type: ignore[arg-type]
    for number in range(5):
        writer.add(PackEntry(bytes([number] * 32), bytes(16), 4, "raw@1", b"1234", 0, None))
    assert len(spool._held) == 3
    released.set()
    writer.finish()
    with pytest.raises(StorageError, match="gone"):
        writer.join()
    assert spool._held == {}


def test_threads_step_back_once() -> None:
    """Also those that a thread starts which has stepped back itself, and inherits that."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no priorities per thread")
    found: list[int] = []

    def look() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def nested() -> None:
        found.append(look())
        with Workers(1, "inner", background=True) as workers:
            found.append(workers.submit(look).result())

    run_in_thread(nested, "outer", background=True).join()
    expected = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + BACKGROUND_NICENESS)
    assert found == [expected, expected]


def test_an_adapter_is_based_on_the_commit_that_is_on_its_way(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        for step in range(3):
            base = later(store, step)
            adapter = store.commit(state_at(9), branch="adapter", base="main", wait=False)
            assert adapter.result().metadata["base"] == base.result().id


def test_a_tag_is_not_given_to_the_version_before_a_lost_one(moments: Moments, work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        for make in (store.create_tag, store.create_branch):
            first, second = fail_two(moments, store, StorageError("the bucket is gone", "io"))
            assert steps(store) == [0]  # looking tells nothing
            with pytest.raises(StorageError, match="the bucket is gone"):
                make("best", revision="main")
            assert first.phase == second.phase == "failed"
            assert [ref.name for ref in store.list_refs()] == ["main"]
        store.create_tag("best", revision="main")
        assert store.get_commit("best") == store.get_commit("main")
