"""The files that a checkpoint was imported from: what they were, whether they still are, and deleting exactly them.

Nothing here follows a symbolic link, and a folder is only removed when it is empty by then.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltastore.canonical import show
from deltastore.errors import InvalidInputError
from deltastore.layout import STORE_KEY


@dataclass(frozen=True, slots=True)
class FileMark:
    """A file, with what changes when anybody writes to it or replaces it."""

    path: Path
    size: int
    modified_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Original:
    """A checkpoint on disk at one moment.

    Attributes:
        path: its folder, or its one file.
        files: all that was there, by path.
        obstacle: why it must never be deleted; None when nothing speaks against it.
    """

    path: Path
    files: tuple[FileMark, ...]
    obstacle: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(mark.size for mark in self.files)

    def change(self) -> str | None:
        """What is different on the disk by now; None when it is as it was."""
        marks, obstacle = _look(self.path)
        if obstacle is not None and self.obstacle is None:
            return obstacle
        now = {mark.path: mark for mark in marks}
        for mark in self.files:
            found = now.pop(mark.path, None)
            if found is None:
                return f"{mark.path} is gone"
            if found != mark:
                return f"{mark.path} has changed"
        return f"{next(iter(now))} is new" if now else None


def look_at(path: Path, committed: Collection[Path]) -> Original:
    """Take down what is at `path`; `committed` are the files whose content is in a commit, or will be."""
    marks, obstacle = _look(path)
    if obstacle is None:
        left = [mark.path for mark in marks if mark.path not in committed]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            obstacle = f"{left[0]}{others} is no part of the commit"
    return Original(path, marks, obstacle)


def delete(original: Original) -> None:
    """Delete the files, and the folders that are empty then.

    Raises:
        InvalidInputError: it has an obstacle, or something changed since; nothing was deleted.
        OSError: the system refuses; what was deleted until then is gone.
    """
    reason = original.obstacle or original.change()
    if reason is not None:
        raise InvalidInputError(f"{original.path} stays: {reason}")
    is_folder = original.path.is_dir()
    for mark in sorted(
        original.files, key=lambda mark: -mark.size
    ):  # weights first: what an interruption leaves is no checkpoint
        mark.path.unlink()
    if is_folder:
        for folder, _, _ in os.walk(original.path, topdown=False):
            with contextlib.suppress(OSError):  # somebody has just put something there
                Path(folder).rmdir()


def _look(path: Path) -> tuple[tuple[FileMark, ...], str | None]:
    """All plain files at or below a path, sorted, and the first thing found that speaks against deleting them."""
    marks, obstacle = [], None
    for place, info in _walk(path):
        kind = info.st_mode
        if stat.S_ISLNK(kind):
            obstacle = obstacle or f"{place} is a symbolic link"
        elif stat.S_ISREG(kind):
            if place.name == STORE_KEY and place != path:
                obstacle = obstacle or f"{place.parent} looks like a store"
            marks.append(FileMark(place, info.st_size, info.st_mtime_ns, info.st_ino))
        elif not stat.S_ISDIR(kind):
            obstacle = obstacle or f"{show(str(place))} is no plain file"
    return tuple(sorted(marks, key=lambda mark: mark.path)), obstacle


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    yield path, info
    if stat.S_ISDIR(info.st_mode):
        for inner in sorted(path.iterdir()):
            yield from _walk(inner)
