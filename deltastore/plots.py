"""Pictures: plain values in, a matplotlib figure out. matplotlib (the extra `plot`) is imported when a picture is drawn.

Colours are told apart by people who see few of them (Okabe-Ito, cividis); sizes have decimal units.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.display import human_bytes
from deltastore.errors import InvalidInputError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXTENSIONS = (".png", ".svg", ".pdf")
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#E4E4E4"
ROW_INCHES = 0.24  # height of a layer
MAX_TICKS = 12
MAX_NAME = 36
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a "$" in a name is one
    "pdf.fonttype": 42,
    "svg.hashsalt": "deltastore",
}


@dataclass(frozen=True, slots=True)
class LayerBar:
    """A layer of one version: changed share against the parent, 0 to 1 (None: nothing to compare with), and size in bytes."""

    name: str
    share: float | None
    bytes: int


@dataclass(frozen=True, slots=True)
class CommitBar:
    """A commit of a history: its label, the bytes that came with it, and those of a full copy."""

    label: str
    added_bytes: int
    logical_bytes: int


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Changed shares, 0 to 1: `shares[layer][commit]`; None where a commit has no such layer."""

    layers: Sequence[str]
    labels: Sequence[str]
    shares: Sequence[Sequence[float | None]]


def check_plot_path(path: Path) -> None:
    """Raise before any work when a picture can't be written there.

    Raises:
        InvalidInputError: the extension is not .png, .svg or .pdf, or the folder does not exist.
        MissingDependencyError: matplotlib is not installed.
    """
    if path.suffix.lower() not in EXTENSIONS:
        raise InvalidInputError(f"{path}: a picture ends in {', '.join(EXTENSIONS)}, found {path.suffix or 'no extension'!r}")
    if not path.absolute().parent.is_dir():
        raise InvalidInputError(f"{path}: the folder {path.parent} does not exist; make it, or choose another")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("pictures need matplotlib; install it with `pip install 'deltastore[plot]'`") from error


def plot_version(path: Path, title: str, layers: Sequence[LayerBar]) -> None:
    """Write a picture of one version: changed share by layer as bars, and the size of each layer."""
    check_plot_path(path)
    with _drawing():
        _save(draw_version(title, layers), path)


def plot_history(path: Path, title: str, commits: Sequence[CommitBar], heat: HeatMap, unit: str, note: str = "") -> None:
    """Write a picture of a history: bytes of each commit, and changed share by layer and commit. Oldest first.

    Args:
        unit: what the labels of the commits are, such as "step".
        note: a remark for the title of the heat map.
    """
    check_plot_path(path)
    with _drawing():
        _save(draw_history(title, commits, heat, unit, note), path)


def draw_version(title: str, layers: Sequence[LayerBar]) -> Figure:
    """See `plot_version`."""
    from matplotlib.figure import Figure

    compared = any(layer.share is not None for layer in layers)
    figure = Figure(figsize=(10, 1.8 + ROW_INCHES * max(4, len(layers))), layout="constrained")
    figure.suptitle(_short(title, 100), fontsize=12)
    panels = figure.subplots(1, 2 if compared else 1, sharey=True, squeeze=False)[0]
    rows = range(len(layers))
    names = [_short(layer.name, MAX_NAME) for layer in layers]
    if compared:
        shares = [100 * (layer.share or 0.0) for layer in layers]
        bars = panels[0].barh(rows, shares, color=BLUE)
        panels[0].bar_label(bars, [f"{share:.3g} %" if share else "–" for share in shares], padding=3, fontsize=8)
        panels[0].set_title("Changed elements against the parent")
        panels[0].set_xlabel("share of the layer (%)")
        panels[0].margins(x=0.18)
    sizes = panels[-1]
    bars = sizes.barh(rows, [layer.bytes for layer in layers], color=ORANGE)
    sizes.bar_label(bars, [human_bytes(layer.bytes) for layer in layers], padding=3, fontsize=8)
    sizes.set_title("Size" if compared else "Size (a first commit: nothing to compare with)")
    sizes.set_xlabel("bytes")
    sizes.margins(x=0.18)
    _bytes_axis(sizes.xaxis)
    panels[0].set_yticks(rows, names, fontsize=8)
    panels[0].set_ylim(len(layers) - 0.4, -0.6)  # the first layer on top
    return figure


def draw_history(title: str, commits: Sequence[CommitBar], heat: HeatMap, unit: str, note: str = "") -> Figure:
    """See `plot_history`."""
    from matplotlib.figure import Figure

    heights = [2.6, 0.8 + ROW_INCHES * max(4, len(heat.layers))]
    figure = Figure(figsize=(10, sum(heights) + 1.0), layout="constrained")
    figure.suptitle(_short(title, 100), fontsize=12)
    top, bottom = figure.subplots(2, 1, height_ratios=heights)
    _draw_bytes(top, commits, unit)
    _draw_heat(figure, bottom, heat, unit, note)
    return figure


def _draw_bytes(axes: Axes, commits: Sequence[CommitBar], unit: str) -> None:
    from matplotlib.ticker import LogLocator

    places = range(len(commits))
    added = [max(1, commit.added_bytes) for commit in commits]  # a log scale has no zero
    axes.bar(places, added, color=BLUE, label="stored with the commit")
    full = [max(1, commit.logical_bytes) for commit in commits]
    axes.step(places, full, where="mid", color=ORANGE, linestyle="--", label="a full copy")
    axes.set_yscale("log")  # a commit is a hundredth of a full copy
    axes.set_ylim(bottom=min(added, default=1) / 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    _bytes_axis(axes.yaxis)
    axes.set_title("Bytes per commit")
    axes.set_ylabel("bytes (log scale)")
    axes.set_xlim(-0.5, max(0, len(commits) - 1) + 0.5)  # as the heat map below
    axes.legend(loc="upper center", bbox_to_anchor=(0.8, 1.2), ncols=2, frameon=False, fontsize=9)
    _commit_axis(axes, [commit.label for commit in commits], unit)


def _draw_heat(figure: Figure, axes: Axes, heat: HeatMap, unit: str, note: str) -> None:
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import LogLocator

    axes.set_title("Changed elements by layer and commit" + (f" ({note})" if note else ""))
    if not any(share is not None for row in heat.shares for share in row):
        axes.text(0.5, 0.5, "no commit with a parent to compare with", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    shares = 100 * np.array([[np.nan if share is None else share for share in row] for row in heat.shares], np.float64)
    values = np.ma.masked_where(~(shares > 0), shares)
    least, most = (float(values.min()), float(values.max())) if values.count() else (0.0, 1.0)
    wide = values.count() > 0 and most > 30 * least
    colours = colormaps["cividis"].with_extremes(bad=GREY)
    norm = LogNorm(least, most) if wide else Normalize(0, most)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    axes.spines[:].set_visible(False)
    axes.set_yticks(range(len(heat.layers)), [_short(layer, MAX_NAME) for layer in heat.layers], fontsize=8)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
    bar.set_label(f"share of the layer (%{', log scale' if wide else ''}); grey: unchanged or not compared")
    if wide:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bar.ax.yaxis.set_minor_formatter(lambda *_: "")
    _commit_axis(axes, heat.labels, unit)


def _commit_axis(axes: Axes, labels: Sequence[str], unit: str) -> None:
    every = -(-len(labels) // MAX_TICKS) or 1
    places = range(0, len(labels), every)
    axes.set_xticks(places, [_short(labels[place], 14) for place in places], fontsize=8)
    axes.set_xlabel(unit)


def _bytes_axis(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: human_bytes(round(value)))
    axis.set_tick_params(labelsize=8)


def _short(text: str, limit: int) -> str:
    """Text that can be drawn: what does not print is escaped, a long one loses its beginning (the end tells more)."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return shown if len(shown) <= limit else f"…{shown[1 - limit :]}"


@contextmanager
def _drawing() -> Iterator[None]:
    """Our style, and no warnings about letters that the font lacks."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _save(figure: Figure, path: Path) -> None:
    """Write the file once the picture is complete."""
    kind = path.suffix.lower()[1:]
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    path.write_bytes(data.getvalue())
