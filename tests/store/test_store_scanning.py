"""What a commit reads, writes and keeps: frozen tensors, unchanged versions, streams, content that is there already."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_states import bucket_objects, columns, objects, raw, same, sql
from store_traffic import Traffic

from deltastore import DeltaStore
from deltastore.errors import DeltaStoreError, IncompatibleStateError, InvalidInputError
from deltastore.tensors import TorchSource


@pytest.fixture
def live_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(name of the source, start, stop) of every read of a live tensor."""
    seen: list[tuple[str, int, int]] = []
    original = TorchSource.read

    def read(self: TorchSource, start: int, stop: int) -> Any:
        seen.append((self._name, start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(TorchSource, "read", read)
    return seen


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**16, count, np.uint16).view(np.int16)).view(torch.bfloat16)


def added(folder: Path, before: dict[str, int]) -> dict[str, int]:
    return {key: size for key, size in bucket_objects(folder).items() if key not in before}


# -- one read, no needless write --------------------------------------------------------------------------------------


def test_each_live_element_is_read_once(store: DeltaStore, live_reads: list[tuple[str, int, int]]) -> None:
    tensor = noise(2_500_000)
    state = {"a": tensor, "b": tensor[:100].clone(), "tie": tensor}
    for change in (0, 1, 0):
        tensor.view(torch.int16)[::5000] += change
        live_reads.clear()
        store.commit(state)
        chunks = [(0, 1 << 20), (1 << 20, 2 << 20), (2 << 20, 2_500_000)]
        assert sorted(live_reads) == [*(("state['a']", *chunk) for chunk in chunks), ("state['b']", 0, 100)]


def test_an_unchanged_commit_writes_its_document_only(store: DeltaStore, folder: Path, traffic: Traffic) -> None:
    state = {"w": noise(5000), "step": 1, "n": {"m": torch.arange(4)}}
    store.commit(state, files={"config.json": b"{}", "large": bytes(100_000)})
    before, rows = bucket_objects(folder), sql(folder, "SELECT count(*) FROM object")[0][0]
    traffic.clear()
    store.commit(state, "again", files={"config.json": b"{}", "large": bytes(100_000)})
    new = added(folder, before)
    assert sorted(key.split("/")[0] for key in new) == ["commits", "refs"]
    assert max(new.values()) < 1500
    assert len(traffic.writes) == 2
    assert sql(folder, "SELECT count(*) FROM object")[0][0] == rows + 1
    state["step"] = 2  # a plain value sits in the document
    before = bucket_objects(folder)
    store.commit(state, "step", files={"config.json": b"{}", "large": bytes(100_000)})
    assert sorted(key.split("/")[0] for key in added(folder, before)) == ["commits", "refs"]


def test_an_unchanged_commit_of_a_new_process_writes_its_document_only(store: DeltaStore, folder: Path) -> None:
    state = {"w": noise(1_100_000), "n": {"m": torch.arange(4)}}
    store.commit(state)
    store.close()
    before = bucket_objects(folder)
    with DeltaStore(folder) as again:
        again.commit(state)
    assert sorted(key.split("/")[0] for key in added(folder, before)) == ["commits", "refs"]


