"""Tensors that change while they are committed, and a baseline that is not what it should be."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import state_at

from deltastore import DeltaStore
from deltastore.commit import Committer

pytestmark = pytest.mark.filterwarnings("ignore:parameters that do not require gradients have changed")  # here they do


def words_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor, as integers of its own width."""
    integers = tensor.detach().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    return np.asarray(integers.numpy()).reshape(-1)


def live_state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "large": torch.randn((1 << 20) + 5000).bfloat16(),  # two chunks
        "small": torch.randn(5000),
        "frozen": torch.nn.Parameter(torch.randn(20_000).bfloat16(), requires_grad=False),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("baseline", "count"), [("ram", 50), ("none", 20)])
def test_tensors_that_a_thread_flips(baseline: str, count: int, work: Path) -> None:
    state = live_state()
    words = [words_of(tensor) for tensor in state.values()]
    before = [array.copy() for array in words]
    stop = threading.Event()
    flips = 0

    def flip() -> None:
        nonlocal flips
        chance = np.random.default_rng(5)
        while not stop.is_set():
            array = words[flips % len(words)]
            array[chance.integers(0, len(array), 1 + len(array) // 100)] ^= 1 << (flips % 7)
            flips += 1

    thread = threading.Thread(target=flip)
    with DeltaStore.create(work / "store", baseline=baseline, trust="none") as store:
        thread.start()
        try:
            commits = [store.commit(state, metadata={"step": step}) for step in range(count)]
        finally:
            stop.set()
            thread.join()
        assert flips > count
        assert any((array != old).any() for array, old in zip(words, before, strict=True))
        trees = {commit.tree for commit in commits}
        assert len(trees) > count // 2, "hardly anything changed between the commits"
        report = store.verify(read_data=True)
        assert report, report.problems
        for commit in commits[::7]:
            assert set(store.checkout(commit.id).load()) == set(state)
        # and a quiet commit on top of all that is exact
        last = store.checkout(store.commit(state).id).load()
        assert all(np.array_equal(words_of(last[name]), words_of(state[name])) for name in state)


def committer_of(store: DeltaStore) -> Committer:
    assert store._committer is not None
    return store._committer


def test_a_byte_poked_into_the_baseline(work: Path) -> None:
    """Bytes of the private copy that change without notice are seen, and the chunk's base is read from the store."""
    state = live_state()
    chance = np.random.default_rng(9)
    with DeltaStore.create(work / "store", trust="none") as store:
        store.commit(state)
        for step in range(20):
            large = words_of(state["large"])
            large[chance.integers(0, len(large), 100)] += 1
            words_of(state["small"])[step] += 1
            copies = {path: each.data for path, each in committer_of(store)._baseline._tensors.items() if each.data is not None}
            assert len(copies) == 2
            for copy in copies.values():
                copy[chance.integers(0, len(copy), 1 + step)] ^= 0x5A
            if step % 3 == 2:  # also where the live tensor has not changed at all
                copies[("large",)][-1] ^= 1
            commit = store.commit(state, metadata={"step": step})
            found = store.checkout(commit.id).load()
            assert all(np.array_equal(words_of(found[name]), words_of(state[name])) for name in state)
        report = store.verify(read_data=True)
        assert report, report.problems


def test_a_source_that_changes_while_it_is_read_is_read_once(work: Path) -> None:
    """Every version is what one reading gave, also when a second one would have given something else."""
    with DeltaStore.create(work / "store", trust="none") as store:
        state = state_at(0)
        for step in range(10):
            weight = words_of(state["weight"])

            def stream(weight: Any = weight, step: int = step) -> Any:
                yield "weight", state["weight"]
                weight[step::17] += 1  # after the first tensor was taken
                yield "again", state["weight"]

            commit = store.commit(stream(), metadata={"step": step})
            loaded = store.checkout(commit.id).load()
            assert np.array_equal(words_of(loaded["again"]), weight)
            changed = weight.copy()
            changed[step::17] -= 1
            assert np.array_equal(words_of(loaded["weight"]), changed)
        assert store.verify(read_data=True)
