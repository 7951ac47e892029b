"""SIGKILL at every system call that changes a file: below our own code, SQLite's too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from probes import SCENARIOS, count_calls, kill_at_calls, prepare, refs_of
from warm_process import WarmProcess

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", ["commit", "create", "reset a branch"])
def test_kill_at_every_call(scenario: str, warm_above_shim: WarmProcess, work: Path) -> None:
    warm, template = warm_above_shim, work / "template"
    old = None
    if SCENARIOS[scenario].commits is not None:
        warm.call(prepare, folder=template, commits=SCENARIOS[scenario].commits)
        old = warm.call(refs_of, folder=template)
    calls = warm.call(count_calls, scenario=scenario, template=template)
    assert calls > 40
    # every fourth store that is left is checked as a whole; torn writes alternate with whole ones
    moments: list[dict[str, Any]] = [
        {"number": number, "mode": mode, "whole": (2 * number + (mode == "torn")) % 4 == 0}
        for number in range(1, calls + 1)
        for mode in ("kill", "torn")
    ]
    moments.append({"number": calls + 1, "mode": "kill", "whole": True})
    results = warm.share(kill_at_calls, moments, scenario=scenario, template=template)
    assert [result["killed"] for result in results] == [True] * (len(results) - 1) + [False]
    landed = [result["refs"] != old for result in results]
    assert landed == sorted(landed), "what had landed at one call was gone at a later one"
    assert landed[0] is False
    assert landed[-1] is True
