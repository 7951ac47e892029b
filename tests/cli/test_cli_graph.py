"""`log --graph`: the drawing itself, and the command."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from command_line import Run, start, write_checkpoint

from deltastore import DeltaStore
from deltastore.cli.graph import draw


def drawing(text: str) -> str:
    """Lines of a drawing with the ids of the commits, for a history like "D:A C:B B:A A"."""
    history = [
        (name, tuple(parents.split(",")) if parents else ())
        for name, _, parents in (each.partition(":") for each in text.split())
    ]
    names = iter(history)
    return "\n".join(f"{row}  {next(names)[0]}" if is_commit else row for row, is_commit in draw(history))


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("", ""),
        ("B:A A", "*  B\n*  A"),
        ("B:A", "*  B"),  # its parent is not listed
        ("D:A C:B B:A A", "*  D\n| *  C\n| *  B\n|/\n*  A"),
        ("M:C,D D:A C:B B:A A", "*  M\n|\\\n| *  D\n* |  C\n* |  B\n|/\n*  A"),
        ("M:A,B B:A A", "*  M\n|\\\n| *  B\n|/\n*  A"),
        ("O:A,B,C C:A B:A A", "*  O\n|\\\n|\\ \\\n| | *  C\n|_|/\n| *  B\n|/\n*  A"),
        ("x:X M:C,D D:A C:A X:A A", "*  x\n| *  M\n| |\\\n| | *  D\n| * |  C\n| |/\n* |  X\n|/\n*  A"),
        ("e:a d:b c:a b:a a", "*  e\n| *  d\n| | *  c\n|_|/\n| *  b\n|/\n*  a"),
        ("t:r s b:r r", "*  t\n| *  s\n|\n| *  b\n|/\n*  r"),  # s is a first commit; b has nothing to do with it
        ("s b:a a", "*  s\n\n*  b\n*  a"),
        ("a:r s:q r q", "*  a\n| *  s\n* |  r\n /\n*  q"),
    ],
)
def test_draw(history: str, expected: str) -> None:
    assert drawing(history) == expected


@pytest.mark.parametrize("seed", range(30))
def test_every_line_leads_from_child_to_parent(seed: int) -> None:
    """Follows the lanes through random histories, row by row, and finds exactly the edges that were drawn."""
    rng = random.Random(seed)
    count = 25
    parents = {n: tuple(rng.sample(range(max(0, n - 6), n), min(n, rng.choice([1, 1, 1, 2, 3])))) for n in range(1, count)}
    parents = {n: () if rng.random() < 0.1 else p for n, p in parents.items()} | {0: ()}
    history = [(str(n), tuple(map(str, parents[n]))) for n in reversed(range(count))]
    lanes: dict[int, set[str]] = {}  # column of a lane -> the children whose edges run in it
    found: set[tuple[str, str]] = set()
    commits = iter(history)
    current = ""
    rows = list(draw(history))
    for at, (row, is_commit) in enumerate(rows):
        if is_commit:
            current, its_parents = next(commits)
            column = row.index("*")
            found |= {(child, current) for child in lanes.pop(column, set())}
            if its_parents:
                lanes[column] = {current}
            assert {at for at, sign in enumerate(row) if sign == "|"} == lanes.keys() - {column}
            continue
        moved: dict[int, set[str]] = {}
        for place, sign in enumerate(row):
            if sign == "\\" and place - 1 in lanes:
                children = lanes[place - 1]
                opened = place - 1 == rows_column(rows, at)
                moved.setdefault(place + 1, set()).update({current} if opened else children)
            elif sign == "/":
                start_ = place + 1
                end = place - 1
                while end > 0 and row[end] == "|" and row[end - 1] == "_":
                    end -= 2
                moved.setdefault(end, set()).update(lanes[start_])
            elif sign == "|":
                moved.setdefault(place, set()).update(lanes.get(place, set()))
        lanes = moved
    assert found == {(child, parent) for child, its_parents in history for parent in its_parents}


def rows_column(rows: list[tuple[str, bool]], at: int) -> int:
    """The column of the commit above a connecting row."""
    while not rows[at][1]:
        at -= 1
    return rows[at][0].index("*")


@pytest.fixture
def branched(folder: Path, tmp_path: Path) -> Path:
    """`main` at step 2, and `side` with a step of its own after step 1."""
    with DeltaStore(folder) as store:
        store.create_branch("side", revision="main~1")
        store.commit(write_checkpoint(tmp_path / "checkpoint", 7), "seven \x1b[31m", branch="side")
    return folder


def test_the_command(branched: Path, run: Run, ids: list[str]) -> None:
    seven = run("log", "side", "-n1", "-q").out.strip()
    lines = [f"* {seven[:12]} (side) seven \\x1b[31m", f"| * {ids[2][:12]} (main) step 2", "|/"]
    lines += [f"* {ids[1][:12]} (tag: v1) step 1", f"* {ids[0][:12]} step 0"]
    assert run("log", "--graph", "--oneline").out.splitlines() == lines
    assert run("log", "--graph", "--oneline", "side", "main").out.splitlines() == lines
    assert run("log", "--graph", "--oneline", "-n", "2").out.splitlines() == lines[:3]
    assert run("log", "--graph", "--oneline", "main").out.splitlines() == [
        line.replace("| *", "*") for line in lines[1:] if line != "|/"
    ]
    assert run("log", "--graph", "-q").out.split() == [seven, *ids[::-1]]
    assert [each["id"] for each in run("log", "--graph", "--json").json] == [seven, *ids[::-1]]
    rows = run("log", "--graph").rows
    assert [row[0] for row in rows] == ["*", "| *", "|/", "*", "*"]
    assert rows[1][1] == ids[2]
    assert len(rows[1]) == 6
    result = run("log", "main", "side")
    assert (result.code, result.out) == (2, "")
    assert "--graph" in result.err
    assert run("log", "--graph", "nowhere").code == 10


def test_an_empty_store(tmp_path: Path, run: Run) -> None:
    DeltaStore.create(tmp_path / "empty").close()
    assert run("-s", tmp_path / "empty", "log", "--graph").out == ""


@pytest.mark.parametrize("width", [24, 100])
def test_lines_fit_the_terminal(branched: Path, terminal: tuple[int, int], width: int) -> None:
    import termios

    ours, theirs = terminal
    termios.tcsetwinsize(theirs, (40, width))
    with start("-s", branched, "log", "--graph", stdout=theirs, stderr=theirs) as process:
        process.wait(timeout=60)
    text = os.read(ours, 1 << 16).decode()
    lines = text.splitlines()
    assert len(lines) == 5
    assert all(len(line) <= width for line in lines)
    assert ("seven" in text) == (width == 100)
    assert lines[0].endswith("…") == (width == 24)
