"""SIGKILL before and after every bucket and SQL operation: the version before or the version after, never another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kill_probes import SCENARIOS, kill_at_operations, list_operations
from tiny_store import prepare, refs_of
from warm_process import WarmProcess

pytestmark = pytest.mark.slow

READING = ("get", "stat", "list", "sql BEGIN", "sql SELECT", "sql PRAGMA")
EXPECTED_PUTS = {  # that each scenario does what its name says
    "commit": {"packs": 1, "refs/log": 1},
    "first commit": {"packs": 1, "refs/log": 1},
    "ladder commit": {"packs": 1, "refs/log": 1},
    "commit in many packs": {"packs": 4, "refs/log": 1},
    "commit with a ref snapshot": {"packs": 1, "refs/log": 1, "refs/snapshot": 1},
    "two commits in the background": {"packs": 2, "refs/log": 2},
    "create": {"epochs": 1, "store.json": 1},
    "create a branch": {"refs/log": 1},
    "reset a branch": {"refs/log": 1},
    "delete a branch": {"refs/log": 1},
}
KILLED_WHILE_READING = ("commit", "create", "reset a branch")  # the others read what these read


def moments(labels: list[str], while_reading: bool) -> list[dict[str, Any]]:
    """The moments to be killed at: before each operation, and right after those outside of SQL and each COMMIT.

    (Between a statement and the next operation nothing happens.) Moments that follow an operation that changes something
    leave a store of their own, which is checked as a whole; those that follow a reading are left out on request. The last
    moment, before an operation that there is not, is never reached.
    """
    found: list[dict[str, Any]] = []
    whole, writing = True, False
    for number, label in enumerate(labels, 1):
        found.append({"number": number, "after": False, "whole": whole})
        writing = label == "sql BEGIN IMMEDIATE" or (writing and label != "sql BEGIN")
        whole = writing if label == "sql COMMIT" else not label.startswith(READING)
        if label == "sql COMMIT" or not label.startswith("sql "):
            found.append({"number": number, "after": True, "whole": whole})
    kept = [moment for moment in found if moment["whole"] or while_reading]
    return [*kept, {"number": len(labels) + 1, "after": False, "whole": True}]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kill_at_every_operation(scenario: str, warm: WarmProcess, work: Path) -> None:
    template = work / "template"
    old = None
    if SCENARIOS[scenario].commits is not None:
        warm.call(prepare, folder=template, commits=SCENARIOS[scenario].commits)
        old = warm.call(refs_of, folder=template)
    labels = warm.call(list_operations, scenario=scenario, template=template)
    assert "sql COMMIT" in labels
    puts = [label for label in labels if label.startswith("put ")]
    for prefix, count in EXPECTED_PUTS[scenario].items():
        assert sum(label.startswith(f"put {prefix}") for label in puts) >= count, puts
    at = moments(labels, scenario in KILLED_WHILE_READING)
    results = warm.share(kill_at_operations, at, scenario=scenario, template=template)
    landed = [result["refs"] != old for result in results]
    assert landed[0] is False
    assert landed[-1] is True
    if "background" in scenario:  # what two threads do is not in the same order every time: any moment, any number of commits
        assert len({str(result["refs"][:1]) for result in results if result["killed"]} - {str(old[:1])}) > 1
        assert [result["killed"] for result in results].count(True) > len(results) // 2
        return
    assert [result["killed"] for result in results] == [True] * (len(results) - 1) + [False]
    assert landed == sorted(landed), "what had landed at one moment was gone at a later one"
