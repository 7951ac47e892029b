"""Missing, damaged, foreign and newer pieces: always a typed error that names what is wrong, never wrong values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from store_states import bucket_objects, chain, columns, manifest_rows, objects, raw, same, sql

from deltastore import DeltaStore
from deltastore.errors import (
    DeltaStoreError,
    FormatError,
    IncompatibleStateError,
    IndexSchemaError,
    IntegrityError,
    StoreNotFoundError,
    UnsupportedFormatError,
)


def state(step: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(9)
    words = torch.from_numpy(rng.integers(0, 2**16, 30_000, np.uint16).view(np.int16))
    words[step::500] += step
    return {"weight": words.view(torch.bfloat16), "other": torch.arange(1000) + step, "fixed": torch.ones(7)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "store"
    with DeltaStore.create(folder) as store:
        for step in range(4):
            store.commit(state(step), f"step {step}")
    return folder


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "store")
    return tmp_path / "store"


def entry_of(folder: Path, name: str, depth: int = 0) -> tuple[Path, int, int]:
    """(file, offset, length) of the payload that a tensor's only chunk has in its chain, `depth` entries down."""
    with DeltaStore(folder) as store:
        version = store._versions.get(store.get_commit().id)
        position = version.tensors[dict(version.leaves)[(name,)]].position
        ((_, rows),) = manifest_rows(folder, store, "main")
    pack_id, row, _ = chain(folder, *rows[position], {})[depth]
    path = folder / "packs" / pack_id[-2:] / pack_id
    lengths = columns(folder, pack_id)["stored_length"].astype(np.int64)
    head = path.stat().st_size - int(lengths.sum())
    return path, head + int(lengths[:row].sum()), int(lengths[row])


def flip(path: Path, offset: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


# -- packs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_flipped_bit_in_a_payload(copied: Path, depth: int) -> None:
    path, offset, length = entry_of(copied, "weight", depth)
    flip(path, offset + length // 2)
    key = path.relative_to(copied).as_posix()
    with DeltaStore(copied) as store:
        snapshot = store.checkout()
        for read in (snapshot["weight"].load, snapshot.load, snapshot.state, snapshot["weight"][5:9].tobytes):
            with pytest.raises(IntegrityError, match="'weight', chunk 0") as caught:
                read()
            assert "packs/" in str(caught.value)
        assert same(snapshot.load(["other", "fixed"]), {name: state(3)[name] for name in ("other", "fixed")})
        report = store.verify(read_data=True)
        assert not report
        assert any("'weight'" in problem.message for problem in report.problems)
        broken = {commit for problem in report.problems for commit in problem.commits}
        assert store.get_commit().id in broken
        assert len(broken) == 4 - (3 - depth)  # only the versions that are built on the damaged entry
        assert key in " ".join(f"{problem.key} {problem.message}" for problem in report.problems) or depth < 3
        if depth < 3:
            assert same(store.checkout("main~3").load(), state(0))


def test_a_damaged_chunk_leaves_a_target_that_is_known_to_be_mixed(copied: Path) -> None:
    path, offset, length = entry_of(copied, "weight", 0)
    flip(path, offset + length - 1)
    with DeltaStore(copied) as store:
        target = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
        with pytest.raises(IntegrityError, match="mixed"):
            store.checkout().load_into(target)
        store.checkout("main~1").load_into(target)
        assert same(target, state(2))


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -1, -10])
def test_a_truncated_pack(copied: Path, cut: int) -> None:
    path, *_ = entry_of(copied, "weight", 3)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with DeltaStore(copied) as store:
        with pytest.raises(IntegrityError, match=path.name):
            store.checkout().load()
        assert not store.verify()
    path.write_bytes(data)
    with DeltaStore(copied) as store:
        assert store.verify(read_data=True)


@pytest.mark.parametrize("kind", ["packs", "manifests", "structures", "commits"])
def test_every_missing_object_is_named(copied: Path, kind: str) -> None:
    for key in objects(copied, kind):
        hidden = copied / "hidden"
        shutil.move(copied / key, hidden)
        with DeltaStore(copied) as store:
            failed = 0
            for step in range(4):
                try:
                    found = store.checkout(f"main~{3 - step}").load()
                except IntegrityError as error:
                    assert key in str(error)  # noqa: PT017
                    failed += 1
                else:
                    assert same(found, state(step))
            assert failed
            report = store.verify()
            assert not report
            assert {problem.key for problem in report.problems} == {key}
        shutil.move(hidden, copied / key)
    with DeltaStore(copied) as store:
        assert store.verify(read_data=True)


