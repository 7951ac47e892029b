"""Exit codes and error messages: every code, in text and in JSON, without a traceback."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import click
import numpy as np
import pytest
from command_line import Outcome, Run, run_process, start, write_checkpoint
from safetensors.numpy import save_file

from deltastore import DeltaStore, errors
from deltastore.cli import history
from deltastore.cli.main import exit_code


@pytest.mark.parametrize(
    ("line", "code", "kind"),
    [
        (["log", "nope"], 10, "RevisionNotFoundError"),
        (["log", "main~9"], 10, "RevisionNotFoundError"),
        (["show", "main@{step=77}"], 10, "RevisionNotFoundError"),
        (["log", "-s", "/nonexistent/store"], 10, "StoreNotFoundError"),
        (["log", "-s", "hf://buckets/a/b"], 2, "InvalidInputError"),
        (["log", "--index", "postgresql://db"], 2, "InvalidInputError"),
        (["log", "-n", "x"], 2, "BadParameter"),
        (["log", "--nope"], 2, "NoSuchOption"),
        (["nope"], 2, "UsageError"),
        (["diff", "main"], 2, "MissingParameter"),
        (["commit", "/nonexistent/file"], 2, "BadParameter"),
        (["init"], 2, "AlreadyExistsError"),
    ],
)
def test_errors(run: Run, line: list[str], code: int, kind: str) -> None:
    result = run(*line)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    as_json = run("--json", *line)
    assert (as_json.code, as_json.out) == (code, "")
    error = json.loads(as_json.err)
    if kind == "UsageError":
        assert issubclass(getattr(click.exceptions, error["error"], click.UsageError), click.UsageError)
    else:
        assert error["error"] == kind
    assert error == {"type": "error", "code": code, "error": error["error"], "message": error["message"]}
    assert error["message"]


def test_json_after_the_command_counts_for_usage_errors_too(run: Run) -> None:
    assert json.loads(run("log", "--nope", "--json").err)["code"] == 2
    assert not run("diff", "main", "--", "--json", "x").err.startswith("{")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.DeltaStoreError("x"), 1),
        (errors.InvalidInputError("x"), 2),
        (errors.AlreadyExistsError("x"), 2),
        (errors.RevisionForgottenError("x"), 10),
        (errors.RefConflictError("main", None, None), 11),
        (errors.StoreFencedError("x"), 11),
        (errors.StorageError("x", "locked", True), 11),
        (errors.AuthenticationError("x"), 12),
        (errors.StorageError("x", "denied"), 12),
        (errors.FormatError("x"), 13),
        (errors.StoreFullError("x"), 14),
        (errors.StorageError("x", "timeout", True), 15),
        (errors.IncompatibleStateError("x"), 16),
        (errors.IndexSchemaError("x"), 1),
        (OSError(errno.ENOSPC, "full"), 14),
        (OSError(errno.EDQUOT, "quota"), 14),
        (FileNotFoundError(errno.ENOENT, "gone"), 10),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 15),
        (TimeoutError("slow"), 15),
        (PermissionError(errno.EACCES, "no"), 1),
    ],
)
def test_code_of_every_error(error: errors.DeltaStoreError | OSError, code: int) -> None:
    assert exit_code(error) == code


def test_differences_are_20_when_asked(run: Run) -> None:
    assert run("diff", "main~1", "main").code == 0
    assert run("diff", "main~1", "main", "--exit-code").code == 20
    assert run("diff", "main~1", "main", "--exit-code", "--json").code == 20
    assert run("diff", "main", "main", "--exit-code").code == 0


def test_a_moved_head_is_11(tmp_path: Path, run: Run, ids: list[str]) -> None:
    source = write_checkpoint(tmp_path / "c", 5)
    for extra in ([], ["--dry-run"]):
        result = run("commit", source, "--expect-head", ids[1], *extra)
        assert result.code == 11
        assert ids[2] in result.err
    assert run("log", "-q").out.split() == ids[::-1]
    assert run("commit", source, "--expect-head", ids[2][:12]).code == 0


def test_damage_is_13(tmp_path: Path, folder: Path, run: Run, ids: list[str]) -> None:
    pack = max(folder.glob("packs/*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[-20] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    assert run("verify").code == 0
    result = run("verify", "--read-data", "--json")
    assert result.code == 13
    assert result.json["ok"] is False
    assert result.json["problems"][0]["key"].startswith("packs/")
    assert ids[0] in result.json["problems"][0]["commits"]
    assert set(run("verify", "--read-data", "-q").out.split()) <= set(ids)
    rows = run("verify", "--read-data").rows
    assert rows[0][0].startswith("packs/")
    assert len(rows[0]) == 3
    checkout = run("checkout", "main", tmp_path / "out", "--json")
    assert (checkout.code, json.loads(checkout.err)["code"]) == (13, 13)
    assert not (tmp_path / "out").exists()
    pack.unlink()
    assert run("verify").code == 13


def test_a_missing_index_is_1(folder: Path, run: Run) -> None:
    (folder / "index.sqlite").unlink()
    for line in (["log"], ["index", "status"], ["index", "upgrade"]):
        result = run(*line)
        assert result.code == 1
        assert "index.sqlite" in result.err


def test_a_newer_index_is_1_and_left_alone(folder: Path, run: Run) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as connection, connection:
        connection.execute("UPDATE deltastore_alembic_version SET version_num = '9999'")
    assert run("log").code == 1
    status = run("index", "status", "--json").json
    assert (status["schema"], status["seq"]) == ("9999", None)
    upgrade = run("index", "upgrade")
    assert upgrade.code == 1
    assert "9999" in upgrade.err


def test_a_state_without_place_in_safetensors_is_16(folder: Path, run: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with DeltaStore(folder) as store:
        store.commit({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, branch="odd")
    result = run("checkout", "odd", tmp_path / "out")
    assert result.code == 16
    assert "a.b" in result.err


def test_names_are_checked_before_anything_is_written(tmp_path: Path, run: Run, ids: list[str]) -> None:
    source = write_checkpoint(tmp_path / "c", 6)
    for line in (["--tag", "v1"], ["--tag", "main"], ["--tag", "x", "-b", "x"], ["-b", "v1"], ["-b", "a..b"], ["--tag", "~"]):
        assert run("commit", source, *line).code == 2, line
    assert run("log", "-q").out.split() == ids[::-1]
    assert run("branch", "-q").out == "main\n"


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}      x"])
def test_files_that_are_no_safetensors_are_13(tmp_path: Path, run: Run, content: bytes) -> None:
    source = tmp_path / "bad.safetensors"
    source.write_bytes(content)
    result = run("commit", source)
    assert result.code == 13
    assert str(source) in result.err


def test_a_folder_without_weights_is_10(tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    assert run("commit", tmp_path / "empty").code == 10


def test_embedded_index_may_be_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("log", "--index", "embedded").code == 0
    monkeypatch.setenv("DELTASTORE_INDEX_URL", "postgresql://db")
    assert "DELTASTORE_INDEX_URL" in run("log").err


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_14(folder: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    result = run_process("-s", folder, "checkout", "main", tmp_path / "out", preexec_fn=limit)
    assert result.code == 14
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == [folder]  # nothing half made is left


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_can_not_be_written_is_14(folder: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        result = run_process("-s", folder, "log", stdout=full)
    assert result.code == 14
    assert result.err.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    with DeltaStore(folder) as store:
        for step in range(12):
            store.commit({}, "x" * 20_000, metadata={"n": step})
    with start("-s", folder, "log") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
    assert (process.returncode, err) == (0, b"")


def test_interrupted_is_130(folder: Path, terminal: tuple[int, int]) -> None:
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # shells let jobs behind & ignore it
    with start("-s", folder, "--json", "tag", "delete", "v1", stdin=terminal[1], preexec_fn=heeding) as process:
        assert process.stderr is not None
        seen = b""
        while b"Go on?" not in seen:
            seen += os.read(process.stderr.fileno(), 4096)
        time.sleep(0.1)  # until it waits
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert json.loads(seen.splitlines()[0])["type"] == "plan"
    assert json.loads(err.splitlines()[-1]) == {
        "type": "error",
        "code": 130,
        "error": "KeyboardInterrupt",
        "message": "interrupted",
    }


def test_interrupted_in_the_middle_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(history, "commit_document", interrupt)
    result = run("log", "--json")
    assert result.code == 130
    assert json.loads(result.err.strip())["code"] == 130


def test_a_bug_shows_its_traceback_except_in_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(history, "commit_document", fail)
    assert json.loads(run("log", "--json").err) == {
        "type": "error",
        "code": 1,
        "error": "ZeroDivisionError",
        "message": "boom",
    }
    monkeypatch.setattr(history, "_log_columns", fail)
    with pytest.raises(ZeroDivisionError):
        run("log")


# -- imports ----------------------------------------------------------------------------------------------------------


def test_commands_that_look_import_neither_torch_nor_alembic(folder: Path) -> None:
    program = """
