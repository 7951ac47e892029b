"""A store that an earlier version wrote: read whole, verified, and written to. `data/make_store_v1.py` made it."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from independent_reader import Commit, Store
from independent_values import check_snapshots, files_of, tensors_of, values_of

from deltastore import DeltaStore

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "store-v1.json").read_text(encoding="utf-8"))
COMMITS: dict[str, Any] = EXPECTED["commits"]
for each in COMMITS.values():
    each["tensors"] = {name: EXPECTED["contents"][at] for name, at in each["tensors"].items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "store-v1", tmp_path / "store", copy_function=shutil.copyfile)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(node, (dict, list, tuple)):
        for key, each in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(each, (*path, str(key)))
    else:
        yield ".".join(path), node


def described(version: Commit) -> dict[str, Any]:
    return {name: [dtype, list(shape), sha256(data)] for name, (dtype, shape, data) in tensors_of(version).items()}


def test_the_fixture_is_complete_and_small() -> None:
    files = [path for path in (DATA / "store-v1").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert {path.name for path in (DATA / "store-v1").glob("*.*")} == {"index.sqlite", "store.json"}, "a write-ahead log is left"
    with closing(sqlite3.connect(f"file:{DATA / 'store-v1' / 'index.sqlite'}?mode=ro&immutable=1", uri=True)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_it_holds_all_that_the_format_has(folder: Path) -> None:
    store = Store(folder)
    found: set[tuple[str, int]] = set()
    spans: set[int] = set()
    for path in (folder / "packs").rglob("*-*"):
        pack = store.pack(path.name)
        spans |= set(pack["span"].tolist())
        codecs = pack["codecs"].split(" ")
        found |= {(codecs[codec], int(payload[0])) for codec, payload in zip(pack["codec"], pack["payload"], strict=True)}
    assert spans == {0, 1, 8, 64}
    assert "raw@1" in {codec for codec, _ in found}
    for codec in ("planes@1", "sparse-ulp@1", "dense-ulp@1"):
        assert {word for each, word in found if each == codec} == set(range(8)), codec


def test_the_library_reads_every_commit(folder: Path) -> None:
    with DeltaStore(folder, trust="none", read_only=True) as store:
        assert {ref.name: [ref.kind, ref.commit_id] for ref in store.list_refs()} == EXPECTED["refs"]
        for commit_id, expected in COMMITS.items():
            snapshot = store.checkout(commit_id)
            assert (snapshot.commit.message, list(snapshot.commit.parents)) == (expected["message"], expected["parents"])
            assert snapshot.commit.metadata == {"message": expected["message"]}
            tensors = {name: [one.dtype_name, list(one.shape), sha256(one.tobytes())] for name, one in snapshot.items()}
            assert tensors == expected["tensors"]
            assert {name: sha256(snapshot.read_file(name)) for name in snapshot.files} == EXPECTED["files"]
            values = {name: repr(each)[:80] for name, each in leaves(snapshot.state()) if not isinstance(each, torch.Tensor)}
            assert values == expected["values"]


def test_the_independent_reader_reads_every_commit(folder: Path) -> None:
    (folder / "index.sqlite").unlink()
    store = Store(folder)
    assert {name: list(ref) for name, ref in store.refs.items()} == EXPECTED["refs"]
    assert store.commits.keys() == COMMITS.keys()
    check_snapshots(store)
    for commit_id, version in store.commits.items():
        expected = COMMITS[commit_id]
        assert described(version) == expected["tensors"]
        assert {name: sha256(data) for name, data in files_of(version).items()} == EXPECTED["files"]
        assert {name: repr(each)[:80] for name, each in values_of(version).items()} == expected["values"]


def test_it_is_verified(folder: Path) -> None:
    with DeltaStore(folder) as store:
        report = store.verify(read_data=True)
        assert report.problems == ()
        reached = {commit.id for ref in store.list_refs() for commit in store.list_commits(ref.name)}
        assert report.commits == len(reached) > 60


def test_it_takes_new_commits(folder: Path) -> None:
    """Small changes to a head that an earlier version wrote become deltas, and old commits stay what they were."""
    with DeltaStore(folder) as store:
        head = store.get_commit()
        state = store.checkout().state()
        words = state["layers"]["bfloat16"].view(torch.int16)
        for step in range(10):
            words[step, step] ^= 1
            store.commit(state, f"more {step}")
        assert store.get_commit("main~10") == head
        assert store.verify(read_data=True).problems == ()
    seen = Store(folder)
    _, newest = seen.refs["main"]
    assert tensors_of(seen.commits[newest])["layers.bfloat16"][2] == words.contiguous().numpy().tobytes()
    assert described(seen.commits[head.id]) == COMMITS[head.id]["tensors"]
