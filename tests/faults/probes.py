"""Functions that tests run in forks of `child.py`: victims of faults, and the checks of what these leave behind.

Arguments and results are JSON values.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import random
import resource
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
from typing import Any, NoReturn

import numpy as np
from faulty import Faults
from safetensors.numpy import save_file
from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_model import write_file

import deltastore.commit
import deltastore.reflog
from deltastore import DeltaStore
from deltastore.chunk_writer import ChunkWriter
from deltastore.errors import AlreadyExistsError, DeltaStoreError, RefConflictError, StoreFullError, StoreNotFoundError
from deltastore.history import Commit
from deltastore.options import LADDER_BASE

SNAPSHOT_INTERVAL = 4  # log entries between two ref snapshots, in the scenario that makes one
SMALL_PACK_BYTES = 64  # packs that are sent while later chunks are still encoded


def warm_up() -> None:
    """Do everything once, so that no fork has to import or compile it."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder, LADDER_BASE + 2)
        with DeltaStore(folder) as store:
            assert_all_exact(store)


def prepare(folder: str, commits: int) -> None:
    """A store with this many commits on `main`, and a branch at the first one if there is one."""
    with DeltaStore.create(folder) as store:
        for _ in range(commits):
            _commit_next(store)
        if commits:
            store.create_branch("spare", revision=f"main~{commits - 1}")


# -- scenarios --------------------------------------------------------------------------------------------------------


def _head(store: DeltaStore, branch: str = "main") -> int:
    """The step of a branch, -1 when there is none."""
    if all(ref.name != branch for ref in store.list_refs()):
        return -1
    return int(store.get_commit(branch).metadata["step"])


def _commit_next(store: DeltaStore, branch: str = "main") -> int:
    step = _head(store, branch) + 1
    commit_step(store, step, branch=branch)
    return step


def commit_step(store: DeltaStore, step: int, **options: Any) -> Commit:
    """Commit the tensors of a step, from a file: this process has no torch."""
    with tempfile.TemporaryDirectory(dir=Path(store.address).parent) as folder:
        return store.commit(write_file(Path(folder) / "model.safetensors", step), metadata={"step": step}, **options)


def _commit(folder: str) -> None:
    with DeltaStore(folder) as store:
        _commit_next(store)


def _commit_in_small_packs(folder: str) -> None:
    deltastore.commit.ChunkWriter = functools.partial(ChunkWriter, pack_bytes=SMALL_PACK_BYTES)  # type: ignore[misc,assignment]
    _commit(folder)


def _commit_and_snapshot(folder: str) -> None:
    deltastore.reflog.SNAPSHOT_INTERVAL = SNAPSHOT_INTERVAL
    _commit(folder)


def _create(folder: str) -> None:
    DeltaStore.create(folder).close()


def _create_branch(folder: str) -> None:
    with DeltaStore(folder) as store:
        store.create_branch("new", revision="main~1")


def _reset_branch(folder: str) -> None:
    with DeltaStore(folder) as store:
        store.reset_branch("spare", revision="main")


def _delete_branch(folder: str) -> None:
    with DeltaStore(folder) as store:
        store.delete_branch("spare")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that is done to a store of so many commits; `commits` None: there is no store yet."""

    run: Callable[[str], None]
    commits: int | None


SCENARIOS = {
    "commit": Scenario(_commit, 3),
    "first commit": Scenario(_commit, 0),
    "ladder commit": Scenario(_commit, LADDER_BASE),
    "commit in many packs": Scenario(_commit_in_small_packs, 0),
    "commit with a ref snapshot": Scenario(_commit_and_snapshot, SNAPSHOT_INTERVAL - 2),
    "create": Scenario(_create, None),
    "create a branch": Scenario(_create_branch, 3),
    "reset a branch": Scenario(_reset_branch, 3),
    "delete a branch": Scenario(_delete_branch, 3),
}


def _refs_of(store: DeltaStore) -> list[str]:
    """Every ref, the commit it names and its step; these versions are exact."""
    return [f"{ref.name} {ref.commit_id} {assert_exact(store, ref.name)}" for ref in store.list_refs()]


def refs_of(folder: str) -> list[str] | None:
    """See `_refs_of`; None when there is no store."""
    try:
        with DeltaStore(folder) as store:
            return _refs_of(store)
    except StoreNotFoundError:
        return None


def _check(folder: str) -> list[str] | None:
    """Returns `refs_of` a store that was left by a fault; the next commit works, and all that is reachable is whole."""
    try:
        store = DeltaStore(folder)
        refs = _refs_of(store)
    except StoreNotFoundError:
        store, refs = DeltaStore.create(folder), None
    with store:
        step = _commit_next(store)
        history = [commit.metadata["step"] for commit in store.list_commits("main")]
        assert history == list(range(step, -1, -1)), f"a commit was lost or doubled: {history}"
        assert assert_exact(store, "main") == step
        report = store.verify(read_data=True)
        assert report, report.problems
        assert_log_dense(store)
    return refs


# -- kills ------------------------------------------------------------------------------------------------------------


def _fork(function: Callable[[], None]) -> int:
    """Run a function in a child; returns its pid. Exit status 0: it returned, 1: it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return pid


