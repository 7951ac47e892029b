"""SIGKILL before and after every bucket and SQL operation: the version before or the version after, never another."""

from __future__ import annotations

from pathlib import Path

import pytest
from probes import SCENARIOS, kill_at_operation, list_operations, prepare
from warm_process import WarmProcess

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kill_at_every_operation(scenario: str, warm: WarmProcess, work: Path) -> None:
    template = work / "template"
    commits = SCENARIOS[scenario].commits
    if commits is not None:
        warm.call(prepare, folder=template, commits=commits)
    labels = warm.call(list_operations, scenario=scenario, template=template)
    assert any(label.startswith("put ") for label in labels)
    assert "sql COMMIT" in labels
    points = [(number, after) for number in range(1, len(labels) + 2) for after in (False, True)]
    results = warm.call_all(
        kill_at_operation,
        [{"scenario": scenario, "template": template, "number": n, "after": after} for n, after in points],
    )
    survivors = [point for point, result in zip(points, results, strict=True) if not result["killed"]]
    assert survivors == [(len(labels) + 1, False), (len(labels) + 1, True)]
    landed = [result["landed"] for result in results]
    assert landed == sorted(landed), "what had landed at one operation was gone at a later one"
    assert landed[0] is False
    assert landed[-1] is True
    assert len({str(result["after"]) for result in results if not result["landed"]}) == 1
