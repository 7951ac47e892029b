"""`import` and `estimate` on the command line: what they print, their exit codes, and what they leave alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_line import run_command, run_process, start, write_checkpoint

from deltastore import DeltaStore


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASTORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_checkpoint(tmp_path / "runs" / f"checkpoint-{step}", step) for step in (9, 10, 100)]


def test_import_and_again(tmp_path: Path, folders: list[Path]) -> None:
    line = ["import", *folders[::-1], "--to", tmp_path / "new", "-b", "runs/a", "--author", "ada"]
    first = run_command(*line)
    assert first.code == 0
    assert [(row[1], row[3], row[4]) for row in first.rows] == [
        (step, "new", str(folder)) for step, folder in zip(("9", "10", "100"), folders, strict=True)
    ]
    assert all(int(row[2]) > 132_000 for row in first.rows)
    assert f"note: made a store at {tmp_path / 'new'}" in first.err
    assert "nothing was deleted" in first.err
    assert "--delete" in first.err
    with DeltaStore(tmp_path / "new") as store:
        log = store.list_commits("runs/a")[::-1]
        assert [row[0] for row in first.rows] == [commit.id for commit in log]
        assert [commit.metadata for commit in log] == [{"step": 9}, {"step": 10}, {"step": 100}]
        assert log[0].author == "ada"
    again = run_command(*line, "--json")
    assert again.code == 0
    assert again.err == ""
    assert again.json.keys() == {"store", "branch", "created", "dry_run", "imported", "failed"}
    assert again.json["created"] is False
    assert [(each["message"], each["already"], each["obstacle"]) for each in again.json["imported"]] == [
        ("checkpoint-9", True, None),
        ("checkpoint-10", True, None),
        ("checkpoint-100", True, None),
    ]
    assert run_command(*line, "-q").out.split() == [row[0] for row in first.rows]
    assert all(folder.is_dir() for folder in folders)


def test_the_store_may_come_from_the_environment(tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command("import", *folders).code == 10  # which store?
    assert run_command("-s", tmp_path / "a", "import", folders[0], "--to", tmp_path / "b").code == 2
    monkeypatch.setenv("DELTASTORE_URL", str(tmp_path / "env"))
    assert run_command("import", folders[0]).code == 0
    assert (tmp_path / "env" / "store.json").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path, folders: list[Path]) -> None:
    (folders[1] / "link").symlink_to(folders[0] / "config.json")
    line = ["import", *folders, "--to", tmp_path / "new", "--dry-run", "--delete"]
    plain = run_command(*line)
    assert plain.code == 0
    assert [row[0] for row in plain.rows] == ["9", "10", "100"]
    assert "would import 3 checkpoints" in plain.err
    assert f"would keep {folders[1]}: {folders[1] / 'link'} is a symbolic link" in plain.err
    document = run_command(*line, "--json").json
    assert document["dry_run"] is document["created"] is True
    assert [each["metadata"]["step"] for each in document["would_import"]] == [9, 10, 100]
    assert not (tmp_path / "new").exists()


def test_exit_codes(tmp_path: Path, folders: list[Path]) -> None:
    damaged = write_checkpoint(tmp_path / "damaged-3")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    to = ["--to", tmp_path / "new"]
    only = run_command("import", damaged, *to)
    assert only.code == 13
    assert "cut short" in only.err
    assert run_command("import", tmp_path / "runs", *to).code == 10  # holds checkpoints, is none
    assert run_command("import", tmp_path / "missing", damaged, *to).code == 10
    assert run_command("import", folders[0], folders[0], *to).code == 2
    assert run_command("import", *to).code == 2
    assert run_command("import", folders[0], "-b", "..", *to).code == 2
    assert not (tmp_path / "new").exists()
    same = write_checkpoint(tmp_path / "other-9")
    refused = run_command("import", folders[0], same, *to)
    assert refused.code == 2
    assert str(folders[0]) in refused.err
    assert str(same) in refused.err
    partial = run_command("import", damaged, *folders, *to)
    assert partial.code == 3
    assert f"error: {damaged} was not imported" in partial.err
    assert len(partial.rows) == 3
    document = run_command("import", damaged, *folders, *to, "--json")
    assert document.code == 3
    failed = document.json["failed"]
    assert [(each["path"], each["error"], each["code"]) for each in failed] == [(str(damaged), "FormatError", 13)]
    inside = write_checkpoint(tmp_path / "new" / "checkpoint-1")
    assert run_command("import", inside, *to).code == 2
    assert run_command("import", tmp_path / "missing", *folders, *to, "--dry-run").code == 3


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_delete(tmp_path: Path, folders: list[Path]) -> None:
    (folders[1] / ".git").mkdir()
    (folders[1] / ".git" / "HEAD").write_text("x")
    line = ["import", *folders, "--to", tmp_path / "new", "--delete"]
    refused = run_command(*line)
    assert refused.code == 2
    assert "--yes" in refused.err
    assert not (tmp_path / "new").exists()
    done = run_command(*line, "--yes", "--json")
    assert done.code == 3  # one stays
    assert "about to delete 2 originals" in json.loads(done.err.splitlines()[-1])["message"]
    assert done.json["deleted"] == [str(folders[0]), str(folders[2])]
    assert [each["path"] for each in done.json["kept"]] == [str(folders[1])]
    assert done.json["freed_bytes"] > 2 * 132_000
    assert [folder.exists() for folder in folders] == [False, True, False]
    rest = run_command("import", folders[1], "--to", tmp_path / "new", "--delete", "--yes")
    assert rest.code == 3
    assert f"kept {folders[1]}: {folders[1] / '.git' / 'HEAD'} is no part of the commit" in rest.err
    with DeltaStore(tmp_path / "new") as store:
        assert store.verify(read_data=True)
        assert [commit.message for commit in store.list_commits()] == ["checkpoint-100", "checkpoint-10", "checkpoint-9"]


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", True), (b"y\n", False)])
def test_delete_asks(tmp_path: Path, folders: list[Path], terminal: tuple[int, int], answer: bytes, left: bool) -> None:
    ours, theirs = terminal
    with start("import", folders[0], "--to", tmp_path / "new", "--delete", stdin=theirs) as process:
        os.write(ours, answer)
        out, err = process.communicate(timeout=60)
    assert process.returncode == (3 if left else 0)
    assert b"about to delete 1 original" in err
    assert (b"not confirmed" in err) is left
    assert len(out.splitlines()) == 1
    assert folders[0].exists() is left


# -- estimate ---------------------------------------------------------------------------------------------------------


def test_estimate(tmp_path: Path, folders: list[Path]) -> None:
    plain = run_command("estimate", *folders)
    assert plain.code == 0
    assert [row[0] for row in plain.rows] == ["9", "10", "100", "total"]
    document = run_command("estimate", *folders, "--sample", "2", "--work", tmp_path, "--json").json
    assert [each["step"] for each in document["checkpoints"]] == [9, 10, 100]
    assert document["raw_bytes"] == int(plain.rows[-1][1])
    assert document["ratio"] > 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["runs"]
    assert int(run_command("estimate", folders[0], "--cast", "bfloat16", "-q").out) > 0
    missing = run_command("estimate", tmp_path / "missing", folders[0])
    assert missing.code == 3
    assert "missing was not estimated" in missing.err
    assert run_command("estimate", tmp_path / "missing").code == 10
    assert run_command("estimate", folders[0], "--sample", "0").code == 2
    assert run_command("estimate", folders[0], "--cast", "int8").code == 2


def test_importing_needs_no_torch(tmp_path: Path, folders: list[Path]) -> None:
    DeltaStore.create(tmp_path / "new").close()
    done = run_process("import", folders[0], "--to", tmp_path / "new", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.code == 0
    modules = {part.rpartition("|")[2].strip() for part in done.err.splitlines()}
    assert "deltastore.importing" in modules
    assert not {"torch", "alembic", "matplotlib"} & modules
