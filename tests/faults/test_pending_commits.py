"""Commits in the background: each is what was there at its call, in the order of the calls, seen by its own store."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from live_model import LiveModel, stored_bits
from moments import SECONDS, Moments
from pending_steps import in_thread, later, steps
from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_model import state_at

import deltastore.commit
from deltastore import DeltaStore
from deltastore.buckets.base import Upload
from deltastore.buckets.folder import FolderBucket
from deltastore.chunk_writer import ChunkWriter
from deltastore.errors import InvalidInputError, RefConflictError
from deltastore.pending import PendingCommit
from deltastore.spool import Spool

# -- what is committed ------------------------------------------------------------------------------------------------

# The model here changes all of its tensors, also the one that it calls frozen.
pytestmark = pytest.mark.filterwarnings("ignore:parameters that do not require gradients have changed")


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["ram"])
def test_two_hundred_versions_of_a_model_that_changes_at_once(baseline: Literal["ram", "disk", "none"], work: Path) -> None:
    model = LiveModel(1, large=baseline != "none")
    turn = threading.Lock()
    changed = threading.Semaphore(0)
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            with turn:
                model.change()
            changed.release()

    expected = []
    with DeltaStore.create(work / "store", baseline=baseline, cache_dir=work / "cache", trust="none") as store:
        thread = threading.Thread(target=hammer)
        thread.start()
        try:
            for number in range(200):
                with turn:  # the other thread writes from the moment the call returns
                    bits = model.bits()
                    expected.append((bits, store.commit(model.state, f"{number}", wait=False)))
                for _ in range(2):
                    assert changed.acquire(timeout=SECONDS)
        finally:
            stop.set()
            thread.join()
        commits = [pending.result() for _, pending in expected]
        assert [commit.parents for commit in commits] == [(), *((commit.id,) for commit in commits[:-1])]
        assert [commit.message for commit in reversed(store.list_commits())] == [str(number) for number in range(200)]
        for commit, (bits, _) in zip(commits, expected, strict=True):
            assert stored_bits(store, commit.id) == bits, commit.message
        report = store.verify(read_data=True)
        assert report, report.problems
        assert_log_dense(store)


@pytest.mark.parametrize("baseline", ["ram", "disk", "none"])
def test_a_model_that_changes_at_once(baseline: Literal["ram", "disk", "none"], work: Path) -> None:
    model = LiveModel(2)
    expected: list[tuple[Any, PendingCommit]] = []
    with DeltaStore.create(work / "store", baseline=baseline, cache_dir=work / "cache", trust="none") as store:
        for number in range(20):
            bits = model.bits()
            expected.append((bits, store.commit(model.state, wait=False, branch=("main", "other")[number % 5 == 4])))
            model.change()
        for number, (bits, pending) in enumerate(expected):
            assert stored_bits(store, pending.result().id) == bits, f"commit {number}"
        assert store.verify(read_data=True)


def test_a_scan_that_waits_for_the_encoder(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is full after each chunk that has changed."""
    monkeypatch.setattr("deltastore.scanner.STAGING_BYTES", 1)
    model = LiveModel(3, large=True)
    expected = []
    with DeltaStore.create(work / "store", trust="none") as store:
        for _ in range(12):
            expected.append((model.bits(), store.commit(model.state, wait=False)))
            model.change()
        for bits, pending in expected:
            assert stored_bits(store, pending.result().id) == bits
        assert store.verify(read_data=True)


