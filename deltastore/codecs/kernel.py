"""The kernel in use, native or NumPy, behind one set of functions.

`_kernel` is the compiled extension, `numpy_kernel` its twin with equal bytes. The environment variable
`DELTASTORE_KERNEL=numpy` forces the twin; without a compiled extension it is used anyway. `NAME` says which one runs.

The kernels write into scratch arrays of the calling thread, sized for the worst case and kept between calls, because fresh
pages of several MiB per chunk cost as much as the scan itself. Results are trimmed copies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from deltastore.codecs import numpy_kernel
from deltastore.codecs.word import ByteArray, Steps, Word, word_count
from deltastore.errors import FormatError, InvalidInputError

Transform = Literal["plain", "rotate", "zigzag"]
_TRANSFORMS: dict[Transform, int] = {
    "plain": numpy_kernel.PLAIN,
    "rotate": numpy_kernel.ROTATE,
    "zigzag": numpy_kernel.ZIGZAG,
}
TOGETHER = 16  # payloads that `add_sparse` takes at once
_SLACK = 8  # bytes that the native kernel may write behind the gaps


def _choose() -> tuple[str, Any]:
    wanted = os.environ.get("DELTASTORE_KERNEL", "")
    if wanted not in ("", "native", "numpy"):
        raise InvalidInputError(f"DELTASTORE_KERNEL is {wanted!r}, expected 'native' or 'numpy': set one of them or unset it")
    if wanted != "numpy":
        try:
            from deltastore.codecs import _kernel  # type: ignore[attr-defined,unused-ignore]

            return "native", _kernel
        except ImportError:
            if wanted == "native":
                raise
    return "numpy", numpy_kernel


NAME: str
NAME, _backend = _choose()


class _Scratch(threading.local):
    """Reusable output arrays of one thread."""

    def __init__(self) -> None:
        self.arrays: dict[str, ByteArray] = {}

    def take(self, name: str, size: int) -> ByteArray:
        array = self.arrays.get(name)
        if array is None or array.size < size:
            array = self.arrays[name] = np.empty(size, np.uint8)
        return array[:size]


_scratch = _Scratch()


def _trimmed(word: Word, length: int, gaps: ByteArray, planes: ByteArray, counts: tuple[int, int]) -> Steps:
    gap_bytes, count = counts
    kept = tuple(planes[k * length : k * length + count].copy() for k in range(word.width))
    return Steps(word, length, gaps[:gap_bytes].copy(), kept)


def extract(baseline: ByteArray, live: ByteArray, word: Word) -> Steps:
    """The steps from `baseline` to `live`, and `baseline` becomes what was seen of `live`.

    Both are 1-d uint8 of equal size. Each word of `live` is read once, so another thread may write to it meanwhile: steps
    and baseline then agree on some mixture of old and new. InvalidInputError for sizes that do not fit.
    """
    length = word_count(baseline, word)
    if word_count(live, word) != length:
        raise InvalidInputError(f"baseline has {baseline.size} bytes, the live chunk {live.size}: they must be the same chunk")
    gaps = _scratch.take("gaps", length + length // 255 + 1 + _SLACK)
    planes = _scratch.take("planes", length * word.width)
    return _trimmed(word, length, gaps, planes, _backend.extract(baseline, live, gaps, planes, word.width, word.floating))


def collect(total: ByteArray, word: Word) -> Steps:
    """The nonzero integer words of `total` (1-d uint8) as steps: the way back from `accumulate`."""
    length = word_count(total, word)
    gaps = _scratch.take("gaps", length + length // 255 + 1 + _SLACK)
    planes = _scratch.take("planes", length * word.width)
    return _trimmed(word, length, gaps, planes, _backend.collect(total, gaps, planes, word.width))


def apply(target: ByteArray, steps: Steps) -> None:
    """Adds steps to the words of `target` in rank space, in place. FormatError, target untouched, when they do not fit."""
    _apply(target, steps, steps.word.floating)


def accumulate(total: ByteArray, steps: Steps) -> None:
    """Adds steps to the integers of `total`, in place. FormatError, total untouched, when they do not fit."""
    _apply(total, steps, False)


def _apply(target: ByteArray, steps: Steps, floating: bool) -> None:
    length = word_count(target, steps.word)
    if not _backend.apply(target, steps.gaps, steps.planes, steps.word.width, floating):
        raise FormatError(
            f"a delta does not fit its chunk: {steps.count} steps in {steps.gaps.size} gap bytes for {length} words of "
            f"{steps.word.width} bytes; its bytes are damaged or its base is another chunk, run `deltastore verify`"
        )


def add(target: ByteArray, steps: ByteArray, word: Word) -> None:
    """Adds one integer step to every word of `target` in rank space, in place. Both are 1-d uint8 of equal size."""
    if word_count(target, word) != word_count(steps, word):
        raise InvalidInputError(f"{target.size} bytes of words, {steps.size} of steps: they must be equal")
    _backend.add(target, steps, word.width, word.floating)


def split(words: ByteArray, word: Word, transform: Transform) -> tuple[ByteArray, ...]:
    """Byte planes of transformed words, lowest byte first.

    "rotate" moves the sign bit below the eight bits after it, so that the exponent of bf16 and fp32 fills the highest plane (in
    one-byte words: below the other seven); "zigzag" is for steps.
    The planes are views of scratch memory, valid until this thread splits again.
    """
    length = word_count(words, word)
    planes = _scratch.take("split", words.size)
    _backend.split(words, planes, word.width, _TRANSFORMS[transform])
    return tuple(planes[k * length : (k + 1) * length] for k in range(word.width))


def merge(planes: tuple[ByteArray, ...], word: Word, transform: Transform, out: ByteArray | None = None) -> ByteArray:
    """The inverse of `split`, into `out` (1-d uint8 of the right size) or a new array."""
    words = np.empty(planes[0].size * word.width, np.uint8) if out is None else out
    if word_count(words, word) != planes[0].size:
        raise InvalidInputError(f"{planes[0].size} words need {planes[0].size * word.width} bytes, found {words.size}")
    _backend.merge(planes, words, word.width, _TRANSFORMS[transform])
    return words


def zeros(size: int) -> ByteArray:
    """Scratch of the calling thread, `size` zero bytes, valid until the next call."""
    array = _scratch.take("zeros", size)
    array[:] = 0
    return array


def pack(steps: Steps) -> tuple[ByteArray, tuple[ByteArray, ...]]:
    """Two-bit codes of the steps of the commonest sizes, and the planes of the others (views of scratch memory).

    zigzag(step) - 1 of 0, 1 or 2 is its own code, four to a byte, first change in the lowest bits; code 3 says that the
    step is the next one in the long planes.
    """
    count, width = steps.count, steps.word.width
    codes = _scratch.take("codes", (count + 3) // 4)
    longs = _scratch.take("longs", count * width)
    escaped = _backend.pack(steps.planes, codes, longs, width)
    return codes, tuple(longs[k * count : k * count + escaped] for k in range(width))


def apply_packed(
    target: ByteArray, gaps: ByteArray, codes: ByteArray, longs: tuple[ByteArray, ...], count: int, word: Word
) -> None:
    """Adds `count` steps, as `pack` gives them, to `target` in rank space, in place: `apply` without the planes between.

    `codes` must hold (count + 3) // 4 bytes. FormatError, target untouched, when gaps, codes and long steps do not fit each
    other or the target.
    """
    length = word_count(target, word)
    if not _backend.apply_packed(target, gaps, codes, longs, count, word.width, word.floating):
        raise FormatError(
            f"a delta does not fit its chunk: {count} steps, {longs[0].size} of them long, in {gaps.size} gap bytes for {length} "
            f"words of {word.width} bytes; its bytes are damaged or its base is another chunk, run `deltastore verify`"
        )


def add_sparse(target: ByteArray, payloads: Sequence[Any], decompress: Callable[..., bytes], word: Word, floating: bool) -> bool:
    """Adds the steps of at most `TOGETHER` whole `sparse-ulp@1` payloads to `target` in one call, in place.

    `word` is what the payloads must say; steps are added in its rank space, or to integers when `floating` is False.
    `decompress` is `streams.decompressor()`. False, target untouched, when anything is not as it should be, and always
    without a native kernel: `apply_packed` then takes one at a time and says what is wrong.
    """
    word_count(target, word)
    fits: bool = _backend.add_sparse(target, tuple(payloads), decompress, word.code, floating)
    return fits
