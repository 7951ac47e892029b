"""Whole journeys: files into a store and out again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import Run, run_command, run_process, write_checkpoint
from safetensors.numpy import load_file, save_file


def test_file_to_store_to_file_in_processes_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = {"w": rng.standard_normal((1000, 50), np.float32), "n": np.array([2**62, -1]), "nan": np.full(3, np.nan)}
    source = tmp_path / "in.safetensors"
    save_file(weights, source)
    store = {"env": {"DELTASTORE_URL": str(tmp_path / "s")}}

    assert run_process("init", tmp_path / "s").code == 0
    committed = run_process("commit", source, "-m", "first", "--meta", "step=1", "--json", **store)
    assert (committed.code, committed.err) == (0, "")
    assert committed.json["metadata"] == {"step": 1}
    checked_out = run_process("checkout", committed.json["id"][:8], tmp_path / "out", "-q", **store)
    assert (checked_out.code, checked_out.out, checked_out.err) == (0, committed.json["id"] + "\n", "")

    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == weights.keys()
    for name, expected in weights.items():
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].shape == expected.shape
        assert loaded[name].tobytes() == expected.tobytes()


def test_sharded_folder_keeps_its_files(tmp_path: Path, folder: Path, run: Run) -> None:
    source = tmp_path / "sharded"
    source.mkdir()
    parts = [{"a": np.arange(6, dtype=np.float32)}, {"b": np.ones((2, 2), np.float16), "c": np.zeros(0, np.int8)}]
    names = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")]
    for name, tensors in zip(names, parts, strict=True):
        save_file(tensors, source / name)
    weight_map = {key: name for name, tensors in zip(names, parts, strict=True) for key in tensors}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (source / "config.json").write_text('{"model_type": "tiny"}')
    (source / "blob.bin").write_bytes(bytes(range(256)) * 40)

    assert run("commit", source, "-b", "exp/sharded").code == 0
    shown = run("--json", "show", "exp/sharded").json
    assert {each["name"] for each in shown["files"]} == {"config.json", "blob.bin"}
    assert {each["name"]: (each["dtype"], each["shape"], each["bytes"]) for each in shown["tensors"]} == {
        "a": ("float32", [6], 24),
        "b": ("float16", [2, 2], 8),
        "c": ("int8", [0], 0),
    }
    out = tmp_path / "out"
    result = run("checkout", "exp/sharded", out, "--max-shard-size", "24B", "--json").json
    assert result["commit"] == shown["id"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    loaded = {name: load_file(out / shard)[name] for name, shard in index["weight_map"].items()}
    for name, expected in {**parts[0], **parts[1]}.items():
        assert loaded[name].tobytes() == expected.tobytes()
        assert loaded[name].shape == expected.shape
    for name in ("config.json", "blob.bin"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_every_version_comes_back(tmp_path: Path, run: Run, ids: list[str]) -> None:
    for step, revision in enumerate(["main~2", "v1", "main@{step=2}"]):
        out = tmp_path / f"out{step}"
        result = run("checkout", revision, out)
        assert result.code == 0
        assert ids[step][:12] in result.out
        expected = write_checkpoint(tmp_path / f"expected{step}", step)
        assert load_file(out / "model.safetensors").keys() == load_file(expected / "model.safetensors").keys()
        for name, tensor in load_file(expected / "model.safetensors").items():
            assert load_file(out / "model.safetensors")[name].tobytes() == tensor.tobytes()
        assert json.loads((out / "config.json").read_text()) == {"step": step}
        assert (out / "tokenizer/vocab.txt").read_bytes() == (expected / "tokenizer/vocab.txt").read_bytes()


def test_checkout_replaces_only_with_overwrite(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run("checkout", "v1", out).code == 0
    (out / "notes.txt").write_text("mine")
    refused = run("checkout", "main", out)
    assert refused.code == 2
    assert "model.safetensors" in refused.err
    assert json.loads((out / "config.json").read_text()) == {"step": 1}
    assert run("checkout", "main", out, "--overwrite").code == 0
    assert json.loads((out / "config.json").read_text()) == {"step": 2}
    assert (out / "notes.txt").read_text() == "mine"


def test_current_folder_is_the_store_when_it_is_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, ids: list[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run_command("log", "-q").out.split() == ids[::-1]
    monkeypatch.chdir(tmp_path)
    elsewhere = run_command("log", "-q")
    assert elsewhere.code == 10
    assert "--store" in elsewhere.err
    monkeypatch.setenv("DELTASTORE_URL", str(folder))
    assert run_command("log", "-q").out.split() == ids[::-1]
    assert run_command("log", "-q", "-s", tmp_path / "nowhere").code == 10


def test_relative_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    assert run_command("init", "runs").code == 0
    assert run_command("--store", "runs", "commit", "checkpoint").code == 0
    assert run_command("checkout", "-s", "./runs", "main", "out").code == 0
    assert (tmp_path / "out/config.json").is_file()


def test_init_twice(tmp_path: Path) -> None:
    made = run_command("init", tmp_path / "s", "--json")
    assert made.json == {"address": str(tmp_path / "s"), "created": True, "dry_run": False}
    again = run_command("init", tmp_path / "s")
    assert again.code == 2
    assert "--exist-ok" in again.err
    assert run_command("init", tmp_path / "s", "--exist-ok", "--json").json["created"] is False


def test_init_dry_run_makes_nothing(tmp_path: Path) -> None:
    result = run_command("init", tmp_path / "s", "--dry-run")
    assert (result.code, "would make" in result.out) == (0, True)
    assert list(tmp_path.iterdir()) == []


def test_commit_dry_run_writes_nothing(tmp_path: Path, folder: Path, run: Run, ids: list[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and "index" not in path.name}
    source = write_checkpoint(tmp_path / "checkpoint", 9)
    plan = run("commit", source, "--dry-run", "--json").json
    assert plan["parent"] == ids[-1]
    assert (plan["tensors"], plan["bytes"]) == (3, 300 * 100 * 4 + 80 + 2)
    assert {each["name"] for each in plan["files"]} == {"config.json", "tokenizer/vocab.txt"}
    assert "would commit 3 tensors" in run("--dry-run", "commit", source).out
    assert run("log", "-q").out.split() == ids[::-1]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and "index" not in path.name} == before


def test_checkout_dry_run_writes_nothing(tmp_path: Path, run: Run) -> None:
    result = run("checkout", "main", tmp_path / "out", "--dry-run")
    assert "would check out" in result.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["0", "5XB", "-1", "iB", "", "1e3"])
def test_sizes_that_are_none(tmp_path: Path, run: Run, size: str) -> None:
    result = run("checkout", "main", tmp_path / "out", f"--max-shard-size={size}")
    assert result.code == 2
    assert "--max-shard-size" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("size", "shards"), [("120kB", 3), ("120080", 2), ("121KB", 1), ("118 KiB", 1), ("1", 3), ("0.2MB", 1), ("5gb", 1)]
)
def test_sizes(tmp_path: Path, run: Run, size: str, shards: int) -> None:
    assert run("checkout", "main", tmp_path / "out", "--max-shard-size", size).code == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == shards


def test_metadata_values(tmp_path: Path, run: Run) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", 3)
    given = ["a=1", "b=1.5e-3", "c=true", "d=007", "e=", 'f="12"', "g=x=y", "h=null", "i=-3", "j=[1]", "k=NaN"]
    result = run("commit", source, "--json", "--tag", "new", *(f"--meta={each}" for each in given))
    expected = {"a": 1, "b": 0.0015, "c": True, "d": "007", "e": "", "f": "12", "g": "x=y", "h": "null", "i": -3, "j": "[1]"}
    assert result.json["metadata"] == expected | {"k": "NaN"}
    assert (result.json["branch"], result.json["tag"]) == ("main", "new")
    for revision in ("main@{a=1}", "new"):
        assert run("log", revision, "-n1", "-q").out.strip() == result.json["id"]


@pytest.mark.parametrize("pairs", [["step"], ["=1"], ["a=1", "a=2"]])
def test_metadata_that_is_none(tmp_path: Path, run: Run, ids: list[str], pairs: list[str]) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", 3)
    assert run("commit", source, *(f"--meta={pair}" for pair in pairs)).code == 2
    assert run("log", "-q").out.split() == ids[::-1]