@settings(max_examples=30, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_any_flipped_bit_of_any_object_is_found(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Reading gives the right values or an error, and verify finds the bit, unless it has no meaning: all values are right then.

    zstd leaves a few such bits in its blocks, nothing else does (`test_no_bit_of_our_own_is_spare`).
    """
    folder = tmp_path_factory.mktemp("flipped") / "store"
    shutil.copytree(sound, folder)
    kinds = ("packs", "manifests", "structures", "commits")
    key = data.draw(st.sampled_from([key for kind in kinds for key in objects(folder, kind)]))
    offset = data.draw(st.integers(0, (folder / key).stat().st_size - 1))
    flip(folder / key, offset, data.draw(st.integers(0, 7)))
    refused = 0
    with DeltaStore(folder, trust="none") as store:
        for step in range(4):
            try:
                found = store.checkout(f"main~{3 - step}").state()
            except IntegrityError:
                refused += 1
                continue
            if not key.startswith("structures/"):  # a bit in a name or shape is for verify to find
                assert same(found, state(step)), (key, offset)
        report = store.verify(read_data=True)
        if report:
            lengths = columns(folder, key.rsplit("/", 1)[-1])["stored_length"] if key.startswith("packs/") else []
            assert (folder / key).stat().st_size - offset <= sum(int(length) for length in lengths), (key, offset)
            assert not refused, (key, offset)
        if key.startswith(("commits/", "structures/")):  # a pack or manifest may now speak of other objects
            assert any(problem.key == key for problem in report.problems), (key, offset, report)


# -- documents --------------------------------------------------------------------------------------------------------


def test_a_structure_that_lies(copied: Path) -> None:
    (key,) = objects(copied, "structures")
    document = json.loads((copied / key).read_text())
    for change in (
        lambda d: d["tree"]["d"][0].__setitem__(1, {"x": 99}),
        lambda d: d["tensors"][0].__setitem__(1, [30_001]),
        lambda d: d["tensors"][0].__setitem__(1, [1 << 61]),
        lambda d: d["tensors"][0].__setitem__(0, "float31"),
        lambda d: d["tensors"][0].__setitem__(2, 7),
        lambda d: d["tensors"][0].__setitem__(3, 1 << 40),
        lambda d: d.__setitem__("tree", [[[]]]),
        lambda d: d.__setitem__("surprise", 1),
    ):
        changed = json.loads(json.dumps(document))
        change(changed)
        text = json.dumps(changed, separators=(",", ":"), sort_keys=True)
        (copied / key).write_text(text)
        sql(copied, "UPDATE object SET size = ? WHERE key = ?", len(text), key)
        for commit in objects(copied, "commits"):
            place = json.loads((copied / commit).read_text())
            place["placement"]["structure"]["size"] = len(text)
            (copied / commit).write_text(json.dumps(place))
        with DeltaStore(copied) as store:
            with pytest.raises(IntegrityError):
                store.checkout().load()
            assert not store.verify()


@pytest.mark.parametrize(("old", "new"), [('"weight"', '"weighs"'), ('"int64"', '"float64"'), ("[30000]", "[100,300]")])
def test_a_structure_of_another_version_is_found_by_verify(copied: Path, old: str, new: str) -> None:
    """It can be read, but it is not what the commit id stands for."""
    (key,) = objects(copied, "structures")
    text = (copied / key).read_text()
    assert text.count(old) == 1
    changed = text.replace(old, new)
    (copied / key).write_text(changed)
    sql(copied, "UPDATE object SET size = ? WHERE key = ?", len(changed), key)
    for commit in objects(copied, "commits"):
        document = (copied / commit).read_text().replace(f'"size":{len(text)}}}', f'"size":{len(changed)}}}')
        (copied / commit).write_text(document)
    with DeltaStore(copied) as store:
        store.checkout().load()
        report = store.verify()
        assert [len(problem.commits) for problem in report.problems if problem.key == key and "tree" in problem.message] == [
            1
        ] * 4


def test_a_commit_document_of_another_commit(copied: Path) -> None:
    first, second = list(objects(copied, "commits"))[:2]
    (copied / first).write_bytes((copied / second).read_bytes())
    with DeltaStore(copied) as store, pytest.raises(IntegrityError, match="identity"):
        store.checkout(first.split("/")[2][:64])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda _: b"", FormatError, "store.json"),
        (lambda _: b"{", FormatError, "store.json"),
        (lambda _: b"\xff\xfe", FormatError, "store.json"),
        (lambda _: b"[]", FormatError, "store.json"),
        (lambda _: b"[" * 100_000, FormatError, "store.json"),
        (lambda d: {**d, "format": 2}, UnsupportedFormatError, "upgrade"),
        (lambda d: {**d, "format": "1"}, FormatError, "format"),
        (lambda d: {**d, "kind": "commit"}, FormatError, "kind"),
        (lambda d: {**d, "uuid": "x"}, FormatError, "uuid"),
        (lambda d: {**d, "features": ["pieces"]}, UnsupportedFormatError, "pieces"),
        (lambda d: {**d, "features": ["teleport"]}, UnsupportedFormatError, "teleport"),
        (lambda d: {**d, "index": "shared"}, IndexSchemaError, "shared"),
        (lambda d: {**d, "extra": 1}, FormatError, "extra"),
    ],
)
def test_other_store_documents(copied: Path, change: Callable[[Any], Any], error: type[DeltaStoreError], text: str) -> None:
    path = copied / "store.json"
    changed = change(json.loads(path.read_text()))
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    for open_it in (DeltaStore, lambda place: DeltaStore.create(place, exist_ok=True)):
        with pytest.raises(error, match=text):
            open_it(copied)


# -- the index --------------------------------------------------------------------------------------------------------


def test_the_index_of_another_store(copied: Path, tmp_path: Path) -> None:
    DeltaStore.create(tmp_path / "other").close()
    shutil.copy(tmp_path / "other" / "index.sqlite", copied / "index.sqlite")
    with pytest.raises(IndexSchemaError, match="another store"):
        DeltaStore(copied)


def test_a_newer_index(copied: Path) -> None:
    sql(copied, "UPDATE deltastore_alembic_version SET version_num = '9999'")
    with pytest.raises(IndexSchemaError, match="newer"):
        DeltaStore(copied)


def test_a_missing_index(copied: Path) -> None:
    (copied / "index.sqlite").unlink()
    with pytest.raises(IndexSchemaError, match=r"index\.sqlite"):
        DeltaStore(copied)
    with pytest.raises(IndexSchemaError):
        DeltaStore.create(copied, exist_ok=True)


@pytest.mark.parametrize("content", [b"", b"no database at all", bytes(8192)])
def test_an_index_that_is_none(copied: Path, content: bytes) -> None:
    (copied / "index.sqlite").write_bytes(content)
    with pytest.raises((IndexSchemaError, IntegrityError)):
        DeltaStore(copied)


def test_a_missing_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="nothing"):
        DeltaStore(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreNotFoundError):
        DeltaStore(tmp_path / "empty")


# -- targets ----------------------------------------------------------------------------------------------------------


def test_a_target_that_does_not_fit_is_left_alone(sound: Path) -> None:
    good = {name: torch.full_like(tensor, 3) for name, tensor in state(0).items()}
    targets: list[tuple[dict[str, torch.Tensor], str]] = [
        ({**good, "other": torch.full((999,), 3)}, r"'other' is int64\[999\], the commit has int64\[1000\]"),
        ({**good, "other": torch.full((1000, 1), 3)}, r"\[1000, 1\]"),
        ({**good, "weight": torch.full((30_000,), 3.0)}, "'weight' is float32.*bfloat16"),
        ({**good, "extra": torch.full((2,), 3)}, "'extra'"),
        ({name: tensor for name, tensor in good.items() if name != "fixed"}, "'fixed'"),
        ({**good, "fixed": torch.full((1,), 3.0).expand(7)}, "expanded"),
        ({**good, "fixed": torch.full((7,), 3.0, device="meta")}, "meta"),
    ]
    with DeltaStore(sound) as store:
        snapshot = store.checkout()
        for target, text in targets:
            bits = {name: raw(tensor) for name, tensor in target.items() if not tensor.is_meta}
            with pytest.raises(IncompatibleStateError, match=text):
                snapshot.load_into(target)
            assert {name: raw(tensor) for name, tensor in target.items() if not tensor.is_meta} == bits
        snapshot.load_into(good)
        assert same(good, state(3))


def test_reading_leaves_the_store_as_it_is(sound: Path) -> None:
    before = bucket_objects(sound)
    with DeltaStore(sound) as store:
        store.checkout().load()
        store.verify(read_data=True)
        store.diff("main~1", "main")
        store.stats()
    assert bucket_objects(sound) == before
