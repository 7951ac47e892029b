"""The documentation: its code runs, its links lead somewhere, its reference is up to date and complete.

A fenced block is run when its info string is `python` or `sh` alone; blocks of a page run in their order, in one namespace and
one new folder. After the language may follow `fragment` (shown only; its syntax is checked) or `not-yet` (about what this version
does not have; the same).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import deltastore
from deltastore.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", DOCS / "index.md", DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
EXPORT = re.compile(r"^export (?P<name>\w+)=(?P<value>\S+)$", re.MULTILINE)
KINDS = {"", "text", "python", "sh", "python fragment", "sh fragment", "python not-yet", "sh not-yet"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    place: str
    info: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(f"{page.relative_to(ROOT)}:{line}", match["info"].strip(), match["text"]))
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_the_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("DELTASTORE_URL", raising=False)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        assert block.info in KINDS, f"{block.place}: unknown kind of block {block.info!r}"
        language, _, how = block.info.partition(" ")
        if language == "python":
            source = ast.parse(block.text, block.place)
            if not how:
                pytest.importorskip("torch")
                exec(compile(source, block.place, "exec"), namespace)
        elif language == "sh":
            run_shell(block, only_parse=bool(how))
            for each in EXPORT.finditer("" if how else block.text):  # holds for the blocks after it
                monkeypatch.setenv(each["name"], each["value"])


def run_shell(block: Block, *, only_parse: bool) -> None:
    line = ["bash", "-n"] if only_parse else ["bash", "-eu", "-o", "pipefail"]
    result = subprocess.run(line, input=block.text, capture_output=True, text=True)
    assert result.returncode == 0, f"{block.place}: exit code {result.returncode}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_every_guide_is_reachable() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [name_of(page) for page in GUIDES[2:] if f"({page.relative_to(DOCS)})" not in index] == []


def test_the_reference_is_up_to_date() -> None:
    line = [sys.executable, str(DOCS / "build_reference.py"), "--check"]
    result = subprocess.run(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_the_reference_is_complete() -> None:
    python = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    names = [name for name in deltastore.__all__ if not name.startswith("__")]
    assert [name for name in names if f"`{name}`" not in python] == []
    commands = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"## `deltastore {name}`" not in commands] == []


def test_every_command_is_in_a_guide() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in GUIDES)
    assert [name for name in COMMANDS if f"deltastore {name}" not in text] == []


def test_pictures_are_small() -> None:
    pictures = list((DOCS / "images").iterdir())
    assert pictures
    assert [name_of(path) for path in pictures if path.stat().st_size > 200_000] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