def test_frozen_parameters_cost_one_read_and_no_copy(
    store: DeltaStore, folder: Path, live_reads: list[tuple[str, int, int]], traffic: Traffic
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1100, 1000, bias=False), torch.nn.Linear(100, 10, bias=False))
    model[0].weight.requires_grad_(requires_grad=False)
    store.commit(model)
    baseline = store._open_committer()._baseline
    assert baseline.nbytes() == 1000 * 4  # the trainable one alone
    with torch.no_grad():
        model[1].weight.view(torch.int32)[::3] += 1
    before = bucket_objects(folder)
    live_reads.clear()
    traffic.clear()
    store.commit(model)
    elements = [(name, start, stop) for name, start, stop in live_reads if "0.weight" in name]
    assert sorted(elements) == [("state['0.weight']", 0, 1 << 20), ("state['0.weight']", 1 << 20, 1_100_000)]
    new = added(folder, before)
    assert sum(size for key, size in new.items() if key.startswith("packs/")) < 3000
    assert baseline.nbytes() == 1000 * 4
    assert not traffic.read_keys("packs/")
    with torch.no_grad():
        model[0].weight.view(torch.int32)[5, 5] += 1  # somebody changes it nevertheless
    with pytest.warns(UserWarning, match=r"do not require gradients have changed .*: 0\.weight"):
        store.commit(model)
    assert {name: raw(t) for name, t in store.checkout().load().items()} == {n: raw(t) for n, t in model.state_dict().items()}
    assert store.diff("main~1", "main").changed_elements == 1
    packs = [size for key, size in added(folder, before).items() if key.startswith("packs/")]
    assert sum(packs) < 10_000  # stored as a delta
    model[0].weight.requires_grad_(requires_grad=True)
    with torch.no_grad():
        model[0].weight.view(torch.int32)[6, 5] += 1
    store.commit(model)
    model[0].weight.requires_grad_(requires_grad=False)  # what it learnt before that is no surprise
    with torch.no_grad():
        model[0].weight.view(torch.int32)[7, 5] += 1
    store.commit(model)
    model[0].weight.requires_grad_(requires_grad=True)
    store.commit(model)
    assert baseline.nbytes() == (1_100_000 + 1000) * 4
    assert not store.diff("main~1", "main")


def test_no_baseline_keeps_no_copies_and_stores_the_same(store: DeltaStore, folder: Path, tmp_path: Path) -> None:
    tensor = noise(1_200_000)
    other = tmp_path / "other"
    with DeltaStore.create(other, baseline="none") as lean:
        for step in range(10):
            tensor.view(torch.int16)[step::3000] += 1
            assert store.commit({"w": tensor}).tree == lean.commit({"w": tensor}).tree
        assert lean._open_committer()._baseline.nbytes() == 0
        assert store._open_committer()._baseline.nbytes() == 2_400_000
        assert same(lean.checkout("main~3").load()["w"], store.checkout("main~3").load()["w"])
    sizes = [sum(objects(each, "packs").values()) for each in (folder, other)]
    assert sizes[0] == sizes[1]


def test_a_poked_baseline_is_noticed(store: DeltaStore) -> None:
    tensor = noise(10_000)
    store.commit({"w": tensor})
    (copy,) = store._open_committer()._baseline._tensors.values()
    copy.data[77] ^= 4  # a flipped bit in memory
    tensor.view(torch.int16)[3] += 1
    store.commit({"w": tensor})
    assert same(store.checkout().load()["w"], tensor)
    assert store.verify(read_data=True)


def test_a_failed_commit_leaves_nothing_behind_in_memory(store: DeltaStore) -> None:
    first, second = noise(10_000), noise(10_000, seed=1)
    store.commit({"a": first, "b": second})
    bits = raw(first), raw(second)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        changed = first.clone()
        changed.view(torch.int16)[:5] += 1
        yield "a", changed
        raise OSError("the disk of the trainer is gone")

    for _ in range(2):
        with pytest.raises(OSError, match="trainer"):
            store.commit(broken())
    store.commit({"a": first, "b": second})
    found = store.checkout().load()
    assert (raw(found["a"]), raw(found["b"])) == bits
    assert len(store.list_commits()) == 2
    assert store.verify(read_data=True)


def test_switching_branches_and_resetting(store: DeltaStore) -> None:
    tensor = noise(50_000)
    kept = {}
    for step in range(30):
        branch = ("main", "side", "other")[step % 3] if step else "main"
        if branch not in {ref.name for ref in store.list_refs()} and step:
            store.create_branch(branch)
        if step == 20:
            store.reset_branch("main", revision="main~2")
        tensor.view(torch.int16)[step::500] += 1
        kept[store.commit({"w": tensor}, branch=branch).id] = raw(tensor)
    for commit, bits in kept.items():
        assert raw(store.checkout(commit).load()["w"]) == bits
    assert store.verify(read_data=True)


# -- content that is there already ------------------------------------------------------------------------------------


