"""`stats`, `du`, `cache`, `diff --stat` and `--plot` on the command line."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from command_line import ROOT, Run, run_process

from deltastore import DeltaStore
from deltastore.cache_folder import entry_folder, lock_entry

UUID = "8f14e45f-ceea-467f-a8b6-0d3f6c6f2b1a"
FORECAST = {"free_bytes", "sampled_commits", "commit_bytes", "commits_left"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELTASTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASTORE_CACHE_MAX_BYTES", raising=False)
    return tmp_path / "cache"


def on_terminal(width: int, *arguments: object) -> list[str]:
    """Lines that a command prints on a terminal of this width."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, width))
    line = [sys.executable, "-W", "error", "-m", "deltastore", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(line, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 1 << 16):
                text += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0, text.decode()
    return text.decode().splitlines()


# -- stats and du -----------------------------------------------------------------------------------------------------


def test_stats_tell_the_forecast(run: Run) -> None:
    document = run("stats", "--json").json
    assert document["forecast"].keys() == FORECAST
    assert document["forecast"]["sampled_commits"] == 2
    assert document["forecast"]["commits_left"] > 0
    rows = dict(row[:2] for row in run("stats").rows if len(row) == 2)
    assert rows["commit_bytes"] == str(document["forecast"]["commit_bytes"])
    assert rows["sampled_commits"] == "2"


def test_du_of_refs(run: Run) -> None:
    document = run("du", "--json").json
    assert [(each["kind"], each["name"], each["commits"]) for each in document["parts"]] == [
        ("branch", "main", 3),
        ("tag", "v1", 2),
    ]
    assert document["forecast"].keys() == FORECAST
    assert document["total_bytes"] == document["parts"][0]["stored_bytes"]
    rows = run("du").rows
    main = document["parts"][0]
    sizes = [str(main[field]) for field in ("logical_bytes", "stored_bytes", "unique_bytes")]
    assert rows[0] == ["branch", "main", "3", *sizes, ""]
    assert run("du", "-q").out.split() == ["main", "v1"]
    run("branch", "reset", "main", "v1", "--yes")
    assert run("du").rows[-1][:3] == ["unreachable", "", "1"]
    assert run("du", "-q").out.split() == ["main", "v1"]


def test_du_of_commits(run: Run, ids: list[str]) -> None:
    parts = run("du", "main", "--json").json["parts"]
    assert [each["name"] for each in parts] == ids[::-1]
    assert all(each["added_bytes"] >= each["unique_bytes"] > 0 for each in parts)
    assert run("du", "main", "v1", "-q", "-n", "1").out.split() == [ids[2], ids[1]]
    assert [row[:3] for row in run("du", "v1").rows] == [["commit", id_, "1"] for id_ in (ids[1], ids[0])]
    assert run("du", "nowhere").code == 10
    assert run("du", "-n", "3").code == 2


@pytest.mark.parametrize("width", [60, 120])
def test_on_a_terminal(folder: Path, ids: list[str], width: int) -> None:
    commits = on_terminal(width, "-s", folder, "du", "main")
    assert commits[0].split() == ["COMMIT", "LOGICAL", "STORED", "UNIQUE", "ADDED", "MESSAGE"]
    assert commits[1].startswith(ids[2][:12])
    assert max(map(len, commits[:4])) <= max(width, 66)
    assert commits[-2].startswith("the store takes ")
    assert re.fullmatch(r".* free: full in .* of .*, the mean of the last 2 commits", commits[-1])
    stat = on_terminal(width, "-s", folder, "diff", "main~1", "main", "--stat")
    assert re.search("█{8,}$", stat[1])
    assert len(stat[1]) <= width
    assert stat[-1].startswith("1 tensor changed")


def test_an_empty_store(tmp_path: Path, run: Run) -> None:
    DeltaStore.create(tmp_path / "empty").close()
    assert run("-s", tmp_path / "empty", "du").out == ""
    assert run("-s", tmp_path / "empty", "stats", "--json").json["forecast"]["commits_left"] is None
    assert on_terminal(80, "-s", tmp_path / "empty", "du")[0] == "the store takes 0 B"


# -- diff --stat ------------------------------------------------------------------------------------------------------


def test_layers_of_a_difference(run: Run) -> None:
    document = run("diff", "main~1", "main", "--stat", "--json").json
    assert document["layers"] == [
        {"name": "embed", "changed_elements": 5, "elements": 30000, "changed_bytes": 120000, "tensors": 1}
    ]
    assert document["totals"]["changed_elements"] == 5
    assert run("diff", "main~1", "main", "--stat", "-q").out == "embed\n"
    assert run("diff", "main~1", "main", "--stat", "--depth", "2").rows[0][0] == "embed"
    assert run("diff", "main~1", "main", "--depth", "2").code == 2
    assert run("diff", "main~1", "main", "--stat", "--exit-code").code == 20


def test_bars_without_unicode(folder: Path) -> None:
    process = run_process("-s", folder, "diff", "main~1", "main", "--stat", env={"PYTHONIOENCODING": "ascii"})
    assert process.code == 0
    assert process.out == "embed\t5\t30000\t120000\t1\n"


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_pictures(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = run("show", "v1", "--plot", tmp_path / "show.png", "--json")
    assert shown.code == 0
    assert shown.json["message"].startswith("step 1")
    assert '"plot"' in shown.err
    assert (tmp_path / "show.png").read_bytes().startswith(b"\x89PNG")
    assert run("show", "main~2", "--plot", tmp_path / "first.svg").code == 0
    result = run("stats", "--plot", tmp_path / "stats.pdf")
    assert result.err == f"plot: wrote {tmp_path / 'stats.pdf'}\n"
    assert ["commits", "3"] in result.rows
    assert (tmp_path / "stats.pdf").read_bytes().startswith(b"%PDF")
    assert run("stats", "v1", "-n", "1", "--plot", tmp_path / "one.svg").code == 0


def test_a_picture_of_an_unknown_kind_is_refused_before_any_work(run: Run, tmp_path: Path) -> None:
    for line in (["show", "--plot", tmp_path / "a.gif"], ["stats", "--plot", tmp_path / "no" / "a.png"]):
        result = run("-s", tmp_path / "no store", *line)
        assert (result.code, result.out) == (2, "")
        assert "picture" in result.err or "does not exist" in result.err
    assert run("stats", "main").code == 2
    assert run("stats", "-n", "3").code == 2


def test_commands_without_a_picture_import_no_matplotlib(folder: Path) -> None:
    for line in (["show"], ["stats"], ["log", "--graph"]):
        done = run_process("-s", folder, *line, env={"PYTHONPROFILEIMPORTTIME": "1"})
        modules = {part.rpartition("|")[2].strip() for part in done.err.splitlines()}
        assert "deltastore.store" in modules
        assert not {"matplotlib", "torch", "alembic"} & modules
    assert not {"numpy", "pydantic"} & modules  # of log --graph


# -- cache ------------------------------------------------------------------------------------------------------------


def make(root: Path, name: str, kind: str = "baseline") -> Path:
    folder = entry_folder(root, UUID, kind, name)
    with lock_entry(folder) or pytest.fail("in use"):
        (folder / "data").write_bytes(b"x" * 100_000)
    return folder


def test_cache_list(run: Run, cache: Path, tmp_path: Path) -> None:
    assert run("cache").out == ""
    assert run("cache", "--json").json == {"folder": str(cache), "bytes": 0, "locks": True, "entries": []}
    folder = make(cache, "main")
    document = run("cache", "list", "--json").json
    assert document["bytes"] == document["entries"][0]["bytes"] >= 100_000
    assert document["entries"][0].items() >= {"store": UUID, "kind": "baseline", "name": "main", "in_use": False}.items()
    assert run("cache", "list").rows[0][:3] == [UUID, "baseline", "main"]
    assert run("cache", "-q").out == f"{folder}\n"
    assert run("cache", "list", "--cache-dir", tmp_path / "other").out == ""
    assert run("cache", "--cache-dir", tmp_path / "other").out == ""
    with lock_entry(folder) or pytest.fail("in use"):
        assert run("cache").rows[0][-1] == "yes"
    lines = on_terminal(80, "cache")
    assert all(len(line) <= 80 for line in lines[:-1])
    assert lines[-1].startswith(f"{cache}: 1 entry, ")


def test_cache_prune(run: Run, cache: Path) -> None:
    folder, other = make(cache, "main"), make(cache, "two", "spool")
    assert "deleted 0 entries" in run("cache", "prune", "--yes").out  # used lately
    for line in (["prune", "--all"], ["prune", "--older-than", "0s"], ["cap", "1"]):
        refused = run("cache", *line)
        assert refused.code == 2
        assert "--yes" in refused.err
        assert f"{UUID}/baseline/main" in refused.err
    dry = run("cache", "prune", "--all", "--dry-run", "--json").json
    assert dry["dry_run"] is True
    assert len(dry["deleted"]) == 2
    assert folder.exists()
    with lock_entry(other) or pytest.fail("in use"):
        done = run("cache", "prune", "--all", "--yes", "--json").json
        assert [each["name"] for each in done["deleted"]] == ["main"]
        assert [each["name"] for each in done["kept_in_use"]] == ["two"]
        assert done["bytes_freed"] > 0
        assert "kept 1 entry in use" in run("cache", "prune", "--all", "--yes").out
    assert (folder.exists(), other.exists()) == (False, True)
    assert run("cache", "prune", "--all", "--yes", "-q").out == f"{other}\n"
    for text in ("7", "soon", "-1d"):
        assert run("cache", "prune", "--older-than", text).code == 2


def test_cache_cap(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make(cache, "old"), make(cache, "new")
    os.utime(old / "data", (1, 1))
    os.utime(old / "lock", (1, 1))
    assert run("cache", "cap").code == 2
    assert run("cache", "cap", "many").code == 2
    assert "deleted 0 entries" in run("cache", "cap", "1GB").out
    monkeypatch.setenv("DELTASTORE_CACHE_MAX_BYTES", "150kB")
    assert run("cache", "cap", "--yes", "-q").out == f"{old}\n"
    assert new.exists()
    monkeypatch.setenv("DELTASTORE_CACHE_MAX_BYTES", "a lot")
    result = run("cache", "cap", "--yes")
    assert result.code == 2
    assert "DELTASTORE_CACHE_MAX_BYTES" in result.err


def test_no_locks(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(cache, "main")

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    document = run("cache", "--json").json
    assert (document["locks"], document["entries"][0]["in_use"]) == (False, True)
    result = run("cache", "prune", "--all", "--yes")
    assert "no locks" in result.err
    assert folder.exists()
