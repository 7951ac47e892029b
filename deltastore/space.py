"""Free space, asked for before something large is written: a disk that fills up halfway helps nobody."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltastore.errors import StoreFullError

MIN_FREE = 256 << 10  # bytes that stay free: the index and the log grow too

# What a first commit takes of the raw bytes; the rest of the dtypes hardly shrink. Measured on trained weights, rounded up.
FIRST_COMMIT_SHARE = {"bfloat16": 0.70, "float16": 0.70, "float32": 0.85}
COMMIT_OVERHEAD = 64 << 10  # bytes of documents, manifests and the log entry


def free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes that this process may still write below `path`; None where the system can't say.

    What is reserved for root does not count. A path that does not exist yet stands for its nearest existing folder.
    """
    if not hasattr(os, "statvfs"):  # Windows
        return None
    place = Path(path).absolute()
    while True:
        try:
            found = os.statvfs(place)
        except (FileNotFoundError, NotADirectoryError):
            if place == place.parent:
                return None
            place = place.parent
        except OSError:
            return None
        else:
            return found.f_bavail * found.f_frsize


def require_space(path: str | os.PathLike[str], needed: int, what: str) -> None:
    """Raise unless `needed` bytes fit below `path` and MIN_FREE remains.

    Args:
        what: what is about to be written, as in "saving commit 1234": the subject of the message.

    Raises:
        StoreFullError: names what, needed against free, and the next step.
    """
    refuse_if_full(free_bytes(path), needed, what, os.fspath(path))


def refuse_if_full(free: int | None, needed: int, what: str, where: str) -> None:
    """Like `require_space`, for free bytes that are known already, such as those of a bucket; None: nobody knows."""
    if free is not None and needed + MIN_FREE > free:
        raise StoreFullError(
            f"{what} needs about {needed + MIN_FREE:,} bytes, {where} has {free:,} free; nothing was changed. "
            "Free some space or choose another place; `deltastore cache list` shows what deltastore keeps beside the store"
        )


def estimate_commit_bytes(tensor_bytes_by_dtype: Mapping[str, int], recent: Sequence[int] = ()) -> int:
    """About how many bytes a commit will take in the bucket, rather too many than too few.

    Args:
        tensor_bytes_by_dtype: raw bytes of the state by dtype name, such as {"bfloat16": 2_000_000}.
        recent: stored bytes of the last commits of the branch, without its first; none for a first commit.

    Returns:
        The largest recent one, never more than a first commit; for a first commit a share of the raw bytes by dtype.
    """
    full = sum(int(size * FIRST_COMMIT_SHARE.get(dtype, 1.0)) for dtype, size in tensor_bytes_by_dtype.items())
    return (min(max(recent), full) if recent else full) + COMMIT_OVERHEAD
