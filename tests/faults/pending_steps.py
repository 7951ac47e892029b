"""Steps of the tiny model, committed in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tiny_model import state_at

from deltastore import DeltaStore
from deltastore.pending import PendingCommit


def later(store: DeltaStore, step: int, **options: Any) -> PendingCommit:
    """Commit a step of the tiny model in the background."""
    return store.commit(state_at(step), f"step {step}", metadata={"step": step}, wait=False, **options)


def steps(store: DeltaStore, branch: str = "main") -> list[int]:
    """Steps of a branch, oldest first."""
    return [commit.metadata["step"] for commit in reversed(store.list_commits(branch))]


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a function on a thread; its outcome appears in the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
