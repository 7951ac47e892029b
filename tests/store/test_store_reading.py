"""What is read for what: slices, whole loads, opening a version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import chain, columns, manifest_rows, objects, same
from store_traffic import Traffic

from deltastore import DeltaStore
from deltastore.errors import IntegrityError

CHUNK = 1 << 20


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A tensor of 4.5 chunks, full in the first commit, 1 % changed in the second."""
    folder = tmp_path_factory.mktemp("wide") / "store"
    rng = np.random.default_rng(0)
    words = torch.from_numpy(rng.integers(0, 2**16, CHUNK * 9 // 2, np.uint16).view(np.int16))
    with DeltaStore.create(folder, baseline="none") as store:
        store.commit({"w": words.view(torch.bfloat16).view(4608, 1024), "small": torch.arange(10)})
        words[torch.from_numpy(rng.integers(0, len(words), len(words) // 100))] += 1
        store.commit({"w": words.view(torch.bfloat16).view(4608, 1024), "small": torch.arange(10)})
    return folder, words.view(torch.bfloat16).view(4608, 1024)


def entry_ranges(folder: Path, store: DeltaStore, revision: str, chunks: list[int]) -> set[tuple[str, int, int]]:
    """(key, start, length) of the payloads of chunks of "w" and of what they are based on, from pack columns by hand."""
    ranges = set()
    version = store._versions.get(store.get_commit(revision).id)
    position = version.tensors[dict(version.leaves)[("w",)]].position
    ((_, rows),) = manifest_rows(folder, store, revision)
    for chunk in chunks:
        for pack_id, row, _ in chain(folder, *rows[position + chunk], {}):
            lengths = columns(folder, pack_id)["stored_length"].astype(np.int64)
            path = folder / "packs" / pack_id[-2:] / pack_id
            head = path.stat().st_size - int(lengths.sum())
            ranges.add((f"packs/{pack_id[-2:]}/{pack_id}", head + int(lengths[:row].sum()), int(lengths[row])))
    return ranges


SLICES: dict[str, tuple[Any, list[int]]] = {
    "one row": ((slice(2500, 2501),), [2]),
    "one element": ((4000, 7), [3]),
    "rows of two chunks": ((slice(1000, 1100),), [0, 1]),
    "to the end": ((slice(4590, None),), [4]),
    "a block": ((slice(1030, 1040), slice(5, 9)), [1]),
    "every other row": ((slice(2048, 3072, 2), slice(0, 3)), [2]),
    "negative": ((-1, -1), [4]),
    "nothing": ((slice(5, 5),), []),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_fetches_only_its_chunks(wide: tuple[Path, torch.Tensor], traffic: Traffic, name: str) -> None:
    folder, tensor = wide
    index, chunks = SLICES[name]
    with DeltaStore(folder) as store:
        lazy = store.checkout()["w"][index]
        assert lazy.shape == tuple(tensor[index].shape)
        assert lazy.nbytes == tensor[index].numel() * 2
        assert not traffic.read_keys("packs/")
        assert same(lazy.load(), tensor[index])
        payloads = [(key, start, length) for key, start, length in traffic.reads if key.startswith("packs/") and start > 0]
        assert merged(payloads) == merged(entry_ranges(folder, store, "main", chunks))
        heads = [length for key, start, length in traffic.reads if key.startswith("packs/") and start == 0]
        assert all(length < 4096 for length in heads)


def merged(ranges: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The same ranges as (key, start, stop), neighbours joined; ranges that overlap would be bytes read twice."""
    found: list[tuple[str, int, int]] = []
    for key, start, length in sorted(ranges):
        if found and found[-1][0] == key and found[-1][2] == start:
            found[-1] = key, found[-1][1], start + length
        else:
            found.append((key, start, start + length))
    return found


def test_a_narrow_column_of_very_long_rows(store: DeltaStore, folder: Path, traffic: Traffic) -> None:
    """Rows of a chunk: what lies between the columns is not fetched."""
    tensor = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (2, 3, CHUNK), np.uint8))
    store.commit({"w": tensor})
    with DeltaStore(folder) as again:
        traffic.clear()
        assert same(again.checkout()["w"][:, ::2, 5:90:7].load(), tensor[:, ::2, 5:90:7].clone())
        payloads = [(key, start, length) for key, start, length in traffic.reads if key.startswith("packs/") and start > 0]
        assert merged(payloads) == merged(entry_ranges(folder, again, "main", [0, 2, 3, 5]))


def test_opening_a_version_reads_documents_only(wide: tuple[Path, torch.Tensor], traffic: Traffic) -> None:
    with DeltaStore(wide[0]) as store:
        snapshot = store.checkout()
        assert sorted(snapshot) == ["small", "w"]
        assert snapshot["w"].shape == (4608, 1024)
        assert snapshot["w"].dtype is torch.bfloat16
        assert snapshot["w"].dtype_name == "bfloat16"
        assert snapshot.nbytes == 4608 * 1024 * 2 + 80
        assert len(snapshot["w"]) == 4608
        repr(snapshot), repr(snapshot["w"]), store.list_commits()
    assert not traffic.read_keys("packs/")
    assert not traffic.read_keys("manifests/")
    assert traffic.read_bytes("") < 10_000
    assert not traffic.writes


def test_a_whole_load_reads_each_byte_once(wide: tuple[Path, torch.Tensor], traffic: Traffic) -> None:
    with DeltaStore(wide[0]) as store:
        assert same(store.checkout("main").load()["w"], wide[1])
        packs = sum((wide[0] / key).stat().st_size for key in set(traffic.read_keys("packs/")))
        assert traffic.read_bytes("packs/") <= packs + 65536
        traffic.clear()
        store.checkout("main~1")["small"].load()
        assert traffic.read_bytes("packs/") < 10_000


def test_versions_are_read_once_per_store(wide: tuple[Path, torch.Tensor], traffic: Traffic) -> None:
    with DeltaStore(wide[0]) as store:
        store.checkout()["small"].load()
        traffic.clear()
        store.checkout()["small"].load()
        assert not traffic.read_keys("commits/")
        assert not traffic.read_keys("manifests/")
        assert len(traffic.reads) == 1


def test_selections_across_real_chunks(wide: tuple[Path, torch.Tensor]) -> None:
    folder, tensor = wide
    with DeltaStore(folder) as store:
        lazy = store.checkout()["w"]
        for index in (
            (slice(None), 5),
            (slice(3, None, 1000),),
            (slice(1000, 3000, 3), slice(1, 1000, 300)),
            (slice(1023, 1025),),
        ):
            assert same(lazy[index].load(), tensor[index].clone())


def test_a_whole_load_reads_small_packs_once(store: DeltaStore, folder: Path, traffic: Traffic) -> None:
    """One request for each small pack of a deep version, though many batches of chunks need parts of it."""
    state = {f"w{number}": torch.zeros(CHUNK, dtype=torch.bfloat16) for number in range(6)}
    rng = np.random.default_rng(2)
    for _ in range(6):
        store.commit(state)
        for tensor in state.values():
            tensor[torch.from_numpy(rng.integers(0, CHUNK, 5000))] += 1
    with DeltaStore(folder) as again:
        traffic.clear()
        loaded = again.checkout().load()
    assert Counter(traffic.read_keys("packs/")) == Counter(objects(folder, "packs").keys())
    with DeltaStore(folder) as again:
        traffic.clear()
        assert same(again.checkout().load(["w3"])["w3"], loaded["w3"])
        assert traffic.read_bytes("packs/") < sum(objects(folder, "packs").values()) / 2


def test_a_small_pack_that_is_damaged_or_gone_is_named(store: DeltaStore, folder: Path) -> None:
    state = {"w": torch.arange(5000).to(torch.int16), "v": torch.zeros(10)}
    store.commit(state)
    state["w"][7] += 1
    store.commit(state)
    key = next(iter(objects(folder, "packs")))
    lost = (folder / key).read_bytes()
    (folder / key).unlink()
    with DeltaStore(folder) as again, pytest.raises(IntegrityError, match=key):
        again.checkout().load()
    (folder / key).write_bytes(lost[:-1])
    with DeltaStore(folder) as again, pytest.raises(IntegrityError, match=key):
        again.checkout().load()
    (folder / key).write_bytes(lost)
    with DeltaStore(folder) as again:
        assert again.checkout().load()["w"].tolist()[7] == 8
