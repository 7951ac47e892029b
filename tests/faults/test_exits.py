"""Scripts that end while commits are on their way: these land, and the script ends as it would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from store_checks import assert_all_exact, assert_exact, assert_log_dense
from tiny_store import commit_next, commit_step

from deltastore import DeltaStore

HERE = Path(__file__).parent
PREAMBLE = """
import os, signal, sys, threading, time
from tiny_store import commit_step
from deltastore import DeltaStore
from deltastore.buckets.folder import FolderBucket
from deltastore.errors import StorageError, StoreFullError

put = FolderBucket.put
error = None

def slow_put(bucket, uploads):  # so that commits are still on their way when the script ends
    time.sleep(0.1)
    if error is not None and any(upload.key.startswith("packs/") for upload in uploads):
        raise error
    put(bucket, uploads)

FolderBucket.put = slow_put
folder = sys.argv[1]
"""


def start(folder: Path, script: str, **environment: str) -> subprocess.Popen[str]:
    """A script in a process of its own."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def run(folder: Path, script: str, **environment: str) -> tuple[int, str]:
    """Run a script to its end; its exit code and what it wrote to standard error."""
    with start(folder, script, **environment) as process:
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def steps_left(folder: Path) -> list[int]:
    """The steps that are there, oldest first; all is whole, and the next process goes on."""
    with DeltaStore(folder) as store:
        if not store.list_refs():
            return []
        found = [commit.metadata["step"] for commit in reversed(store.list_commits())]
        assert commit_next(store) == found[-1] + 1
        assert_all_exact(store)
        assert_log_dense(store)
    return found


