"""No room for a commit: StoreFullError, nothing has changed, and the next commit works once there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_probes import (
    commit_above_size_limit,
    commit_more_than_fits,
    commit_on_a_small_file_system,
    fail_at_calls,
)
from kill_probes import list_calls
from tiny_store import prepare
from warm_process import WarmProcess


def test_a_limit_on_the_size_of_files(warm: WarmProcess, work: Path) -> None:
    warm.call(commit_above_size_limit, folder=work / "store")


def test_a_small_file_system(warm: WarmProcess, work: Path) -> None:
    if not warm.call(commit_on_a_small_file_system, mount_point=work / "disk"):
        pytest.skip("this user may not mount a file system in a namespace of its own")


def test_more_than_fits(warm: WarmProcess, work: Path) -> None:
    if not warm.call(commit_more_than_fits, mount_point=work / "disk"):
        pytest.skip("this user may not mount a file system in a namespace of its own")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "broken"])
def test_a_disk_that_fails_at_every_third_call(mode: str, warm_above_shim: WarmProcess, work: Path) -> None:
    """From the n-th call on, no room to write; or one input/output error, and no sync after it."""
    template = work / "template"
    warm_above_shim.call(prepare, folder=template, commits=3)
    kinds = warm_above_shim.call(list_calls, scenario="commit", template=template)
    numbers = [number for number, kind in enumerate(kinds, 1) if mode == "broken" or kind in "wt"]
    moments = [{"template": template, "number": number, "mode": mode} for number in numbers[::3]]
    outcomes = warm_above_shim.share(fail_at_calls, moments)
    assert {"landed", "StoreFullError" if mode == "full" else "StorageError"} <= set(outcomes)
    allowed = {"landed", "StoreFullError"} if mode == "full" else {"landed", "StorageError", "landed, StorageError"}
    assert set(outcomes) <= allowed
