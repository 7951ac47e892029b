"""Rich reprs: escaped, bounded, self-contained, and without reading a tensor."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltastore import DeltaStore, display
from deltastore.buckets.folder import FolderBucket

EVIL = "<script>alert('x')</script>\x1b[31m\u202e"


class Checker(HTMLParser):
    """Tags in balance, and nothing but tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> str:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert checker.seen <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "p"}
    assert checker.attributes <= {"style", "class"}
    assert "\x1b" not in html
    assert "\u202e" not in html
    return html


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DeltaStore:
    folder = tmp_path_factory.mktemp("display")
    opened = DeltaStore.create(folder / "store")
    for step in range(2):
        tensors = {f"layer.{i:03}.{EVIL}": np.full((4, 5), i + step * (i < 30), np.float32) for i in range(50)}
        save_file(tensors, folder / "model.safetensors")
        files = {f"file-{i}": b"%d" % (i * step) for i in range(30)}
        opened.commit(folder / "model.safetensors", EVIL, metadata={EVIL: EVIL, "step": step}, files=files, author=EVIL)
    for i in range(30):
        opened.create_tag(f"v{i:02}")
    return opened


def test_store(store: DeltaStore) -> None:
    html = check(store._repr_html_())
    assert "v00" in html
    assert "v25" not in html
    assert "… 11 more" in html
    assert repr(store) == f"DeltaStore({store.address!r})"


def test_a_closed_store(tmp_path: Path) -> None:
    with DeltaStore.create(tmp_path) as store:
        assert "<table>" not in check(store._repr_html_())  # no refs yet
    assert "closed" in check(store._repr_html_())


def test_commit(store: DeltaStore) -> None:
    commit = store.get_commit()
    html = check(commit._repr_html_())
    assert commit.short_id in html
    assert "&lt;script&gt;" in html
    assert "metadata step" in html
    assert repr(commit).startswith(f'Commit({commit.short_id} "<script>')
    assert len(repr(commit)) < 200


def test_snapshot_reads_no_tensors(store: DeltaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = store.checkout()
    monkeypatch.delattr(FolderBucket, "get")
    monkeypatch.delattr(FolderBucket, "get_range")
    html = check(snapshot._repr_html_())
    assert "layer.019" in html
    assert "layer.020" not in html
    assert "… 30 more" in html
    assert "… 10 more" in html  # files
    assert "[4, 5]" in html
    assert "50, 4.00 kB" in html


def test_diff(store: DeltaStore) -> None:
    diff = store.diff("main~1", "main")
    html = check(diff._repr_html_())
    assert "600 of 1000 elements (60 %)" in html
    assert "… 10 more" in html
    assert repr(diff) == (
        f"Diff({diff.before.short_id}..{diff.after.short_id}, 600 of 1000 elements in 30 tensors, {len(diff.files)} files)"
    )
    assert "0 of 1000 elements (0 %)" in check(store.diff("main", "main")._repr_html_())


def test_long_texts_are_cut() -> None:
    html = check(display.card("x" * 10_000, [("y" * 10_000, "z" * 10_000)], display.table(("a",), [("w" * 10_000,)] * 50, 50)))
    assert len(html) < 10_000


def test_rows_are_read_no_further_than_shown() -> None:
    rows = ((i,) for i in range(10**12))
    assert "… 999999999980 more" in check(display.table(("n",), rows, 10**12))
    assert next(rows)[0] <= display.ROWS + 1
