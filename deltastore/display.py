"""Objects as notebooks show them: small HTML tables made of plain values.

Every text is escaped, nothing is loaded from elsewhere, and long listings end with "… n more".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

from deltastore.errors import short_name

ROWS = 20  # a table shows so many rows
UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")

Cell = str | int | None  # numbers stand at the right


def human_bytes(count: int) -> str:
    """Bytes with three digits and a decimal unit: "6.02 MB"."""
    size = float(count)
    unit = 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size /= 1000
        unit += 1
    if unit == 0:
        return f"{count} B"
    return f"{size:.{max(0, 2 - int(math.log10(size)))}f} {UNITS[unit]}"


def percent(part: int, whole: int) -> str:
    """A share with three digits: "0.937 %"."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def card(title: str, facts: Iterable[tuple[str, Cell]], *tables: str) -> str:
    """A heading, lines of "name: value" (those without a value are left out), and tables below."""
    lines = "".join(
        f'<tr><th style="text-align:left">{_text(name)}</th><td style="text-align:left">{_text(value)}</td></tr>'
        for name, value in facts
        if value not in (None, "")
    )
    head = f"<strong>{_text(title)}</strong>"
    return f'<div class="deltastore">{head}{f"<table>{lines}</table>" if lines else ""}{"".join(tables)}</div>'


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], count: int) -> str:
    """A table of at most ROWS rows out of `count`; nothing when there are none. `rows` is read no further than needed."""
    shown = [row for row, _ in zip(rows, range(ROWS), strict=False)]
    if not shown:
        return ""
    head = "".join(f'<th style="text-align:left">{_text(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown)
    more = f"<p>… {count - len(shown)} more</p>" if count > len(shown) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def moment(time: datetime) -> str:
    """Time in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC")


def shape(sizes: Iterable[int]) -> str:
    """A shape as text: "[768, 3072]"."""
    return f"[{', '.join(map(str, sizes))}]"


def _cell(value: Cell) -> str:
    side = "right" if isinstance(value, int) else "left"
    return f'<td style="text-align:{side}">{_text(value)}</td>'


def _text(value: Cell) -> str:
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    shown = short_name(value or "", 200)
    return escape("".join(char if char.isprintable() else repr(char)[1:-1] for char in shown))
