"""What a caller wants committed besides the tensors, checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deltastore import canonical
from deltastore.canonical import show
from deltastore.errors import InvalidInputError
from deltastore.history import check_ref_name
from deltastore.state import TensorSource

MAX_METADATA_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """Message, place and company of a commit.

    Attributes:
        metadata: plain values; of a checked request, packed as in the commit document.
        files: their bytes, or sources of uint8 for those that are not held in memory.
        expected_head: None: whatever the head is, rebase when it moves.
        tag: made at the new commit, in the same transaction.
    """

    message: str
    branch: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | TensorSource] = field(default_factory=dict)
    author: str = ""
    expected_head: str | None = None
    tag: str | None = None

    def checked(self) -> CommitRequest:
        """The request with its metadata packed. Raises InvalidInputError for what can't be committed."""
        check_ref_name(self.branch)
        if self.tag == self.branch:
            raise InvalidInputError(f"branch and tag can't both be called {self.tag!r}")
        for what, text in (("message", self.message), ("author", self.author)):
            if not isinstance(text, str):
                raise InvalidInputError(f"{what} must be a string, not {type(text).__name__}")
            canonical.pack(text)
        for name in self.files:
            _check_file_name(name)
        return replace(self, metadata=_packed(self.metadata))


def _packed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    packed = {}
    for name, value in metadata.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"metadata keys must be strings, not {name!r}")
        packed[name] = canonical.pack(_builtin_number(value), f"metadata[{show(name)}]")
    if len(canonical.dumps(packed)) > MAX_METADATA_BYTES:
        raise InvalidInputError(
            f"metadata of more than {MAX_METADATA_BYTES} bytes; commit it as a file: files={{'metadata.json': …}}"
        )
    return packed


def _builtin_number(value: Any) -> Any:
    """Metrics often come as NumPy or torch scalars; metadata keeps plain numbers."""
    item = getattr(value, "item", None)
    if not isinstance(value, (bool, int, float, str)) and callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    if isinstance(value, float):
        return float(value)
    return value


def _check_file_name(name: str) -> None:
    parts = name.split("/") if isinstance(name, str) else [""]
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        sizes = [0]
    if not all(0 < size <= 255 for size in sizes) or any(part in (".", "..") for part in parts) or "\0" in name or "\\" in name:
        raise InvalidInputError(f"{name!r} can't be the name of a file in a checkpoint: use a relative path with '/'")
