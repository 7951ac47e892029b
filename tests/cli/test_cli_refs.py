"""Branches and tags."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import Run, start


def test_branches(run: Run, ids: list[str]) -> None:
    assert run("branch", "create", "exp/lr3", "main~1").code == 0
    assert run("branch", "create", "copy", "-q").out == ids[2] + "\n"
    assert run("branch").rows == [["copy", ids[2]], ["exp/lr3", ids[1]], ["main", ids[2]]]
    assert run("branch", "list", "-q").out.split() == ["copy", "exp/lr3", "main"]
    assert run("log", "exp/lr3", "-q").out.split() == ids[1::-1]
    deleted = run("branch", "delete", "exp/lr3", "--yes", "--json")
    assert deleted.json == {
        "action": "delete",
        "dry_run": False,
        "kind": "branch",
        "name": "exp/lr3",
        "was": ids[1],
        "commit": None,
    }
    assert f"branch create exp/lr3 {ids[1][:12]}" in deleted.err  # the plan says how to undo it
    assert run("--yes", "branch", "delete", "copy").code == 0
    assert run("branch", "-q").out == "main\n"


def test_tags(run: Run, ids: list[str]) -> None:
    assert run("tag", "create", "best", "main~2", "--json").json["commit"] == ids[0]
    assert run("tag").rows == [["best", ids[0]], ["v1", ids[1]]]
    assert run("tag", "create", "best").code == 2
    assert run("tag", "delete", "best", "--yes").code == 0
    assert run("tag", "list", "--json").json == [{"name": "v1", "kind": "tag", "commit": ids[1]}]


def test_reset(run: Run, ids: list[str]) -> None:
    conflict = run("branch", "reset", "main", "v1", "--expect", "main~1", "--yes")
    assert conflict.code == 11
    result = run("branch", "reset", "main", "v1", "--expect", ids[2][:10], "--yes", "--json")
    assert (result.code, result.json["was"], result.json["commit"]) == (0, ids[2], ids[1])
    assert ids[2][:12] in result.err
    assert ids[1][:12] in result.err
    assert run("log", "-q").out.split() == ids[1::-1]


@pytest.mark.parametrize(
    "line",
    [["branch", "delete", "main"], ["tag", "delete", "v1"], ["branch", "reset", "main", "v1"]],
)
class TestDestruction:
    """What takes something away shows its plan, and asks."""

    def test_without_a_terminal_it_is_refused(self, run: Run, ids: list[str], line: list[str]) -> None:
        before = run("branch").out + run("tag").out
        result = run(*line, typed="y\n")
        assert (result.code, result.out) == (2, "")
        assert result.err.index(line[2]) < result.err.index("--yes")
        assert run("branch").out + run("tag").out == before

    def test_dry_run_changes_nothing(self, run: Run, ids: list[str], line: list[str]) -> None:
        before = run("branch").out + run("tag").out
        result = run(*line, "--dry-run")
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith(f"would {line[1]} {line[0]} {line[2]} from {ids[1 if line[2] == 'v1' else 2][:12]}")
        assert run(*line, "--dry-run", "--json").json["dry_run"] is True
        assert run("branch").out + run("tag").out == before


def test_dry_run_of_create(run: Run) -> None:
    assert run("tag", "create", "new", "--dry-run").out.startswith("would create tag new at ")
    assert run("tag", "create", "v1", "--dry-run").code == 2
    assert run("tag", "create", "a..b", "--dry-run").code == 2
    assert run("tag", "-q").out == "v1\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["branch", "delete", "nope", "--yes"], 10),
        (["branch", "delete", "v1", "--yes"], 10),
        (["tag", "delete", "main", "--yes"], 10),
        (["branch", "reset", "v1", "main", "--yes"], 10),
        (["branch", "create", "x", "nope"], 10),
        (["branch", "create", "main"], 2),
        (["branch", "create", "v1"], 2),
        (["branch", "create", "-x"], 2),
        (["branch", "create", "0123456789"], 2),
        (["branch", "nope"], 2),
        (["tag", "create"], 2),
    ],
)
def test_refusals(run: Run, line: list[str], code: int) -> None:
    result = run(*line)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, ""), (b"n\n", 1, "v1\n")])
def test_a_terminal_is_asked(folder: Path, run: Run, terminal: tuple[int, int], answer: bytes, code: int, left: str) -> None:
    ours, theirs = terminal
    with start("-s", folder, "tag", "delete", "v1", stdin=theirs) as process:
        os.write(ours, answer)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"delete tag v1, now at" in err
    assert b"Go on? [y/N]" in err
    assert out.startswith(b"delete tag v1 from") == (code == 0)
    assert run("tag", "-q").out == left
