"""Victims of SIGKILL, and the checks of what they leave behind. Functions that tests call in forks of `child.py`."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kill_shim
from faulty import Faults, set_in
from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_store import commit_next, commit_step, copy_store, head_step, refs_of, refs_of_open

import deltastore.commit
import deltastore.reflog
from deltastore import DeltaStore
from deltastore.chunk_writer import ChunkWriter
from deltastore.errors import StoreNotFoundError
from deltastore.options import LADDER_BASE
from deltastore.pending import IN_FLIGHT, PendingCommit

SNAPSHOT_INTERVAL = 4  # log entries between two ref snapshots, in the scenario that makes one
SMALL_PACK_BYTES = 64  # packs that are sent while later chunks are still encoded


# -- scenarios --------------------------------------------------------------------------------------------------------


def _commit(folder: str) -> None:
    with DeltaStore(folder) as store:
        commit_next(store)


def _commit_in_small_packs(folder: str) -> None:
    set_in(deltastore.commit, "ChunkWriter", functools.partial(ChunkWriter, pack_bytes=SMALL_PACK_BYTES))
    _commit(folder)


def _commit_and_snapshot(folder: str) -> None:
    set_in(deltastore.reflog, "SNAPSHOT_INTERVAL", SNAPSHOT_INTERVAL)
    _commit(folder)


def _commit_two_in_the_background(folder: str) -> None:
    with DeltaStore(folder) as store:
        step = head_step(store)
        for next_step in (step + 1, step + 2):
            commit_step(store, next_step, wait=False)


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
    "two commits in the background": Scenario(_commit_two_in_the_background, LADDER_BASE - 1),
    "create": Scenario(_create, None),
    "create a branch": Scenario(_create_branch, 3),
    "reset a branch": Scenario(_reset_branch, 3),
    "delete a branch": Scenario(_delete_branch, 3),
}


# -- kills ------------------------------------------------------------------------------------------------------------


def _check(folder: str) -> list[str] | None:
    """Returns `refs_of` a store that was left by a fault; the next commit works, and all that is reachable is whole."""
    try:
        store = DeltaStore(folder)
        refs = refs_of_open(store)
    except StoreNotFoundError:
        store, refs = DeltaStore.create(folder), None
    with store:
        step = commit_next(store)
        history = [commit.metadata["step"] for commit in store.list_commits("main")]
        assert history == list(range(step, -1, -1)), f"a commit was lost or doubled: {history}"
        assert assert_exact(store, "main") == step
        report = store.verify(read_data=True)
        assert report, report.problems
        assert_log_dense(store)
    return refs


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
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM):
        return True
    assert os.WIFEXITED(status), f"the child died of signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == 0, "the child raised; see its traceback on standard error"
    return False


def list_operations(scenario: str, template: str) -> list[str]:
    """Labels of the bucket and SQL operations of a scenario, in order."""
    faults = Faults()
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = copy_store(template, work)
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
        kill_shim.arm(folder, number, mode)
        SCENARIOS[scenario].run(folder)

    return [_kill(template, victim, **moment) for moment in moments]


def list_calls(scenario: str, template: str) -> str:
    """The system calls of a scenario that change files below its store, a letter each: see `kill_shim.c`."""
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = copy_store(template, work)
        kill_shim.arm(folder, 0, "count")
        SCENARIOS[scenario].run(folder)
        return kill_shim.kinds()


def _kill(template: str, victim: Callable[..., None], *, whole: bool = True, **moment: Any) -> dict[str, Any]:
    """Returns whether the victim was killed, and the refs that it left, which are exact.

    `whole`: go on with the store that is left, and check all of it.
    """
    with tempfile.TemporaryDirectory(dir=Path(template).parent) as work:
        folder = copy_store(template, work)
        killed = _was_killed(_fork(lambda: victim(folder, **moment)))
        try:
            return {"killed": killed, "refs": _check(folder) if whole else refs_of(folder)}
        except Exception as error:
            error.add_note(f"after a kill at {moment}")
            raise


def random_kills(moments: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Kill a process that commits in a loop, again and again, each time at a random moment.

    Args:
        moments: of {"folder": of a new store, "kills": how often, "seed": of the random moments, "background": whether
            commits are on their way all the time}.
    """
    return [_random_kills(**each) for each in moments]


def _random_kills(folder: str, kills: int, seed: int, background: bool) -> dict[str, int]:
    chance = random.Random(seed)
    journal = Path(f"{folder}.journal")
    DeltaStore.create(folder).close()
    promised = 0
    longest = 0.2  # seconds that a victim lives at most; follows the speed of the machine
    for _ in range(kills):
        journal.write_text("")
        pid = _fork(lambda: _commit_for_ever(folder, journal, background))
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGTERM]))
        assert _was_killed(pid)
        returned = [int(line) for line in journal.read_text().split("\n")[:-1]]
        longest = min(3.0, max(0.05, longest * (1.5 if not returned else 1.1 if len(returned) < 2 else 0.9)))
        promised += len(returned)
        with DeltaStore(folder) as store:
            step = head_step(store)
            if step >= 0:
                assert assert_exact(store, "main") == step
            if returned:
                allowed = (0, 1, 2) if background else (0, 1)
                assert step - returned[-1] in allowed, f"commit() returned step {returned[-1]}, the head is step {step}"
            assert commit_next(store) == step + 1
            assert assert_exact(store, "main") == step + 1
    with DeltaStore(folder) as store:
        assert_all_exact(store)
        assert_log_dense(store)
        steps = [commit.metadata["step"] for commit in store.list_commits("main")]
    assert steps == list(range(len(steps) - 1, -1, -1)), "a commit was lost or doubled"
    return {"commits": len(steps), "promised": promised}


def _commit_for_ever(folder: str, journal: Path, background: bool) -> None:
    with DeltaStore(folder) as store, journal.open("a") as lines:
        step = head_step(store)
        pending: deque[PendingCommit] = deque()
        while True:
            step += 1
            if background:
                pending.append(commit_step(store, step, wait=False))
                if len(pending) <= IN_FLIGHT:
                    continue
                landed = pending.popleft().result()
            else:
                landed = commit_step(store, step)
            lines.write(f"{landed.metadata['step']}\n")
            lines.flush()


def random_interrupts(folder: str, interrupts: int, seed: int) -> dict[str, int]:
    """Ctrl-C at random moments of calls that commit in the background, all in one process, which goes on each time."""
    chance = random.Random(seed)
    armed = False

    def interrupt(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    longest = 0.05  # seconds; follows the speed of the machine
    interrupted = commits = 0
    with DeltaStore.create(folder) as store:
        while interrupted < interrupts:
            step = head_step(store)
            before, number = interrupted, 0
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, longest))
                for number in range(1, 20):
                    pending = commit_step(store, step + number, wait=False)
                    commits += 1
                pending.result()
            except KeyboardInterrupt:
                interrupted += 1
            except RuntimeError as error:  # `threading` was hit between two of its own steps (no lock of ours is concerned)
                if "unlocked lock" not in str(error):
                    raise
                interrupted += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            longest = min(1.0, longest * (0.9 if interrupted > before and number > 3 else 1.1))
            if step >= 0 or commits:
                found = head_step(store)
                assert found >= step
                if found >= 0:
                    assert assert_exact(store, "main") == found
        commit_next(store)
        assert_all_exact(store)
        assert_log_dense(store)
        steps = [commit.metadata["step"] for commit in store.list_commits("main")]
        assert steps == list(range(len(steps) - 1, -1, -1)), "a commit was lost or doubled"
    return {"commits": commits, "interrupted": interrupted}
