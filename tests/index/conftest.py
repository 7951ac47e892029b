"""A small builder of commits, and real processes to run against one index."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from deltastore.index import tables
from deltastore.index.index import Index
from deltastore.index.records import Publication, Published

ROOT = Path(__file__).parents[2]
STORE = "8f14e45f-ceea-467f-a8b6-0d3f6c6f2b1a"
CREATED = "2026-01-01T00:00:00.000000Z"


def publication(session_id: str, number: int, parent: int | None, **changes: Any) -> Publication:
    """Commit `number` on top of commit `parent`, as the head of main, with nothing but a commit document."""
    key = f"commits/{number}"
    fields: dict[str, Any] = {
        "session_id": session_id,
        "write_id": f"write-{number}",
        "commit_id": f"{number:064x}",
        "parents": () if parent is None else (f"{parent:064x}",),
        "tree": "ab" * 32,
        "height": number,
        "message": f"commit {number}",
        "author": "someone",
        "created_at": "2026-01-01T00:00:00.000000Z",
        "metadata": {"step": f'{{"i":"{number}"}}'},
        "object_key": key,
        "own_keys": (key,),
        "reused_keys": (),
        "edges": (),
        "dedup": (),
        "ref": "main",
        "expected_head": None if parent is None else f"{parent:064x}",
        "body": b"entry %d" % number,
    }
    return Publication(**(fields | changes))


def in_children(count: int, work: Callable[[int], object]) -> None:
    """Call work(number) in that many forked processes, all let go at the same moment."""
    gate, let_go = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                os.close(let_go)
                os.read(gate, 1)
                work(number)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    os.close(let_go)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


def say(line: object) -> None:
    """Print in one system call, so that lines of several processes stay whole."""
    os.write(1, f"{line}\n".encode())


PREAMBLE = f"""
from __future__ import annotations
import os, sys, threading, time, traceback
from pathlib import Path
from typing import Any
from deltastore.errors import *
from deltastore.index.index import Index
from deltastore.index.records import Publication, RefMovement
{inspect.getsource(publication)}
{inspect.getsource(in_children)}
{inspect.getsource(say)}
"""


def start_python(code: str, *arguments: object, root: Path = ROOT) -> subprocess.Popen[str]:
    """Run code in a process of its own; `publication`, `in_children` and `Index` are there."""
    warnings = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")  # it has threads of NumPy when it forks
    command = [sys.executable, *warnings, "-c", PREAMBLE + code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_python(code: str, *arguments: object, root: Path = ROOT) -> str:
    """What such a process prints; it must succeed."""
    out, error = start_python(code, *arguments, root=root).communicate(timeout=60)
    assert error == ""
    return out


class Committer:
    """Registers and publishes commits in a session of its own."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.session_id = index.open_session("writer", "test", 3600)

    def __call__(
        self, number: int, parent: int | None, objects: tuple[tuple[str, Any, int], ...] = (), **changes: Any
    ) -> Published:
        """Publish commit `number`; it brings and needs `objects` besides its document."""
        key = f"commits/{number}"
        self.index.register(self.session_id, [(key, "commit", 100), *objects])
        own = [name for name, _, _ in objects]
        given = {"own_keys": (key, *own), "edges": tuple((key, name) for name in own)}
        return self.index.publish(publication(self.session_id, number, parent, **(given | changes)))


def dump(index: Index) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    with index._database.read() as connection:
        return {
            table.name: sorted((tuple(row) for row in connection.execute(select(table))), key=repr)
            for table in tables.metadata.sorted_tables
        }


@pytest.fixture(scope="session")
def empty_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an index without commits; making one takes longer than most tests."""
    path = tmp_path_factory.mktemp("empty") / "index.sqlite"
    Index.create(path, store_uuid=STORE, format=1, epoch=1, created_at=CREATED).close()
    return path


@pytest.fixture(params=["sqlite"])
def index(tmp_path: Path, empty_file: Path) -> Iterator[Index]:
    """An index without commits, of every kind of database that there is."""
    with Index.open(shutil.copy(empty_file, tmp_path / "index.sqlite")) as opened:
        yield opened


@pytest.fixture
def commit(index: Index) -> Committer:
    """Publishes commits in one session."""
    return Committer(index)


@pytest.fixture(name="dump")
def dump_fixture() -> Callable[[Index], dict[str, list[tuple[Any, ...]]]]:
    """Every row of every table."""
    return dump


@pytest.fixture(name="publication")
def publication_fixture() -> Callable[..., Publication]:
    """Builds a publication."""
    return publication


@pytest.fixture(name="run_python")
def run_python_fixture() -> Callable[..., str]:
    """Runs code in another process."""
    return run_python


@pytest.fixture(name="start_python")
def start_python_fixture() -> Callable[..., subprocess.Popen[str]]:
    """Starts code in another process."""
    return start_python