def _was_killed(pid: int) -> bool:
    """Wait for a child that returned or was killed; anything else is an error."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.WIFEXITED(status), f"the child died of signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == 0, "the child raised; see its traceback on standard error"
    return False


def list_operations(scenario: str, template: str) -> list[str]:
    """Labels of the bucket and SQL operations of a scenario, in order."""
    faults = Faults()
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = _copy(template, work)
        with faults.installed():
            SCENARIOS[scenario].run(folder)
    return faults.labels


def kill_at_operations(scenario: str, template: str, moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kill a scenario before or after its n-th bucket or SQL operation, once for each of `moments`; see `_kill`.

    Args:
        moments: of {"number": n, "after": bool, "whole": bool}.
    """

    def victim(folder: str, number: int, after: bool) -> None:
        with Faults("kill", number, after=after).installed():
            SCENARIOS[scenario].run(folder)

    return [_kill(template, victim, **moment) for moment in moments]


def kill_at_calls(scenario: str, template: str, moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kill a scenario at its n-th system call that changes a file (needs the shim), once for each of `moments`.

    Args:
        moments: of {"number": n, "mode": "kill" before the call, or "torn" when half of its bytes are written}.
    """

    def victim(folder: str, number: int, mode: str) -> None:
        arm_shim(folder, number, mode)
        SCENARIOS[scenario].run(folder)

    return [_kill(template, victim, **moment) for moment in moments]


def arm_shim(folder: str, number: int, mode: str) -> None:
    """See `kill_shim.c`."""
    modes = {"count": 0, "kill": 1, "torn": 2, "full": 3, "broken": 4}
    ctypes.CDLL(None).kill_shim_arm(os.fsencode(os.path.realpath(folder)), ctypes.c_long(number), modes[mode])


def list_calls(scenario: str, template: str) -> str:
    """The system calls of a scenario that change files below its store, a letter each: see `kill_shim.c`."""
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = _copy(template, work)
        arm_shim(folder, 0, "count")
        SCENARIOS[scenario].run(folder)
        shim = ctypes.CDLL(None)
        shim.kill_shim_kinds.restype = ctypes.c_char_p
        kinds: bytes = shim.kill_shim_kinds()
    return kinds.decode()


def _kill(template: str, victim: Callable[..., None], *, whole: bool = True, **moment: Any) -> dict[str, Any]:
    """Returns whether the victim was killed, and the refs that it left, which are exact.

    `whole`: go on with the store that is left, and check all of it.
    """
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = _copy(template, work)
        killed = _was_killed(_fork(lambda: victim(folder, **moment)))
        try:
            return {"killed": killed, "refs": _check(folder) if whole else refs_of(folder)}
        except Exception as error:
            error.add_note(f"after a kill at {moment}")
            raise


def _copy(template: str, work: str) -> str:
    folder = str(Path(work) / "store")
    if Path(template).exists():
        shutil.copytree(template, folder)
    return folder


def random_kills(moments: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Kill a process that commits in a loop, again and again, each time at a random moment.

    Args:
        moments: of {"folder": of a new store, "kills": how often, "seed": of the random moments}.
    """
    return [_random_kills(**each) for each in moments]


def _random_kills(folder: str, kills: int, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    journal = Path(f"{folder}.journal")
    DeltaStore.create(folder).close()
    promised = 0
    longest = 0.2  # seconds that a victim lives at most; follows the speed of the machine
    for _ in range(kills):
        journal.write_text("")
        pid = _fork(lambda: _commit_for_ever(folder, journal))
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        assert _was_killed(pid)
        returned = [int(line) for line in journal.read_text().split("\n")[:-1]]
        longest = min(1.0, max(0.05, longest * (1.1 if len(returned) < 2 else 0.9)))
        promised += len(returned)
        with DeltaStore(folder) as store:
            step = _head(store)
            if step >= 0:
                assert assert_exact(store, "main") == step
            if returned:
                assert step - returned[-1] in (0, 1), f"commit() returned step {returned[-1]}, the head is step {step}"
            assert _commit_next(store) == step + 1
            assert assert_exact(store, "main") == step + 1
    with DeltaStore(folder) as store:
        assert_all_exact(store)
        assert_log_dense(store)
        steps = [commit.metadata["step"] for commit in store.list_commits("main")]
    assert steps == list(range(len(steps) - 1, -1, -1)), "a commit was lost or doubled"
    return {"commits": len(steps), "promised": promised}


def _commit_for_ever(folder: str, journal: Path) -> None:
    with DeltaStore(folder) as store, journal.open("a") as lines:
        while True:
            step = _commit_next(store)
            lines.write(f"{step}\n")
            lines.flush()


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
        return store._index.meta().store_uuid


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


# -- disks ------------------------------------------------------------------------------------------------------------


def commit_above_size_limit(folder: str) -> None:
    """No file may grow beyond 2 MiB: a commit of more is refused, and one of less works."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    prepare(folder, 3)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _noise(3 << 20) as path, DeltaStore(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
        for _ in range(2):
            _assert_refused_as_full(store, path)
            _commit_next(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        store.commit(path, branch="large", metadata={"step": 0})
        assert store.checkout("large")["noise"].nbytes == 3 << 20
        store.delete_branch("large")
        assert_all_exact(store)
        assert_log_dense(store)


def commit_on_a_small_file_system(mount_point: str) -> bool:
    """A file system of 2 MiB that fills up: the commit is refused, and works when there is room. False: can't mount."""
    Path(mount_point).mkdir()
    if not _mount_small(mount_point):
        return False
    folder = f"{mount_point}/store"
    prepare(folder, 3)
    filler = Path(mount_point) / "filler"
    with _noise(100_000) as path, DeltaStore(folder) as store:
        for room in (0, 4096, 65536):
            free = os.statvfs(mount_point)
            filler.write_bytes(bytes(free.f_bavail * free.f_frsize - room))
            _assert_refused_as_full(store, path)
            filler.unlink()
            _commit_next(store)
        assert_all_exact(store)
        assert_log_dense(store)
    return True


@contextlib.contextmanager
def _noise(size: int) -> Iterator[Path]:
    """A file with a tensor of so many bytes that don't compress."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({"noise": np.random.default_rng(1).integers(0, 256, size, np.uint8)}, path)
        yield path


def _assert_refused_as_full(store: DeltaStore, path: Path) -> None:
    refs = _refs_of(store)
    try:
        store.commit(path)
    except StoreFullError as error:
        assert store.address in str(error)
        assert _refs_of(store) == refs
        return
    raise AssertionError("a commit that can't fit was not refused")


def _mount_small(mount_point: str) -> bool:
    """Mount a file system that only this process sees: as root, or as root of a user namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_users = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
    user, group = os.getuid(), os.getgid()
    if libc.unshare(new_mounts) != 0:
        if libc.unshare(new_users | new_mounts) != 0:
            return False
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            return False
    recursive_private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: nothing of this is seen outside
    return bool(
        libc.mount(b"none", b"/", None, recursive_private, None) == 0
        and libc.mount(b"tmpfs", os.fsencode(mount_point), b"tmpfs", 0, b"size=2m") == 0
    )


def fail_at_calls(moments: list[dict[str, Any]]) -> list[str]:
    """Let a commit fail at its n-th system call that changes a file (needs the shim), once for each of `moments`.

    Args:
        moments: of {"template": a store, "number": n, "mode": "full" or "broken"}.

    Returns:
        For each "landed" or the type of the error, or both.
    """
    return [_fail_at_call(**each) for each in moments]


def _fail_at_call(template: str, number: int, mode: str) -> str:
    outcome = []
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = _copy(template, work)
        try:
            with DeltaStore(folder) as store, warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*log entry could not be written.*")
                before = _refs_of(store)
                arm_shim(folder, number, mode)
                try:
                    _commit_next(store)
                except DeltaStoreError as error:
                    outcome.append(type(error).__name__)
                finally:
                    arm_shim(folder, 0, "count")
                if _refs_of(store) != before:
                    outcome.insert(0, "landed")
                step = _commit_next(store)  # the same store, now that the disk works again
                assert assert_exact(store, "main") == step
                assert_all_exact(store)
                assert_log_dense(store)
        except Exception as error:
            error.add_note(f"after a disk that was {mode} from call {number} on: {outcome}")
            raise
    return ", ".join(outcome)
