"""SIGKILL at every system call that changes a file: below our own code, SQLite's too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kill_probes import SCENARIOS, kill_at_calls, list_calls
from tiny_store import prepare, refs_of
from warm_process import WarmProcess

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", ["commit", "create", "reset a branch"])
def test_kill_at_every_call(scenario: str, warm_above_shim: WarmProcess, work: Path) -> None:
    warm, template = warm_above_shim, work / "template"
    old = None
    if SCENARIOS[scenario].commits is not None:
        warm.call(prepare, folder=template, commits=SCENARIOS[scenario].commits)
        old = warm.call(refs_of, folder=template)
    kinds = warm.call(list_calls, scenario=scenario, template=template)
    assert len(kinds) > 40
    moments: list[dict[str, Any]] = [
        {"number": number, "mode": mode}
        for number, kind in enumerate(kinds, 1)
        for mode in (("kill", "torn") if kind == "w" and number % 3 == 0 else ("kill",))
    ]
    moments.append({"number": len(kinds) + 1, "mode": "kill"})
    for at, moment in enumerate(moments):
        moment["whole"] = at % 4 == 0 or moment is moments[-1]  # opening what is left, exactly, is checked every time
    results = warm.share(kill_at_calls, moments, scenario=scenario, template=template)
    assert [result["killed"] for result in results] == [True] * (len(results) - 1) + [False]
    landed = [result["refs"] != old for result in results]
    assert landed == sorted(landed), "what had landed at one call was gone at a later one"
    assert landed[0] is False
    assert landed[-1] is True
