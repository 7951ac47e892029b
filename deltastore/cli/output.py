"""What commands print: tables on a terminal, tab-separated lines into a pipe, one JSON value with --json, ids with -q.

Names and messages come from strangers. Text for people has every character that does not print escaped, so that none of
them can steer a terminal or break a line; JSON holds them exactly.
"""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from deltastore.display import human_bytes, percent

__all__ = [
    "Column",
    "Output",
    "bar",
    "counted",
    "cut",
    "escape",
    "first_line",
    "flush",
    "human_bytes",
    "human_time",
    "json_text",
    "percent",
    "plain",
    "print_error",
    "print_error_document",
    "print_notice",
    "terminal_width",
    "timestamp",
]

T = TypeVar("T")

BLOCKS = "▏▎▍▌▋▊▉█"
MIN_SHRUNK_WIDTH = 12  # a column that gives way keeps this many places


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a listing.

    Attributes:
        plain: the cell in a pipe: exact, never shortened.
        human: the cell on a terminal; as in a pipe when it is None.
        right: numbers stand at the right edge.
        shrink: gives way when the terminal is too narrow.
    """

    title: str
    plain: Callable[[T], str]
    human: Callable[[T], str] | None = None
    right: bool = False
    shrink: bool = False


class Output:
    """Standard output of one command, in the form that was asked for."""

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False, terminal: bool | None = None
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.terminal = sys.stdout.isatty() if terminal is None else terminal
        self._closed = False

    def document(self, value: Any) -> None:
        """One JSON value on one line."""
        self._write(json_text(value))

    def line(self, text: str = "") -> None:
        """A line of text; what does not print is escaped."""
        self._write(escape(text))

    def lines(self, texts: Iterable[str]) -> None:
        """Lines of text; what does not print is escaped."""
        for text in texts:
            self.line(text)

    def fields(self, *cells: str) -> None:
        """One line of tab-separated cells."""
        self._write("\t".join(map(escape, cells)))

    def table(self, columns: Sequence[Column[T]], items: Iterable[T], indent: str = "") -> None:
        """A table with a heading on a terminal; without one and tab-separated elsewhere. Nothing for no items."""
        if not self.terminal:
            for item in items:
                self.fields(*(column.plain(item) for column in columns))
            return
        rows = [[escape((column.human or column.plain)(item)) for column in columns] for item in items]
        if not rows:
            return
        titles = [column.title for column in columns]
        widths = [max(map(_width, cells)) for cells in zip(titles, *rows, strict=True)]
        _shrink(widths, columns, terminal_width() - len(indent))
        for cells in [titles, *rows]:
            padded = [_pad(cell, width, column.right) for cell, width, column in zip(cells, widths, columns, strict=True)]
            self._write((indent + "  ".join(padded)).rstrip())

    def _write(self, text: str) -> None:
        if self._closed:
            return
        try:
            sys.stdout.write(_encodable(text, sys.stdout.encoding) + "\n")
        except BrokenPipeError:  # the reader, `head` say, has all it wanted: no failure of the command
            self._closed = True
            _drop_stdout()


def flush() -> None:
    """Hand all output to its reader. A reader that has gone away is no error; a full disk is (OSError)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    except OSError:
        _drop_stdout()
        raise


def _drop_stdout() -> None:
    """Send what is still to be written to nowhere, so that the interpreter does not fail on it again when it exits."""
    try:
        target = sys.stdout.fileno()
    except (OSError, ValueError):  # no real file
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, target)
    finally:
        os.close(nowhere)


def print_error(text: str) -> None:
    """Lines on standard error; what does not print is escaped."""
    for line in text.split("\n"):
        _write_stderr(escape(line))


def print_notice(as_json: bool, kind: str, message: str) -> None:
    """A plan or a warning on standard error."""
    if as_json:
        print_error_document({"type": kind, "message": message})
    else:
        print_error(message if kind == "plan" else f"{kind}: {message}")


def print_error_document(value: Any) -> None:
    """One JSON value on one line of standard error."""
    _write_stderr(json_text(value))


def _write_stderr(text: str) -> None:
    try:
        sys.stderr.write(_encodable(text, sys.stderr.encoding) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or missing as under pythonw: there is nobody to tell
        return


# -- text -------------------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    r"""Text with every character that does not print as `\n`, `\x1b`, `\u202e` …"""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _encodable(text: str, encoding: str | None) -> str:
    """Text that a stream of this encoding takes."""
    encoding = encoding or "utf-8"
    return text if _fits(text, encoding) else text.encode(encoding, "backslashreplace").decode(encoding)


def _fits(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def first_line(text: str) -> str:
    """The subject of a message."""
    return text.split("\n", 1)[0].rstrip("\r")


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """ "1 commit", "2 commits", "12 345 tensors"."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}".replace(",", " ")


def _width(text: str) -> int:
    """Places that text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str, width: int | None) -> str:
    """Text that takes at most so many places, the last of them "…" when it is cut; None is no limit."""
    if width is None or _width(text) <= width:
        return text
    while text and _width(text) > width - 1:
        text = text[: min(len(text) - 1, width - 1)]
    return f"{text}…"


def terminal_width() -> int:
    """Places of a line."""
    return shutil.get_terminal_size().columns


def bar(share: float, width: int) -> str:
    """A bar of `width` places when the share is 1; something, however little, when it is more than 0."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8) or (share > 0)
    if not _fits(BLOCKS, sys.stdout.encoding):
        return "#" * max(1, round(eighths / 8)) if eighths else ""
    return BLOCKS[7] * (eighths // 8) + (BLOCKS[eighths % 8 - 1] if eighths % 8 else "")


def _pad(cell: str, width: int, right: bool) -> str:
    cell = cut(cell, width)
    space = " " * (width - _width(cell))
    return space + cell if right else cell + space


def _shrink(widths: list[int], columns: Sequence[Column[Any]], available: int) -> None:
    """Take places from the widest column that gives way, until the table fits or none can give more."""
    excess = sum(widths) + 2 * (len(widths) - 1) - available
    while excess > 0:
        elastic = [i for i, column in enumerate(columns) if column.shrink and widths[i] > MIN_SHRUNK_WIDTH]
        if not elastic:
            return
        widest = max(elastic, key=lambda i: widths[i])
        widths[widest] -= 1
        excess -= 1


# -- JSON -------------------------------------------------------------------------------------------------------------


def json_text(value: Any) -> str:
    """Compact JSON in ASCII, so that it passes every terminal, encoding and lone surrogate unharmed."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False)


def plain(value: Any) -> Any:
    """A value as JSON takes it: times as RFC 3339, bytes as {"b": base64}, NaN and infinities as their names.

    Dicts with other keys than text become lists of [key, value].
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode("ascii")}
    if isinstance(value, datetime):
        return timestamp(value)
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"no JSON for a {type(value).__qualname__}")


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def human_time(moment: datetime) -> str:
    """Local time to the second, with its offset."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
