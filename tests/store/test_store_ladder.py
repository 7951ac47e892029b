"""Many commits: every version exact, chains short, manifests closed, and old packs dispensable."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import chain, columns, manifest_rows, objects, pack_contents, raw, sql

from deltastore import DeltaStore

COMMITS = 101


class Training:
    """A small model whose tensors change in different ways."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)
        torch.manual_seed(5)
        self.state = {
            "bf16": torch.randn(300, 200).bfloat16(),
            "fp32": torch.randn(5000),
            "now and then": torch.randn(4000).bfloat16(),
            "dense": torch.randn(3000).half(),
            "frozen": torch.randn(2000).bfloat16(),
            "step": torch.tensor(0),
            "two chunks": torch.zeros((1 << 20) + 5, dtype=torch.uint8),
        }

    def step(self, number: int) -> None:
        self._nudge("bf16", 0.01)
        self._nudge("fp32", 0.02)
        self._nudge("dense", 0.9)
        if number % 5 == 0:
            self._nudge("now and then", 0.01)
        if number == 50:  # one new start
            self.state["now and then"].copy_(torch.randn(4000))
        self.state["step"] += 1
        self.state["two chunks"][number] = number
        self.state["two chunks"][-1] = number // 3

    def _nudge(self, name: str, share: float) -> None:
        tensor = self.state[name]
        words = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)
        places = torch.from_numpy(self._random.integers(0, words.numel(), max(1, int(share * words.numel()))))
        words[places] += torch.from_numpy(self._random.choice([-1, 1], len(places))).to(words.dtype)

    def bits(self) -> dict[str, bytes]:
        return {name: raw(tensor) for name, tensor in self.state.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, bytes]]]:
    folder, training, bits = tmp_path_factory.mktemp("trained") / "store", Training(), []
    store = DeltaStore.create(folder)
    for number in range(COMMITS):
        if number in (30, 61):  # a new process: nothing in memory
            store.close()
            store = DeltaStore(folder)
        store.commit(training.state, f"step {number}", metadata={"step": number})
        bits.append(training.bits())
        training.step(number + 1)
    store.close()
    return folder, bits


def test_every_version_is_exact(trained: tuple[Path, list[dict[str, bytes]]]) -> None:
    with DeltaStore(trained[0], trust="none") as store:
        for number, expected in enumerate(trained[1]):
            found = store.checkout(f"main~{COMMITS - 1 - number}").load()
            assert {name: raw(tensor) for name, tensor in found.items()} == expected, f"step {number}"


def test_chains_are_short_and_manifests_name_exactly_their_packs(trained: tuple[Path, list[dict[str, bytes]]]) -> None:
    folder = trained[0]
    cache: dict[str, Any] = {}
    deepest = 0
    with DeltaStore(folder) as store:
        for number in range(COMMITS):
            for table, rows in manifest_rows(folder, store, f"main~{COMMITS - 1 - number}"):
                touched = set()
                for pack_id, row in rows:
                    entries = chain(folder, pack_id, row, cache)
                    spans = [span for *_, span in entries]
                    assert spans[-1] == 0
                    assert spans[:-1] == sorted(spans[:-1])
                    assert 0 not in spans[:-1]
                    assert max(Counter(spans[:-1]).values(), default=0) <= 7, f"step {number}: {spans}"
                    deepest = max(deepest, len(spans) - 1)
                    touched |= {each for each, *_ in entries}
                assert touched == table, f"step {number}"
    assert 12 <= deepest <= 15  # at 63 = 7 · 8 + 7: 14 deltas


def test_each_span_has_packs_of_its_own(trained: tuple[Path, list[dict[str, bytes]]]) -> None:
    folder = trained[0]
    spans: Counter[int] = Counter()
    for key in objects(folder, "packs"):
        found = set(columns(folder, key.rsplit("/", 1)[1])["span"].tolist())
        assert len(found) == 1, key
        spans[found.pop()] += 1
    assert set(spans) == {0, 1, 8, 64}
    assert spans[64] == 1
    assert spans[8] == 12
    assert spans[1] == COMMITS - 1


