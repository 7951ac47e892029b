"""Progress bars in the manner of huggingface_hub: on stderr, only on a terminal, only for what lasts over a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY_SECONDS = 1.0
_FALSE = {"", "0", "false", "no", "off"}

Done = Callable[[int], None]


def bars_enabled() -> bool:
    """Whether a bar may be shown: `HF_HUB_DISABLE_PROGRESS_BARS` is not set and stderr is a terminal."""
    disabled = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").lower() not in _FALSE
    return not disabled and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_bar(description: str, total: int | None, unit: str = "B") -> Iterator[Done]:
    """A context whose value is called with increments. Bytes are scaled; other units are counted."""
    if not bars_enabled():
        yield _ignore
        return
    from tqdm import tqdm

    with tqdm(
        desc=description,
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1000,
        delay=DELAY_SECONDS,
        leave=False,
        file=sys.stderr,
    ) as bar:
        yield bar.update


def _ignore(_: int) -> None:
    return None
