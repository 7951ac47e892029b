"""Pictures: that they hold what they should, in every format, whatever the names."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from deltastore import plots
from deltastore.errors import InvalidInputError, MissingDependencyError
from deltastore.plots import CommitBar, HeatMap, LayerBar, check_plot_path, draw_history, draw_version, plot_history, plot_version

pytest.importorskip("matplotlib")

LAYERS = [LayerBar("embed", 0.0, 4_000_000), *(LayerBar(f"layers.{i}", i / 100, 10**6) for i in range(5))]
COMMITS = [CommitBar(str(step), 10**7 if step == 0 else 10**5 + step, 2 * 10**7) for step in range(40)]
HEAT = HeatMap(
    [layer.name for layer in LAYERS],
    [commit.label for commit in COMMITS],
    [[None, *(row * step / 1000 for step in range(1, 40))] for row in range(6)],
)
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("extension", [".png", ".svg", ".pdf", ".PNG"])
def test_formats(tmp_path: Path, extension: str) -> None:
    version, history = tmp_path / f"version{extension}", tmp_path / f"history{extension}"
    plot_version(version, "abc", LAYERS)
    plot_history(history, "main", COMMITS, HEAT, "step")
    for path in (version, history):
        assert path.read_bytes().startswith(MAGIC[extension.lower()])
        assert path.stat().st_size > 5000


def test_the_same_values_give_the_same_svg(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_version(tmp_path / name, "abc", LAYERS)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    ET.parse(tmp_path / "a.svg")


@pytest.mark.parametrize("name", ["picture", "picture.gif", "picture.png.exe", "missing/picture.png"])
def test_refused_before_any_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"ends in \.png, \.svg, \.pdf|does not exist"):
        check_plot_path(tmp_path / name)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"deltastore\[plot\]"):
        check_plot_path(tmp_path / "a.png")


def test_version() -> None:
    shares, sizes = draw_version("title", LAYERS).axes
    assert [bar.get_width() for bar in shares.patches] == [0, 0, 1, 2, 3, 4]
    assert [bar.get_width() for bar in sizes.patches] == [layer.bytes for layer in LAYERS]
    assert [label.get_text() for label in shares.get_yticklabels()] == [layer.name for layer in LAYERS]
    low, high = shares.get_ylim()
    assert low > high  # the first layer on top
    assert "4.00 MB" in [text.get_text() for text in sizes.texts]


def test_a_first_version_has_nothing_to_compare_with() -> None:
    (sizes,) = draw_version("title", [LayerBar("a", None, 5)]).axes
    assert "first commit" in sizes.get_title("left") + sizes.get_title()


def test_history() -> None:
    top, bottom, bar = draw_history("title", COMMITS, HEAT, "step", "a note").axes
    assert [round(patch.get_height()) for patch in top.patches] == [commit.added_bytes for commit in COMMITS]
    assert top.get_xlabel() == bottom.get_xlabel() == "step"
    assert len(top.get_xticks()) <= plots.MAX_TICKS
    values = bottom.images[0].get_array()
    assert values.shape == (6, 40)
    assert values[3, 10] == pytest.approx(3.0)
    assert values.mask[0].all()  # unchanged
    assert values.mask[:, 0].all()  # not compared
    assert "%" in bar.get_ylabel()
    assert "a note" in bottom.get_title("left") + bottom.get_title()


@pytest.mark.parametrize(
    "heat",
    [HeatMap([], [], []), HeatMap(["a"], ["1"], [[None]]), HeatMap(["a"], ["1"], [[0.0]]), HeatMap(["a"], ["1"], [[1.0]])],
)
def test_little_to_draw(tmp_path: Path, heat: HeatMap) -> None:
    plot_history(tmp_path / "a.png", "main", COMMITS[:1], heat, "step")
    plot_history(tmp_path / "b.png", "main", [CommitBar("x", 0, 0)], heat, "commit")
    plot_version(tmp_path / "c.png", "", [])


def test_hostile_names(tmp_path: Path) -> None:
    names = ["$\\frac{1}{", "a$b$c", "\x1b[31m", "深" * 100, "</text><script>", "x" * 5000, "&amp;", "\udc80"]
    plot_version(tmp_path / "a.svg", names[0] + names[3], [LayerBar(name, 0.5, 10) for name in names])
    heat = HeatMap(names, names, [[0.1] * len(names)] * len(names))
    plot_history(tmp_path / "b.png", names[1], [CommitBar(name, 5, 10) for name in names], heat, "commit")
    ET.parse(tmp_path / "a.svg")


def test_nothing_of_pyplot_is_touched(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    loaded = "matplotlib.pyplot" in sys.modules
    plot_version(tmp_path / "a.png", "abc", LAYERS)
    assert dict(mpl.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded
