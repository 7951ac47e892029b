"""Data loaders whose processes read a store while its commits are on their way."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pending_steps import later, steps
from store_checks import assert_all_exact, assert_log_dense
from tiny_model import arrays_at, state_at
from torch.utils.data import DataLoader, Dataset

from deltastore import DeltaStore
from deltastore.snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
ITEMS = 12


class Steps(Dataset[torch.Tensor]):
    """The weight of one version, again and again, and how far the branch is.

    Args:
        where: the snapshot is opened "here", in each "worker" once, or for each "item".
    """

    def __init__(self, store: DeltaStore, where: Literal["here", "worker", "item"]) -> None:
        self.store = store
        self.where = where
        self.snapshot: Snapshot | None = store.checkout("fixed") if where == "here" else None

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, item: int) -> torch.Tensor:
        snapshot = self.snapshot or self.store.checkout("fixed")
        if self.where == "worker":
            self.snapshot = snapshot
        rows: torch.Tensor = snapshot["weight"][item : item + 1].load()
        assert self.store.get_commit("main").metadata["step"] >= 3
        return rows


def loader(store: DeltaStore, where: Literal["here", "worker", "item"], start_method: str) -> Iterator[Any]:
    context = multiprocessing.get_context(start_method)
    return iter(DataLoader(Steps(store, where), batch_size=4, num_workers=2, multiprocessing_context=context))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no forks here")
@pytest.mark.parametrize("where", ["here", "worker", "item"])
def test_forked_loaders(where: Literal["here", "worker", "item"], work: Path) -> None:
    with DeltaStore.create(work / "store") as store:
        for step in range(4):
            later(store, step)
        store.create_tag("fixed", revision="main~1")
        pending = [later(store, step) for step in (4, 5)]
        batches = loader(store, where, "fork")
        found = []
        for batch in batches:
            found.append(batch)
            pending.append(later(store, 3 + len(pending) + 1))
        assert torch.cat(found)[:, 0].numpy().tobytes() == arrays_at(2)["weight"][:ITEMS].tobytes()
        assert [each.result().metadata["step"] for each in pending] == list(range(4, 4 + len(pending)))
        assert steps(store) == list(range(4 + len(pending)))
        assert_all_exact(store)
        assert_log_dense(store)


@pytest.mark.slow
def test_spawned_loaders(work: Path) -> None:
    """The store goes to them as its address."""
    with DeltaStore.create(work / "store") as store:
        for step in range(4):
            later(store, step)
        store.create_tag("fixed", revision="main~1")
        pending = [later(store, step) for step in (4, 5)]
        found = []
        for batch in loader(store, "worker", "spawn"):
            found.append(batch)
            pending.append(store.commit(state_at(6), metadata={"step": 6}, wait=False))
        assert torch.cat(found)[:, 0].numpy().tobytes() == arrays_at(2)["weight"][:ITEMS].tobytes()
        assert all(each.result() for each in pending)
        assert_all_exact(store)