def test_edges_are_those_of_the_documents(trained: tuple[Path, list[dict[str, bytes]]]) -> None:
    """commit → structure, manifests and packs it brought; manifest → every pack of its table; nothing else."""
    folder = trained[0]
    found = set(sql(folder, "SELECT s.key, t.key FROM edge JOIN object s ON s.id = source_id JOIN object t ON t.id = target_id"))
    expected = set()
    with DeltaStore(folder) as store:
        for number in range(COMMITS):
            record = store._index.commits([store.get_commit(f"main~{number}").id]).popitem()[1]
            placement = store._versions.get(record.id).document.placement
            places = [placement.structure, *placement.manifests, *placement.packs]
            expected |= {(record.object_key, place.key) for place in places}
            for place, (table, _) in zip(placement.manifests, manifest_rows(folder, store, record.id), strict=True):
                expected |= {(place.key, f"packs/{pack_id[-2:]}/{pack_id}") for pack_id in table}
    assert found == expected


def test_the_last_version_survives_when_all_others_are_forgotten(
    trained: tuple[Path, list[dict[str, bytes]]], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(trained[0], folder)
    with DeltaStore(folder) as store:
        last = store.get_commit("main")
        brought = {}
        for commit in store.list_commits("main"):
            for place in store._versions.get(commit.id).document.placement.packs:
                brought[place.key] = commit.id
    old = sql(folder, 'SELECT object_id FROM "commit" WHERE id != ?', last.id)
    assert len(old) == COMMITS - 1
    sql(folder, 'DELETE FROM "commit" WHERE id != ?', last.id)
    for row in old:
        sql(folder, "DELETE FROM object WHERE id = ?", *row)
    for kind in ("manifest", "structure", "pack"):
        sql(folder, "DELETE FROM object WHERE kind = ? AND id NOT IN (SELECT target_id FROM edge)", kind)
    kept = {key for (key,) in sql(folder, "SELECT key FROM object")}
    needed = {brought[key] for key in kept if key.startswith("packs/")}
    assert len(needed) <= 22
    removed = 0
    for kind in ("packs", "manifests", "structures", "commits"):
        for key in objects(folder, kind):
            if key not in kept:
                (folder / key).unlink()
                removed += 1
    assert removed > 2 * COMMITS
    with DeltaStore(folder, trust="none") as store:
        found = store.checkout("main").load()
        assert {name: raw(tensor) for name, tensor in found.items()} == trained[1][-1]
        report = store.verify("main", read_data=True)
        assert report, report.problems


def test_a_step_costs_little(trained: tuple[Path, list[dict[str, bytes]]]) -> None:
    """Documents and columns of a steady commit stay small, and unchanged tensors cost nothing."""
    folder = trained[0]
    with DeltaStore(folder) as store:
        raw_bytes = store.checkout().nbytes
        stats = store.stats()
    assert stats.commits == COMMITS
    assert stats.logical_bytes == pytest.approx(raw_bytes * COMMITS, rel=0.01)
    assert stats.stored_bytes < stats.logical_bytes / 40
    documents = [size for kind in ("commits", "manifests") for size in objects(folder, kind).values()]
    assert max(documents) < 8192
    assert len(objects(folder, "structures")) == 1


def test_folds_from_memory_and_from_the_store_are_the_same(tmp_path: Path) -> None:
    """A store that is opened anew for each commit holds no steps in memory and sums what it reads."""
    for name, reopened in (("kept", False), ("reopened", True)):
        training, folder = Training(), tmp_path / name
        store = DeltaStore.create(folder)
        for number in range(18):
            store.commit(training.state, str(number))
            training.step(number)
            if reopened:
                store.close()
                store = DeltaStore(folder)
        store.close()
    kept = pack_contents(tmp_path / "kept")
    assert {span for pack in kept for span in np.frombuffer(pack["span"], np.uint32)} == {0, 1, 8}
    assert kept == pack_contents(tmp_path / "reopened")
