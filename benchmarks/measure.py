"""Times, sizes and lines of the benches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.training import Weights


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `bound` is (sign, value): "<=" or ">=" what it must be; None for information only."""

    what: str
    measured: float
    unit: str
    bound: tuple[str, float] | None = None

    @property
    def ok(self) -> bool:
        """Whether the figure is within its bound."""
        if self.bound is None:
            return True
        sign, value = self.bound
        return self.measured <= value if sign == "<=" else self.measured >= value

    def line(self) -> str:
        """The row as text."""
        must = "" if self.bound is None else f"{self.bound[0]} {self.bound[1]:g}"
        verdict = "" if self.bound is None else ("ok" if self.ok else "NOT")
        return f"{self.what:<76} {self.measured:>9.3f} {self.unit:<9} {must:>8}  {verdict}"


def seconds(action: Callable[[], object]) -> float:
    """Wall time of a call; what it returns is dropped outside of the clock."""
    start = time.perf_counter()
    kept = action()
    elapsed = time.perf_counter() - start
    del kept
    return elapsed


def copy_seconds(size: int, repeats: int = 3) -> float:
    """The best time of memcpy of `size` bytes into touched memory, one thread."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return min(seconds(lambda: np.copyto(target, source)) for _ in range(repeats))


def model_bytes(weights: Weights) -> int:
    """Bytes of all tensors."""
    return sum(value.nbytes for value in weights.values())