@pytest.mark.parametrize("max_spool", [0, 5000, 1 << 20])
def test_a_bucket_slower_than_the_encoder(max_spool: int, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs wait on disk while there is room, and then the encoder does."""
    held: list[int] = []
    hold, put = Spool.hold, FolderBucket.put

    def slow(bucket: FolderBucket, uploads: Sequence[Upload]) -> None:
        time.sleep(0.005)
        put(bucket, uploads)

    def recorded(spool: Spool, upload: Upload) -> Upload | None:
        found = hold(spool, upload)
        held.append(found is not None)
        return found

    monkeypatch.setattr(FolderBucket, "capabilities", replace(FolderBucket.capabilities, local=False))
    monkeypatch.setattr(deltastore.commit, "ChunkWriter", functools.partial(ChunkWriter, pack_bytes=64))
    monkeypatch.setattr(FolderBucket, "put", slow)
    monkeypatch.setattr(Spool, "hold", recorded)
    model = LiveModel(4)
    expected = []
    with DeltaStore.create(work / "store", cache_dir=work / "cache", max_spool=max_spool, trust="none") as store:
        for _ in range(12):
            expected.append((model.bits(), store.commit(model.state, wait=False)))
            model.change()
        for bits, pending in expected:
            assert stored_bits(store, pending.result().id) == bits
        assert store.verify(read_data=True)
        assert store._committer is not None
        assert store._committer._spool is not None
        assert store._committer._spool._held == {}
    assert any(held) == (max_spool > 0)


def test_a_mixture_of_waiting_and_not(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        for step in range(30):
            if step % 3 == 1:
                store.commit(state_at(step), metadata={"step": step})
            else:
                later(store, step)
        assert steps(store) == list(range(30))
        assert_all_exact(store)
        assert_log_dense(store)


def test_branches_alternate(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        store.create_branch("other")
        pending = [later(store, step, branch=("main", "other", "new")[step % 3]) for step in range(1, 31)]
        commits = {each.result().metadata["step"]: each.result() for each in pending}
        for step in range(4, 31):
            assert commits[step].parents == (commits[step - 3].id,)
        assert commits[3].parents == commits[1].parents != commits[2].parents == ()
        assert_all_exact(store)
        assert_log_dense(store)


def test_many_threads_at_once(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        threads = []
        for number in range(6):
            one = number % 2 == 0
            branch = "main" if one else f"thread-{number}"
            threads.append(
                in_thread(lambda n=number, b=branch: [later(store, 100 * n + each, branch=b).result for each in range(4)])
            )
        for thread, outcome in threads:
            thread.join()
            results = [result() for result in outcome[0]]
            assert [result.metadata["step"] % 100 for result in results] == list(range(4))
        assert len(steps(store)) == 12
        assert_all_exact(store)
        assert_log_dense(store)


def test_a_stream(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:

        def stream(step: int) -> Iterator[tuple[str, Any]]:
            for name, tensor in state_at(step).items():
                if name != "note":
                    yield name, tensor
                    if tensor.numel():
                        tensor.data.view(-1)[0] += 1  # it was taken

        for step in range(5):
            store.commit(stream(step), metadata={"step": step}, wait=False)
        assert steps(store) == list(range(5))
        assert_all_exact(store)


@pytest.mark.timeout(120)
def test_a_source_that_reads_from_the_same_store(work: Path) -> None:
    """What it reads are the commits before it; its own is not there yet, and nobody waits for it."""
    with DeltaStore.create(work / "store") as store:
        later(store, 0)

        def stream() -> Iterator[tuple[str, Any]]:
            found = store.checkout("main")
            assert found.commit.metadata["step"] == 0
            yield from found.load().items()

        store.commit(stream(), metadata={"step": 0}, wait=False)
        assert steps(store) == [0, 0]
        assert_all_exact(store)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("within", ["commit", "close"])
def test_a_commit_within_a_commit(within: str, wait: bool, work: Path) -> None:
    """As from a signal handler: an error, where waiting for oneself would never end."""
    with DeltaStore.create(work / "store") as store:
        later(store, 0)

        def stream() -> Iterator[tuple[str, Any]]:
            yield "weight", state_at(1)["weight"]
            if within == "commit":
                store.commit(state_at(2), wait=wait)
            else:
                assert store._committer is not None
                store._committer.close()

        with pytest.raises(InvalidInputError, match="in the middle of a commit"):
            store.commit(stream(), wait=wait)
        later(store, 1)
        assert steps(store) == [0, 1]
        assert_all_exact(store)


# -- order and state --------------------------------------------------------------------------------------------------


def test_two_are_on_their_way_and_a_third_waits(moments: Moments, work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        store.commit(state_at(0), metadata={"step": 0})
        with moments.held("put packs") as arrived:
            first = later(store, 1)
            second = later(store, 2)
            assert arrived.wait(SECONDS)
            assert (first.phase, second.phase) == ("encoded", "scanned")
            assert not first.done()
            assert not second.done()
            assert repr(first) == "PendingCommit('step 1' to 'main', encoded)"
            with pytest.raises(TimeoutError, match=r"'step 1' is still on its way after 0\.01 s"):
                first.result(0.01)
            thread, outcome = in_thread(lambda: later(store, 3))
            thread.join(0.3)
            assert thread.is_alive(), "a third commit did not wait"
        thread.join(SECONDS)
        (third,) = outcome
        assert first.done(), "the third call returned before the first had landed"
        assert [each.result(SECONDS).metadata["step"] for each in (first, second, third)] == [1, 2, 3]
        assert (third.phase, third.done()) == ("visible", True)
        assert repr(third) == "PendingCommit('step 3' to 'main', visible)"
        assert first.result() is first.result(0)
        assert steps(store) == [0, 1, 2, 3]
        assert_all_exact(store)


def test_the_store_sees_its_own_commits(work: Path) -> None:
    """C41: what follows an asynchronous save reads what was saved."""
    with DeltaStore.create(work / "store") as store:
        later(store, 0)
        assert store.checkout("main").commit.metadata["step"] == 0
        later(store, 1)
        assert [commit.metadata["step"] for commit in store.list_commits()] == [1, 0]
        later(store, 2)
        assert store.get_commit().metadata["step"] == 2
        pending = later(store, 3)
        assert store.create_tag("best").commit_id == pending.result(0).id
        pending = later(store, 4)
        assert store.create_branch("spare").commit_id == pending.result(0).id
        later(store, 5)
        assert "weight" in {each.name for each in store.diff("main~1", "main").tensors}
        later(store, 6)
        store.reset_branch("main", revision="main~1")
        assert steps(store) == list(range(6))
        later(store, 7, branch="short")
        store.delete_branch("short")
        later(store, 8)
        assert store.stats().commits == 9
        later(store, 9)
        assert store.verify().commits == 8
        later(store, 10, branch="last")
        assert "last" in {ref.name for ref in store.list_refs()}
        assert_all_exact(store)
        assert_log_dense(store)


def test_expected_head(work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        head = store.commit(state_at(0), metadata={"step": 0}).id
        first = later(store, 1, expected_head=head)
        with pytest.raises(RefConflictError) as caught:
            later(store, 2, expected_head=head)
        assert caught.value.actual == first.result(0).id
        second = later(store, 2, expected_head=first.result().id)
        assert second.result().parents == (first.result().id,)
        assert_all_exact(store)


def test_the_clock_is_set_back(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(f"2031-01-{30 - day:02}T00:00:00.000000Z" for day in range(30))
    monkeypatch.setattr("deltastore.canonical.utc_now", lambda: next(times))
    with DeltaStore.create(work / "store") as store:
        for step in range(12):
            later(store, step) if step % 3 else store.commit(state_at(step), metadata={"step": step})
        created = [commit.created_at for commit in store.list_commits()]
        assert created == sorted(created), "the clock was not set back"
        assert steps(store) == list(range(12))
        assert assert_exact(store, "main~1") == 10
        assert assert_exact(store, "main~11") == 0
        assert assert_exact(store, "main@{step=4}") == 4
        store.reset_branch("main", revision="main~2")
        later(store, 20)
        assert steps(store) == [*range(10), 20]
        assert_all_exact(store)
        assert_log_dense(store)
