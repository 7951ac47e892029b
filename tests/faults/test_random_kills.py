"""SIGKILL at random moments of a process that commits in a loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_probes import random_interrupts, random_kills
from warm_process import WarmProcess

pytestmark = pytest.mark.slow
STORES = 8


@pytest.mark.parametrize(("background", "kills"), [(False, 120), (True, 80)])
def test_random_kills(background: bool, kills: int, warm: WarmProcess, work: Path) -> None:
    shares = [
        {"folder": work / f"store-{seed}", "kills": kills // STORES, "seed": seed, "background": background}
        for seed in range(STORES)
    ]
    results = warm.share(random_kills, shares)
    commits, promised = (sum(result[key] for result in results) for key in ("commits", "promised"))
    assert commits >= kills  # one by each survivor's check, and those of the victims
    assert promised > 0, "every victim was killed before its first commit: give them more time"


@pytest.mark.parametrize("seed", range(2))
def test_random_interrupts(seed: int, warm: WarmProcess, work: Path) -> None:
    found = warm.call(random_interrupts, folder=work / "store", interrupts=40, seed=seed, timeout=200)
    assert found["commits"] > 0
