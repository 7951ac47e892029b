"""Words, chunks and kernels that the codec tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from hypothesis import strategies as st

from deltastore.codecs import Word, kernel, numpy_kernel

try:
    from deltastore.codecs import _kernel as native_kernel
except ImportError:
    native_kernel = None

KERNELS = [module for module in (native_kernel, numpy_kernel) if module is not None]
WORDS = [Word(width, floating) for width in (1, 2, 4, 8) for floating in (False, True)]
LENGTHS = [0, 1, 2, 3, 4, 5, 63, 64, 65, 127, 255, 256, 257, 511, 512, 600, 1023, 4095, 4096, 4097, 9000]
DENSITIES = [0.0, 0.0005, 0.003, 0.01, 0.1, 0.4, 0.5, 0.6, 0.97, 1.0]
PATTERNS = ["near", "random", "special", "sign", "constant"]


@contextmanager
def using(module: Any) -> Iterator[None]:
    """Runs the codecs on one of KERNELS."""
    before = kernel._backend
    kernel._backend = module
    try:
        yield
    finally:
        kernel._backend = before


def special_words(word: Word) -> np.ndarray:
    """Zeros, infinities, NaNs with payloads, denormals, extremes, of every usual split into exponent and mantissa."""
    bits = 8 * word.width
    sign, full = 1 << (bits - 1), (1 << bits) - 1
    values = {0, 1, 2, sign, sign + 1, sign - 1, full, full - 1}
    for mantissa in {1: (2, 3), 2: (7, 10), 4: (23,), 8: (52,)}[word.width]:
        infinity = (sign - 1) >> mantissa << mantissa
        for magnitude in (
            infinity,
            infinity + 1,
            infinity | 1 << (mantissa - 1),
            infinity - 1,
            1 << mantissa,
            (1 << mantissa) - 1,
        ):
            values |= {magnitude, magnitude | sign}
    return np.array(sorted(values), f"<u{word.width}")


def random_words(rng: np.random.Generator, length: int, word: Word) -> np.ndarray:
    return rng.integers(0, 256, length * word.width, np.uint8).view(f"<u{word.width}")


def chunk_pair(word: Word, length: int, density: float, pattern: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two versions of a chunk, as bytes."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(f"<u{word.width}").type
    old = random_words(rng, length, word)
    if pattern == "special":
        old = rng.choice(special_words(word), length)
    elif pattern == "constant":
        old[:] = kind(1)
    new = old.copy()
    where = rng.random(length) < density
    count = int(where.sum())
    if pattern == "near":
        new[where] += rng.choice(np.array([1, 2, -1, -2, 3, -3, 90], np.int64), count).astype(new.dtype)
    elif pattern == "special":
        new[where] = rng.choice(special_words(word), count)
    elif pattern == "sign":
        new[where] ^= kind(1 << (8 * word.width - 1))
    else:
        new[where] = random_words(rng, count, word)
    return old.view(np.uint8), new.view(np.uint8)


def chunk_pairs() -> st.SearchStrategy[tuple[Word, np.ndarray, np.ndarray]]:
    return st.builds(
        lambda word, *rest: (word, *chunk_pair(word, *rest)),
        st.sampled_from(WORDS),
        st.sampled_from(LENGTHS) | st.integers(0, 700),
        st.sampled_from(DENSITIES),
        st.sampled_from(PATTERNS),
        st.integers(0, 2**32),
    )


def value_of(word: Word, bits: int) -> int:
    """rank(bits), straight from its definition."""
    sign = 1 << (8 * word.width - 1)
    if not word.floating:
        return bits
    return (2 * sign - 1) ^ bits if bits >= sign else bits | sign