def test_the_same_content_twice_in_one_commit(store: DeltaStore, folder: Path) -> None:
    tensor = noise(1_100_000)
    store.commit(
        {
            "a": tensor,
            "b": tensor.clone(),
            "c": tensor.view(1100, 1000).t().contiguous().t(),
            "d": tensor.view(torch.int16).clone(),
        }
    )
    assert sum(objects(folder, "packs").values()) < 1.05 * 2_200_000
    found = store.checkout().load()
    assert raw(found["a"]) == raw(found["b"]) == raw(found["c"]) == raw(found["d"]) == raw(tensor)
    assert found["a"].data_ptr() != found["b"].data_ptr()


def test_content_of_another_branch_is_not_stored_again(store: DeltaStore, folder: Path) -> None:
    tensor = noise(1_100_000)
    store.commit({"w": tensor}, branch="first")
    before = bucket_objects(folder)
    store.commit({"renamed": tensor, "more": torch.ones(3)}, branch="second")
    assert sum(size for key, size in added(folder, before).items() if key.startswith("packs/")) < 2000
    assert same(store.checkout("second").load()["renamed"], tensor)
    store.close()
    with DeltaStore(folder) as again:  # and another process finds it, too
        before = bucket_objects(folder)
        again.commit({"third": tensor}, branch="third")
        assert not [key for key in added(folder, before) if key.startswith("packs/")]
        assert same(again.checkout("third").load()["third"], tensor)


def test_a_resized_tensor_keeps_its_whole_chunks(store: DeltaStore, folder: Path) -> None:
    tensor = noise(3 << 20)
    store.commit({"w": tensor.view(-1, 1024)})
    tensor.view(torch.int16)[::1000] += 1
    store.commit({"w": tensor.view(-1, 1024)})  # deltas: the content alone would not be found again
    before = bucket_objects(folder)
    longer = torch.cat([tensor, noise(2048, seed=3)])
    store.commit({"w": longer.view(-1, 1024)})
    assert sum(size for key, size in added(folder, before).items() if key.startswith("packs/")) < 6000
    assert same(store.checkout().load()["w"], longer.view(-1, 1024))
    assert store.diff("main~1", "main").tensors[0].status == "reshaped"


def test_a_small_change_after_reopening_is_a_delta(store: DeltaStore, folder: Path) -> None:
    tensor = noise(1_100_000)
    store.commit({"w": tensor})
    store.close()
    for step in range(3):
        tensor.view(torch.int16)[step::1000] += 1
        before = bucket_objects(folder)
        with DeltaStore(folder) as again:
            again.commit({"w": tensor})
            packs = {key: size for key, size in added(folder, before).items() if key.startswith("packs/")}
            assert sum(packs.values()) < 10_000
            (key,) = packs
            assert columns(folder, key.rsplit("/", 1)[1])["span"].tolist() == [1, 1]
            assert same(again.checkout().load()["w"], tensor)


def test_a_full_copy_where_a_delta_would_be_larger(store: DeltaStore, folder: Path) -> None:
    for seed in range(3):
        before = bucket_objects(folder)
        store.commit({"w": noise(100_000, seed=seed)})
        packs = [key for key in added(folder, before) if key.startswith("packs/")]
        assert [columns(folder, key.rsplit("/", 1)[1])["span"].tolist() for key in packs] == [[0]]
        assert folder.joinpath(packs[0]).stat().st_size < 200_000 + 2000


