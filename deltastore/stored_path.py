"""Names of what a version stores: the path of a tensor's first leaf, or a file that is stored as a tensor of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from deltastore import canonical
from deltastore.state import Path


@dataclass(frozen=True, slots=True)
class FilePath:
    """Stands for the path of a large file among the paths of tensors."""

    name: str


StoredPath = Path | FilePath
VALUES_PATH = FilePath("")  # plain values that are too large for the commit document; no file has this name


def path_bytes(path: StoredPath) -> bytes:
    """A path as canonical JSON; different paths give different bytes."""
    return canonical.dumps(["file", path.name] if isinstance(path, FilePath) else [canonical.pack(part) for part in path])