import json, sys
from deltastore.cli.main import cli
for line in json.loads(sys.argv[1]):
    try:
        cli(line)
    except SystemExit as exit:
        assert exit.code == 0, line
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})), file=sys.stderr)
"""
    lines = [["log"], ["show"], ["branch"], ["tag"], ["branch", "create", "x"], ["tag", "delete", "v1", "--yes", "-q"]]
    arguments = json.dumps([["-s", str(folder), *line] for line in lines])
    done = subprocess.run([sys.executable, "-c", program, arguments], capture_output=True, text=True, timeout=60, check=True)
    assert "embed.weight" in done.stdout
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert {"click", "sqlalchemy"} <= modules
    assert not {"torch", "alembic", "tqdm", "transformers", "safetensors", "huggingface_hub"} & modules


def imported_modules(outcome: Outcome) -> set[str]:
    """What Python says it imported, with PYTHONPROFILEIMPORTTIME."""
    assert outcome.code == 0
    return {line.rsplit("|", 1)[1].strip() for line in outcome.err.splitlines() if line.startswith("import time:")}


def test_help_imports_no_large_library() -> None:
    modules = imported_modules(run_process("--help", env={"PYTHONPROFILEIMPORTTIME": "1"}))
    assert {"click", "deltastore.cli.output"} <= modules
    assert not {"numpy", "sqlalchemy", "pydantic", "torch", "deltastore.store"} & modules


def test_commit_of_files_does_not_import_torch(folder: Path, tmp_path: Path) -> None:
    save_file({"w": np.zeros(3)}, tmp_path / "w.safetensors")
    line = ["-s", folder, "commit", tmp_path / "w.safetensors"]
    modules = imported_modules(run_process(*line, env={"PYTHONPROFILEIMPORTTIME": "1"}))
    assert "deltastore.commit" in modules
    assert not {"torch", "alembic"} & modules