def test_a_fold_that_would_be_large_becomes_a_full_copy(store: DeltaStore, folder: Path) -> None:
    """Each step changes an eighth of the elements at will: a delta is small, eight of them are not."""
    tensor = noise(100_000)
    spans = []
    for step in range(10):
        before = bucket_objects(folder)
        store.commit({"w": tensor})
        packs = [key.rsplit("/", 1)[1] for key in added(folder, before) if key.startswith("packs/")]
        spans.append(sorted(int(columns(folder, pack)["span"][0]) for pack in packs))
        tensor[step % 8 :: 8] = noise(12_500, seed=step + 50)
    assert spans == [[0], *[[1]] * 7, [0, 1], [1]]
    assert store.verify(read_data=True)


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10_000, 1_100_000])
def test_one_tensor_of_a_stream_is_resident(store: DeltaStore, count: int) -> None:
    alive: list[weakref.ref[Any]] = []
    most = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            deadline = time.monotonic() + 5
            while any(each() is not None for each in alive) and time.monotonic() < deadline:
                gc.collect()
                time.sleep(0.001)  # a thread may be about to let go
            most.append(sum(each() is not None for each in alive))
            memory = np.random.default_rng(number).integers(0, 2**16, count, np.uint16)
            alive.append(weakref.ref(memory))  # of the memory itself, which views of the tensor keep alive, too
            pair = f"layer.{number}", torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)
            del memory
            yield pair
            del pair

    for _ in range(2):
        store.commit(stream())
    assert most == [0] * 12
    assert {name: raw(t) for name, t in store.checkout().load().items()} == {
        f"layer.{number}": raw(noise(count, seed=number)) for number in range(6)
    }


def test_a_stream_is_the_dict_of_its_pairs(store: DeltaStore) -> None:
    model = torch.nn.Linear(4, 3)
    pairs = dict(model.named_parameters())
    assert store.commit(model.named_parameters()).tree == store.commit({n: p.detach() for n, p in pairs.items()}).tree
    assert store.commit(iter([])).tree == store.commit({}).tree


@pytest.mark.parametrize(
    ("pairs", "error", "text"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(2))], IncompatibleStateError, "'a' comes twice"),
        ([("a", torch.ones(1)), torch.ones(2)], InvalidInputError, "pairs"),
        ([("a", torch.ones(1)), ("b", 3)], IncompatibleStateError, "'b'"),
        ([(3, torch.ones(1))], InvalidInputError, "pairs"),
        ([("a", torch.ones(1), 3)], InvalidInputError, "pairs"),
        ([("\ud800", torch.ones(1))], IncompatibleStateError, "surrogate"),
        ([("a", torch.ones(1, device="meta"))], IncompatibleStateError, "meta"),
        ([("a", np.ones(1))], IncompatibleStateError, "from_numpy"),
    ],
)
def test_streams_that_are_refused(
    store: DeltaStore, folder: Path, pairs: list[Any], error: type[DeltaStoreError], text: str
) -> None:
    before = bucket_objects(folder)
    with pytest.raises(error, match=text):
        store.commit(iter(pairs))
    assert bucket_objects(folder) == before
    assert store.list_refs() == []
    assert sql(folder, "SELECT count(*) FROM object") == [(0,)]


# -- casts ------------------------------------------------------------------------------------------------------------


def test_casts_by_pattern(store: DeltaStore) -> None:
    state = {
        "layer.weight": torch.randn(5, dtype=torch.float64),
        "layer.bias": torch.randn(5),
        "head.weight": torch.randn(1_100_000),
        "count": torch.arange(3),
        "mask": torch.tensor([True, False]),
        "phase": torch.randn(2, dtype=torch.complex64),
        "turned": torch.randn(4, 6).t(),
    }
    cast = {"head.*": torch.float8_e4m3fn, "*.weight": torch.bfloat16, "*bias": torch.float32, "turned": "float16"}
    expected = {
        **state,
        "layer.weight": state["layer.weight"].bfloat16(),
        "head.weight": state["head.weight"].to(torch.float8_e4m3fn),
        "turned": state["turned"].half(),
    }
    store.commit(state, cast=cast)
    assert same(store.checkout().load(), expected)
    store.commit(iter(state.items()), cast=cast)
    assert not store.diff("main~1", "main")
    store.commit(state, cast={"*": torch.bfloat16})
    assert same(store.checkout().load(), {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()})
    assert store.checkout()["phase"].dtype is torch.complex64


def test_a_cast_that_splits_a_tie_is_refused(store: DeltaStore) -> None:
    shared = torch.randn(3)
    with pytest.raises(InvalidInputError, match="one tied tensor"):
        store.commit({"a": shared, "b": shared}, cast={"a": torch.bfloat16})
    store.commit({"a": shared, "b": shared}, cast={"*": torch.bfloat16})
    found = store.checkout().load()
    assert found["a"].data_ptr() == found["b"].data_ptr()
