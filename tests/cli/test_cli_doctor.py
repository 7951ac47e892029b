"""`doctor`: what is well, what is broken, and that it says what to do."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from command_line import ROOT, Run, run_command, run_process

import deltastore
import deltastore.space
from deltastore import DeltaStore
from deltastore.cli import doctor
from deltastore.codecs import kernel

PROBLEM, WARNING = "problems", "warnings"


def files(folder: Path) -> dict[str, bytes]:
    """All files but those of SQLite's shared memory, which every reader makes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def test_all_is_well(run: Run, folder: Path, ids: list[str]) -> None:
    before = files(folder)
    result = run("doctor", "--json")
    report = result.json
    assert (result.code, report["ok"], report[PROBLEM], result.err) == (0, True, [], "")
    assert report["deltastore"]["version"] == deltastore.__version__
    assert report["deltastore"]["sqlite"] == sqlite3.sqlite_version
    assert report["kernel"]["name"] == kernel.NAME
    assert set(report["extras"]) == {"torch", "plot"}
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_available"] is None or report["machine"]["memory_available"] > 1 << 20
    store = report["store"]
    assert (store["schema"], store["read_only"], store["newest_commit"]["id"]) == (store["expected_schema"], False, ids[2])
    assert store["free_bytes"] > 0
    assert files(folder) == before


def test_into_a_pipe(run: Run, folder: Path) -> None:
    result = run("doctor")
    rows = dict(result.rows)
    assert result.code == 0
    assert list(rows) == ["deltastore", "libraries", "kernel", "extras", "machine", "cache", "store"]
    assert str(folder) in rows["store"]
    assert run("doctor", "-q").code == 0


def test_without_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_command("doctor", "--json")
    assert (result.code, result.json["store"]) == (0, None)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    place = tmp_path / "nowhere"
    result = run_command("doctor", "--json", "-s", place)
    assert (result.code, result.json["ok"]) == (1, False)
    assert "deltastore init" in result.json[PROBLEM][0]
    assert not place.exists()
    text = run_command("doctor", "-q", "-s", place)
    assert text.code == 1
    assert text.out.startswith("problem: no deltastore at")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "index.sqlite").unlink(), "put it back from a backup"),
        (lambda folder: (folder / "index.sqlite").write_bytes(b"no database" * 1000), "put the index back from a backup"),
        (lambda folder: (folder / "store.json").write_text("{"), "store.json"),
        (lambda folder: _set_schema(folder, "9999"), "pip install -U deltastore"),
    ],
    ids=["no index", "damaged index", "damaged document", "newer schema"],
)
def test_a_broken_store(run: Run, folder: Path, damage: object, said: str) -> None:
    damage(folder)  # type: ignore[operator]
    result = run("doctor", "--json")
    assert (result.code, len(result.json[PROBLEM])) == (1, 1)
    assert said in result.json[PROBLEM][0]
    assert "\n" not in result.json[PROBLEM][0]


def _set_schema(folder: Path, revision: str) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as connection, connection:
        connection.execute("UPDATE deltastore_alembic_version SET version_num = ?", (revision,))


def test_other_kinds_of_addresses() -> None:
    result = run_command("doctor", "--json", "-s", "hf://buckets/a/b")
    assert result.code == 1
    assert "not in this version" in result.json[PROBLEM][0]


def test_a_clock_that_was_set_back(run: Run, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as connection, connection:
        connection.execute("UPDATE \"commit\" SET created_at = '2999-01-01T00:00:00.000000Z'")
    result = run("doctor", "--json")
    assert result.code == 0
    assert "2999" in result.json[WARNING][-1]
    assert "set the clock" in result.json[WARNING][-1]


def test_a_read_only_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access  # root may write everywhere, whatever the mode of a folder says
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    result = run("doctor", "--json")
    assert (result.code, result.json["store"]["read_only"], result.json["cache"]["writable"]) == (0, True, False)
    assert [("can't be written to" in text) for text in result.json[WARNING]] == [True, True]


def test_the_state_of_disks(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 0}
    monkeypatch.setattr(deltastore.space, "free_bytes", lambda path: free["bytes"])
    result = run("doctor", "--json")
    assert result.code == 1
    assert "free some space" in result.json[PROBLEM][0]
    free["bytes"] = 100 << 20
    result = run("doctor", "--json")
    assert (result.code, len(result.json[WARNING])) == (0, 2)
    assert "DELTASTORE_CACHE" in result.json[WARNING][0]


def test_the_cache_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASTORE_CACHE", str(tmp_path / "cache"))
    assert run("doctor", "--json").json["cache"]["bytes"] == 0
    assert not (tmp_path / "cache").exists()
    (tmp_path / "cache" / "stores").mkdir(parents=True)
    (tmp_path / "cache" / "stores" / "entry").write_bytes(bytes(1000))
    found = run("doctor", "--json").json["cache"]
    assert (found["folder"], found["bytes"]) == (str(tmp_path / "cache"), 1000)
    monkeypatch.delenv("DELTASTORE_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert run("doctor", "--json").json["cache"]["folder"] == str(tmp_path / "hf" / "deltastore")


def test_the_numpy_kernel_and_why() -> None:
    result = run_process("doctor", "--json", env={"DELTASTORE_KERNEL": "numpy"})
    assert (result.code, result.json["kernel"]["name"]) == (0, "numpy")
    assert "unset DELTASTORE_KERNEL" in result.json[WARNING][0]
    result = run_process("doctor", "--json", env={"DELTASTORE_KERNEL": "fast"})
    assert result.code == 1
    assert "expected 'native' or 'numpy'" in result.json[PROBLEM][0]


def test_a_build_without_a_compiler(tmp_path: Path) -> None:
    """A copy of the package without its compiled part, as pip makes it where there is no compiler."""
    shutil.copytree(ROOT / "deltastore", tmp_path / "deltastore", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "migrations", tmp_path / "migrations")
    result = run_process("doctor", "--json", env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert (result.code, result.json["kernel"]["name"]) == (0, "numpy")
    assert "without a C compiler" in result.json["kernel"]["reason"]
    assert "--no-binary deltastore" in result.json[WARNING][0]


def test_missing_extras(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"torch": "no-such-package-of-ours"})
    result = run("doctor", "--json")
    assert (result.code, result.json["extras"]["torch"]["version"]) == (0, None)
    assert "pip install 'deltastore[torch]'" in run("doctor").out


def test_a_store_in_use_is_left_alone(folder: Path, run: Run) -> None:
    with DeltaStore(folder) as store:
        assert run("doctor", "--json").code == 0
        store.create_tag("still-writable")
    assert json.loads(run("log", "still-writable", "--json").out)
