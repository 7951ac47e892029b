"""Several processes on one index: races, forks, and deaths in the middle of a transaction."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing

from deltastore.index.index import Index


def id_of(number):
    return f"{number:064x}"


def check(path):
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_eight_processes_create_at_once(tmp_path, run_python):
    path = tmp_path / "new" / "index.sqlite"
    code = """
import deltastore.index.migrate
def work(number):
    with Index.create(sys.argv[1], store_uuid="u", format=1, epoch=1, created_at="2026") as index:
        index.open_session("writer", str(os.getpid()), 60)
        say(index.meta().store_uuid)
in_children(8, work)
"""
    assert run_python(code, path) == "u\n" * 8
    assert [each.name for each in path.parent.iterdir()] == ["index.sqlite"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(DISTINCT holder) FROM lease").fetchone() == (8,)


def test_two_processes_race_for_one_branch(index, run_python):
    code = """
def work(worker):
    conflicts = 0
    with Index.open(sys.argv[1]) as index:
        session = index.open_session("writer", f"worker {worker}", 60)
        for number in range(1000 * worker + 1, 1000 * worker + 16):
            index.register(session, [(f"commits/{number}", "commit", 1)])
            while True:
                ref = index.ref("main")
                head = ref and int(ref.commit_id, 16)
                if number == 1000 * worker + 1:  # both have seen that there is no branch
                    Path(f"{sys.argv[1]}.{worker}").touch()
                    while not Path(f"{sys.argv[1]}.{1 - worker}").exists():
                        time.sleep(0.001)
                try:
                    index.publish(publication(session, number, head))
                    break
                except RefConflictError as conflict:
                    assert conflict.expected != conflict.actual
                    conflicts += 1
    say(conflicts)
in_children(2, work)
"""
    conflicts = [int(line) for line in run_python(code, index.path).splitlines()]
    assert len(conflicts) == 2
    assert sum(conflicts) > 0
    history = index.first_parents(index.ref("main").commit_id)
    assert [record.seq for record in history] == list(range(30, 0, -1))
    assert [entry.seq for entry in index.oplog()] == list(range(1, 31))


def test_a_process_killed_inside_the_commit_leaves_the_old_state(index, commit, dump, start_python):
    commit(1, None)
    code = """
with Index.open(sys.argv[1]) as index:
    session = index.open_session("writer", "doomed", 60)
    index.register(session, [("commits/2", "commit", 1), ("packs/2", "pack", 1)])
    def hang(seq):  # called after the rows of the commit were written
        say("inside")
        time.sleep(60)
    index.publish(publication(session, 2, 1, own_keys=("commits/2", "packs/2"), body=hang,
                              edges=(("commits/2", "packs/2"),), dedup=((bytes(32), "packs/2", 0),)))
"""
    process = start_python(code, index.path)
    assert process.stdout.readline() == "inside\n"
    before = dump(index)  # the pending objects are there, the commit is not
    assert [row[1:4] for row in before["object"] if row[3] == "pending"] == [
        ("commits/2", "commit", "pending"),
        ("packs/2", "pack", "pending"),
    ]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert dump(index) == before
    assert index.ref("main").commit_id == id_of(1)
    started = time.monotonic()
    commit(3, 1)
    assert time.monotonic() - started < 30  # the dead hold no lock
    assert [entry.seq for entry in index.oplog()] == [1, 2]
    index.close()
    check(index.path)


FORK = """
path = sys.argv[1]
index = Index.create(path, store_uuid="u", format=1, epoch=1, created_at="2026")
def commit(number, parent):
    session = index.open_session("writer", str(os.getpid()), 60)
    index.register(session, [(f"commits/{number}", "commit", 1)])
    index.publish(publication(session, number, parent))
commit(1, None)
"""


def test_both_sides_of_a_fork_go_on(tmp_path, run_python):
    code = (
        FORK
        + """
child = os.fork()
if child == 0:
    inherited = index._database._engine.pool
    commit(2, 1)
    assert index._database._engine.pool is not inherited
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
commit(3, 2)
say([ref.commit_id[-1] for ref in index.refs()])
index.close()
"""
    )
    assert run_python(code, tmp_path / "index.sqlite") == "['3']\n"
    check(tmp_path / "index.sqlite")


def test_a_child_that_outlives_its_parent_meets_other_processes(tmp_path, run_python):
    code = (
        """
stranger = os.fork()  # before there is anything to inherit
if stranger == 0:
    while not Path(sys.argv[1] + ".go").exists():
        time.sleep(0.01)
    with Index.open(sys.argv[1]) as index:
        session = index.open_session("writer", "stranger", 60)
        index.register(session, [("commits/3", "commit", 1)])
        index.publish(publication(session, 3, 2))
    os._exit(0)
"""
        + FORK
        + """
parent = os.getpid()
if os.fork():
    index.close()
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
commit(2, 1)
Path(path + ".go").touch()
deadline = time.monotonic() + 30
while index.ref("main").commit_id != f"{3:064x}" and time.monotonic() < deadline:
    time.sleep(0.01)
commit(4, 3)
index.close()
say("done")
"""
    )
    assert run_python(code, tmp_path / "index.sqlite") == "done\n"
    check(tmp_path / "index.sqlite")
    with Index.open(tmp_path / "index.sqlite") as index:
        assert [entry.seq for entry in index.oplog()] == [1, 2, 3, 4]


def test_a_fork_while_a_thread_is_writing(tmp_path, run_python):
    code = (
        FORK
        + """
inside, leave = threading.Event(), threading.Event()
def slow(seq):
    inside.set()
    leave.wait(10)
    return b"slow"
def write():
    index.move_ref(RefMovement("side", "branch", "create", None, f"{1:064x}", slow))
thread = threading.Thread(target=write)
thread.start()
inside.wait(10)
child = os.fork()
if child == 0:
    assert [ref.name for ref in index.refs()] == ["main"]  # the old state, over a connection of its own
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
leave.set()
thread.join()
say([ref.name for ref in index.refs()])
index.close()
"""
    )
    assert run_python(code, tmp_path / "index.sqlite") == "['main', 'side']\n"
    check(tmp_path / "index.sqlite")
