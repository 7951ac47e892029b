"""Several processes on one store, and forks of one that has a store open. Called in forks of `child.py`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from typing import Any, NoReturn

from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_store import commit_step

from deltastore import DeltaStore
from deltastore.errors import AlreadyExistsError, InvalidInputError, RefConflictError
from deltastore.pending import PendingCommit

# -- several writers --------------------------------------------------------------------------------------------------


def _wait_until(moment: float) -> None:
    """Processes that are told the same moment (seconds since the epoch) begin together."""
    time.sleep(max(0.0, moment - time.time()))


def write_many(folder: str, branch: str, first_step: int, commits: int, start: float) -> dict[str, list[str]]:
    """Commit many times to a branch; returns ids and warnings."""
    with DeltaStore(folder) as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _wait_until(start)
        ids = []
        for step in range(first_step, first_step + commits):
            ids.append(commit_step(store, step, branch=branch).id)
    return {"ids": ids, "warnings": [str(each.message) for each in caught]}


def commit_expecting(folder: str, head: str, step: int, start: float) -> dict[str, Any]:
    """Commit on top of one head only."""
    with DeltaStore(folder) as store:
        _wait_until(start)
        try:
            return {"won": commit_step(store, step, expected_head=head).id}
        except RefConflictError as error:
            return {"name": error.name, "expected": error.expected, "actual": error.actual}


def reset_main(folder: str, revision: str) -> None:
    """Move `main` from another process."""
    with DeltaStore(folder) as store:
        store.reset_branch("main", revision=revision)


def create_together(folder: str, number: int, exist_ok: bool, start: float) -> str:
    """Create or open the store and commit to a branch of one's own; returns the store's identity, "" when refused."""
    _wait_until(start)
    try:
        store = DeltaStore.create(folder, exist_ok=exist_ok)
    except AlreadyExistsError:
        return ""
    with store:
        commit_step(store, number, branch=f"writer-{number}")
        identity: str = store._index.meta().store_uuid
        return identity


# -- forks ------------------------------------------------------------------------------------------------------------


def fork_with_open_store(folder: str, child: str) -> None:
    """A parent with an open store forks; whatever the child does, both go on."""
    store = DeltaStore.create(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*another writer.*")
        for step in range(3):
            commit_step(store, step)
        for step in range(3, 6):
            pid = os.fork()
            if pid == 0:
                _in_fork(store, child, 1000 * step)
            commit_step(store, step)  # while the child is at work
            _await(pid)
            assert assert_exact(store, f"main@{{step={step}}}") == step
        commit_step(store, 6)
    assert_all_exact(store)
    store.close()
    with DeltaStore(folder) as again:
        commit_step(again, 7)
        assert_all_exact(again)
        assert_log_dense(again)
        steps = [commit.metadata["step"] for commit in again.list_commits("main")]
    assert [step for step in steps if step < 1000] == list(range(7, -1, -1))
    assert len(steps) == len(set(steps)) == (8 if child != "commit to main" else 14)


def fork_while_committing(folder: str, child: str, forks: int) -> int:
    """Fork while a thread commits, so that a child may get locks that nobody gives back; returns how many commits there were."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*")
    stop = threading.Event()
    errors: list[BaseException] = []
    step = 0

    def work() -> None:
        nonlocal step
        try:
            while not stop.is_set():
                step += 1
                commit_step(store, step)
        except BaseException as error:
            errors.append(error)

    with DeltaStore.create(folder) as store:
        commit_step(store, 0)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            for number in range(forks):
                time.sleep(0.003 * (number % 17))
                pid = os.fork()
                if pid == 0:
                    _in_fork(store, child, 1000 * (number + 1))
                _await(pid)
        finally:
            stop.set()
            thread.join()
        assert not errors, errors
        assert_all_exact(store)
        assert_log_dense(store)
        commits = len(store.list_commits("main"))
    assert commits > step
    return commits


def fork_with_pending_commits(folder: str, child: str, forks: int) -> int:
    """Fork right after commits in the background; the child has none of them; returns how many the parent had."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*")
    warnings.filterwarnings("ignore", ".*another writer.*")
    with DeltaStore.create(folder) as store:
        pending = [commit_step(store, 0, wait=False)]
        pending[0].result()
        for number in range(1, forks + 1):
            pending.append(commit_step(store, number, wait=False))
            pid = os.fork()
            if pid == 0:
                _assert_of_parent(pending[-1])
                _in_fork(store, child, 1000 * number)
            if number % 2:
                _await(pid)
            else:
                pending.append(commit_step(store, 500 + number, wait=False))  # while the child is at work
                _await(pid)
        commits = [each.result(60) for each in pending]
        assert all(each.phase == "visible" for each in pending)
        ids = [commit.id for commit in reversed(store.list_commits("main"))]
        assert [each for each in ids if each in {commit.id for commit in commits}] == [commit.id for commit in commits]
        assert_all_exact(store)
        assert_log_dense(store)
    return len(commits)


def _assert_of_parent(pending: PendingCommit) -> None:
    """A child can't wait for what its parent does, and says so at once."""
    try:
        try:
            pending.result()
        except InvalidInputError as error:
            assert "which this one was forked from" in str(error)  # noqa: PT017
        else:
            raise AssertionError("the parent's commit gave its result to the child")
        assert not pending.done()
        assert "PendingCommit" in repr(pending)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _await(pid: int, seconds: float = 20.0) -> None:
    """Wait for a child that must succeed, and soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
            return
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child was still at work after {seconds} s")


def _in_fork(store: DeltaStore, child: str, step: int) -> NoReturn:
    """What a forked child does with its parent's store."""
    if child == "os._exit":
        os._exit(0)
    if child == "sys.exit":
        sys.exit(0)
    if child == "close":
        store.close()
        sys.exit(0)
    status = 1
    faulthandler.dump_traceback_later(15, exit=False)
    try:
        if child == "read":
            assert_exact(store, "main")
        elif child == "commit to main":
            for number in range(2):
                commit_step(store, step + number)
        elif child == "commit in the background":
            mine = [commit_step(store, step + number, branch=f"child-{step}", wait=False) for number in range(3)]
            assert assert_exact(store, f"child-{step}") == step + 2
            assert [each.result().metadata["step"] for each in mine] == [step, step + 1, step + 2]
        elif child == "commit to a branch":
            for number in range(2):
                commit_step(store, step + number, branch=f"child-{step}")
            assert_exact(store, f"child-{step}")
        elif child == "open anew":
            with DeltaStore(store.address) as own:
                commit_step(own, step, branch=f"child-{step}")
                assert_exact(own, f"child-{step}")
        else:
            raise AssertionError(f"unknown: {child}")
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
