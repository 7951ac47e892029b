from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Run, run_command, write_checkpoint

from deltastore import DeltaStore


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from outside."""
    for name in ("DELTASTORE_URL", "DELTASTORE_INDEX_URL", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with commits of steps 0, 1 and 2 on `main`, and the tag `v1` at step 1."""
    folder = tmp_path_factory.mktemp("template")
    with DeltaStore.create(folder / "store") as store:
        for step in range(3):
            source = write_checkpoint(folder / "checkpoint", step)
            metadata = {"step": step, "loss": 1.5 / (step + 1)}
            store.commit(source, f"step {step}\n\nmore", metadata=metadata, tag="v1" if step == 1 else None, author="ada@lab")
    return folder / "store"


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A copy of the template that may be changed."""
    return Path(shutil.copytree(template, tmp_path / "store"))


@pytest.fixture
def ids(template: Path) -> list[str]:
    """Commit ids by step."""
    with DeltaStore(template, read_only=True) as store:
        return [commit.id for commit in reversed(store.list_commits())]


@pytest.fixture
def run(folder: Path) -> Run:
    """Run a command on the store."""
    return lambda *arguments, **options: run_command("-s", folder, *arguments, **options)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal, 100 columns wide: ours, and that of the command."""
    pty = pytest.importorskip("pty")
    termios = pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)
