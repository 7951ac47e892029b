"""Stores of the tiny model: what tests and their processes do to them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from store_checks import assert_exact
from tiny_model import write_file

from deltastore import DeltaStore
from deltastore.errors import StoreNotFoundError


def commit_step(store: DeltaStore, step: int, **options: Any) -> Any:
    """Commit the tensors of a step, from a file: this process has no torch."""
    with tempfile.TemporaryDirectory(dir=Path(store.address).parent) as folder:
        return store.commit(write_file(Path(folder) / "model.safetensors", step), metadata={"step": step}, **options)


def head_step(store: DeltaStore, branch: str = "main") -> int:
    """The step of a branch, -1 when there is none."""
    if all(ref.name != branch for ref in store.list_refs()):
        return -1
    return int(store.get_commit(branch).metadata["step"])


def commit_next(store: DeltaStore, branch: str = "main") -> int:
    """Commit the step after that of the head; returns it."""
    step = head_step(store, branch) + 1
    commit_step(store, step, branch=branch)
    return step


def prepare(folder: str, commits: int) -> None:
    """A store with this many commits on `main`, and a branch at the first one if there is one."""
    with DeltaStore.create(folder) as store:
        for _ in range(commits):
            commit_next(store)
        if commits:
            store.create_branch("spare", revision=f"main~{commits - 1}")


def refs_of_open(store: DeltaStore) -> list[str]:
    """Every ref, the commit it names and its step; these versions are exact."""
    return [f"{ref.name} {ref.commit_id} {assert_exact(store, ref.name)}" for ref in store.list_refs()]


def refs_of(folder: str) -> list[str] | None:
    """See `refs_of_open`; None when there is no store."""
    try:
        with DeltaStore(folder) as store:
            return refs_of_open(store)
    except StoreNotFoundError:
        return None


def copy_store(template: str, work: str) -> str:
    """A copy of a store, in the folder `work`; just its place when there is no such store."""
    folder = str(Path(work) / "store")
    if Path(template).exists():
        shutil.copytree(template, folder)
    return folder
