"""examples/resume.py with a tiny model: killed, resumed, and equal to a run that was not interrupted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deltastore import DeltaStore

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return importlib.import_module("resume")


def test_an_interrupted_run_equals_one_that_ran_through(
    resume: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["resume.py", "--tiny", "--steps", "6", "--interruptions", "2", "--seed", "1"])
    assert resume.main() == 0
    printed = capsys.readouterr().out
    assert "steps                6, killed after steps" in printed
    assert "bit for bit equal    yes" in printed


def test_a_difference_is_seen(resume: ModuleType, tmp_path: Path) -> None:
    with DeltaStore.create(tmp_path / "store") as store:
        for branch in ("straight", "interrupted"):
            store.commit({"w": torch.ones(3), "step": 1}, branch=branch, metadata={"loss": 0.5, "step": 1})
    assert resume.judge(str(tmp_path / "store"), [], 0.0).equal
    for number, (state, loss) in enumerate([({"w": torch.ones(3), "step": 2}, 0.5), ({"w": torch.zeros(3), "step": 1}, 0.5)]):
        with DeltaStore(tmp_path / "store") as store:
            store.commit({"w": torch.ones(3), "step": 1}, branch="straight", metadata={"loss": loss, "step": 2})
            store.commit(state, branch="interrupted", metadata={"loss": loss, "step": 2})
        assert not resume.judge(str(tmp_path / "store"), [], 0.0).equal, number