ENDS: Mapping[str, tuple[str, int, str]] = {  # the last lines of a script, its exit code, the last line on standard error
    "the end": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("raise ZeroDivisionError('of the script')", 1, "ZeroDivisionError: of the script"),
    "close": ("store.close()", 0, ""),
    "a with block": ("with store: pass", 0, ""),
    "an exception in a with block": ("with store: raise ZeroDivisionError('within')", 1, "ZeroDivisionError: within"),
    "a thread": ("threading.Thread(target=commit_step, args=(store, 2), kwargs={'wait': False}).start()", 0, ""),
    "del": ("del store", 0, ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_ends(end: str, work: Path) -> None:
    lines, code, last = ENDS[end]
    script = f"store = DeltaStore.create(folder)\nfor step in range(2): commit_step(store, step, wait=False)\n{lines}"
    found, errors = run(work / "store", script)
    assert (found, errors.strip().split("\n")[-1]) == (code, last)
    assert "deltastore" not in errors.replace(str(work), ""), errors
    assert steps_left(work / "store") == list(range(3 if end == "a thread" else 2))


@pytest.mark.parametrize("error", ["None", "StorageError('the bucket is gone', 'io')"])
def test_a_commit_of_an_exit_handler(error: str, work: Path) -> None:
    """Registered before the store's own handler, so called after it, when the process waits for no thread any more."""
    script = f"""
    import atexit
    def last():
        global error
        error = {error}
        commit_step(store, 1, message="the last one", wait=False)
    atexit.register(last)
    store = DeltaStore.create(folder)
    commit_step(store, 0, wait=False)
    """
    code, errors = run(work / "store", script)
    assert code == 0
    if error == "None":
        assert errors == ""
        assert steps_left(work / "store") == [0, 1]
    else:
        assert "PendingCommit('the last one' to 'main', failed): the bucket is gone" in errors
        assert steps_left(work / "store") == [0]


def test_a_process_of_multiprocessing_ends(work: Path) -> None:
    script = """
    import multiprocessing
    def work(folder):
        store = DeltaStore(folder)
        for step in range(2): commit_step(store, step, wait=False)
    DeltaStore.create(folder).close()
    process = multiprocessing.get_context("fork").Process(target=work, args=(folder,))
    process.start()
    process.join()
    sys.exit(process.exitcode)
    """
    assert run(work / "store", script) == (0, "")
    assert steps_left(work / "store") == [0, 1]


@pytest.mark.parametrize(
    ("end", "kept"), [("", True), ("", False), ("sys.exit(3)", False), ("raise ZeroDivisionError", True)], ids=str
)
def test_the_last_commit_fails(end: str, kept: bool, work: Path) -> None:
    script = f"""
    def work():
        global store, error
        opened = DeltaStore.create(folder)
        if {kept}: store = opened
        commit_step(opened, 0)
        error = StorageError("the bucket is gone", "io")
        commit_step(opened, 1, message="the last one", wait=False)
    work()
    {end}
    """
    code, errors = run(work / "store", script)
    assert code == {"": 0, "sys.exit(3)": 3}.get(end, 1)
    assert "PendingCommit('the last one' to 'main', failed): the bucket is gone" in errors
    assert errors.count("the bucket is gone") == 1
    assert steps_left(work / "store") == [0]


def test_a_full_store_is_told_at_the_end_as_well(work: Path) -> None:
    script = """
    store = DeltaStore.create(folder)
    commit_step(store, 0)
    error = StoreFullError("no room")
    commit_step(store, 1, wait=False, on_full="warn")
    """
    code, errors = run(work / "store", script)
    assert code == 0
    assert errors.count("no room") == 1
    assert steps_left(work / "store") == [0]


@pytest.mark.parametrize(("interrupts", "last"), [(1, ""), (1, "store.close()"), (3, "")])
def test_keyboard_interrupts_while_waiting_at_the_end(interrupts: int, last: str, work: Path) -> None:
    script = f"""
    store = DeltaStore.create(folder)
    commit_step(store, 0)
    arrived = threading.Event()
    def slower_put(bucket, uploads):
        arrived.set()
        time.sleep(1)
        put(bucket, uploads)
    FolderBucket.put = slower_put
    commit_step(store, 1, wait=False)
    arrived.wait()
    print("at the end", flush=True)
    {last}
    """
    with start(work / "store", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at the end\n"
        for _ in range(interrupts):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode in (0, 1, 130, -signal.SIGINT)
    assert steps_left(work / "store") in ([0], [0, 1])


def test_a_keyboard_interrupt_while_waiting_for_a_result(work: Path) -> None:
    script = """
    store = DeltaStore.create(folder)
    commit_step(store, 0)
    pending = commit_step(store, 1, wait=False)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    pending.result()
    """
    code, errors = run(work / "store", script)
    assert code in (0, -signal.SIGINT)
    assert code == 0 or errors.strip().endswith("KeyboardInterrupt")
    assert steps_left(work / "store") == [0, 1]


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="no users here")
def test_a_folder_that_one_may_only_read(work: Path) -> None:
    """Also one that belongs to somebody else: reading works, and writing says why it does not."""
    folder = work / "store"
    with DeltaStore.create(folder) as store:
        for step in range(2):
            commit_step(store, step)
    work.chmod(0o755)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    script = """
    from store_checks import assert_all_exact
    from deltastore.errors import DeltaStoreError, ReadOnlyError
    from tiny_store import write_file
    import tempfile
    from pathlib import Path
    with tempfile.TemporaryDirectory() as other, DeltaStore.create(other) as warm:  # nobody may import from root's Python
        for step in range(10): commit_step(warm, step, wait=step % 2 == 0)
        assert_all_exact(warm)
    if os.getuid() == 0: os.setuid(65534)
    with tempfile.TemporaryDirectory() as other:
        path = write_file(Path(other) / "model.safetensors", 2)
        with DeltaStore(folder, read_only=True) as store:
            assert_all_exact(store)
            for wait in (True, False):
                try:
                    store.commit(path, wait=wait)
                except ReadOnlyError:
                    pass
                else:
                    sys.exit("it was committed")
        for wait in (True, False):
            try:
                with DeltaStore(folder) as store:
                    store.commit(path, wait=wait)
            except DeltaStoreError as error:
                print(type(error).__name__, error)
            else:
                sys.exit("it was committed")
    """
    try:
        with start(folder, script, HOME=str(work / "nowhere")) as process:
            output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output.count(str(folder)) >= 2, output
    finally:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
    with DeltaStore(folder) as store:
        assert assert_exact(store, "main") == 1
