"""Bytes as they are handed around: without a copy, and without importing numpy where nobody has an array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np

    Bytes: TypeAlias = bytes | memoryview | np.ndarray[Any, np.dtype[np.uint8]]


def byte_count(pieces: Iterable[Bytes]) -> int:
    """Bytes of all pieces; arrays are one-dimensional here, so nothing needs a view."""
    return sum(map(len, pieces))


def as_memory(data: Bytes) -> memoryview:
    """A view of bytes; the type checker only learns in Python 3.12 that an array is a buffer."""
    return memoryview(cast("bytes", data))
