"""A process with an open store forks: whatever the child does, nothing breaks on either side."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_probes import fork_while_committing, fork_with_open_store, fork_with_pending_commits
from warm_process import WarmProcess

CHILDREN = ["os._exit", "sys.exit", "close", "read", "commit to a branch", "commit to main", "open anew"]


@pytest.mark.parametrize("child", CHILDREN)
def test_fork_with_an_open_store(child: str, warm: WarmProcess, work: Path) -> None:
    warm.call(fork_with_open_store, folder=work / "store", child=child)


@pytest.mark.parametrize("child", [*CHILDREN, "commit in the background"])
def test_fork_with_pending_commits(child: str, warm: WarmProcess, work: Path) -> None:
    assert warm.call(fork_with_pending_commits, folder=work / "store", child=child, forks=6) == 10


@pytest.mark.slow
@pytest.mark.parametrize("child", ["os._exit", "read", "commit to a branch", "open anew"])
def test_fork_while_a_thread_commits(child: str, warm: WarmProcess, work: Path) -> None:
    assert warm.call(fork_while_committing, folder=work / "store", child=child, forks=30) > 5
