"""The NumPy twin of the native kernel: the same functions, arguments, results and bytes as `_kernel.c`.

It runs where no compiled kernel is, and is the readable statement of what the kernel does. Outputs are written into buffers
of the caller; `apply` and `apply_packed` say False, having changed nothing in the target, when streams do not fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltastore.codecs.word import ByteArray, unsigned

PLAIN, ROTATE, ZIGZAG = 0, 1, 2
Words = npt.NDArray[np.unsignedinteger[Any]]  # of the width of the word


def _rank(words: Words, floating: bool) -> Words:
    if not floating:
        return words
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    return np.where(words >= sign, ~words, words | sign)


def _word(ranks: Words, floating: bool) -> Words:
    if not floating:
        return ranks
    sign = ranks.dtype.type(1 << (8 * ranks.itemsize - 1))
    return np.where(ranks >= sign, ranks ^ sign, ~ranks)


def _zigzag(steps: Words) -> Words:
    kind = steps.dtype.type
    return (steps << kind(1)) ^ (kind(0) - (steps >> kind(8 * steps.itemsize - 1)))


def _unzigzag(codes: Words) -> Words:
    kind = codes.dtype.type
    return (codes >> kind(1)) ^ (kind(0) - (codes & kind(1)))


def _rotated(words: Words) -> Words:
    """The sign moved below the eight bits after it (a byte: below the other seven)."""
    kind, bits = words.dtype.type, 8 * words.itemsize
    if bits == 8:
        turned: Words = (words << kind(1)) | (words >> kind(7))
        return turned
    top, sign, low = kind(255 << (bits - 8)), kind(1 << (bits - 9)), kind((1 << (bits - 9)) - 1)
    rotated: Words = ((words << kind(1)) & top) | ((words >> kind(8)) & sign) | (words & low)
    return rotated


def _unrotated(words: Words) -> Words:
    kind, bits = words.dtype.type, 8 * words.itemsize
    if bits == 8:
        turned: Words = (words >> kind(1)) | (words << kind(7))
        return turned
    top, sign, low = kind(255 << (bits - 8)), kind(1 << (bits - 9)), kind((1 << (bits - 9)) - 1)
    restored: Words = ((words & top) >> kind(1)) | ((words & sign) << kind(8)) | (words & low)
    return restored


def _join(planes: tuple[ByteArray, ...], width: int) -> Words:
    words = np.zeros((planes[0].size, width), np.uint8)
    for index, plane in enumerate(planes):
        words[:, index] = plane
    return words.reshape(-1).view(unsigned(width))


def _write_steps(
    positions: npt.NDArray[np.intp], steps: Words, length: int, gaps: ByteArray, planes: ByteArray
) -> tuple[int, int]:
    skipped = np.diff(positions, prepend=-1) - 1
    escapes = skipped // 255
    ends = np.cumsum(escapes + 1)
    size = int(ends[-1]) if ends.size else 0
    gaps[:size] = 255
    gaps[ends - 1] = skipped - 255 * escapes
    codes = _zigzag(steps) - steps.dtype.type(1)
    _split_into(codes, planes, length)
    return size, positions.size


def _split_into(words: Words, planes: ByteArray, stride: int) -> None:
    columns = np.ascontiguousarray(words).view(np.uint8).reshape(words.size, words.itemsize)
    for index in range(words.itemsize):
        planes[index * stride : index * stride + words.size] = columns[:, index]


def extract(
    baseline: ByteArray, live: ByteArray, gaps: ByteArray, planes: ByteArray, width: int, floating: bool
) -> tuple[int, int]:
    """Steps from `baseline` to `live`; `baseline` becomes a copy of `live`. Gives (gap bytes, changes)."""
    private = live.copy()  # another thread may write to `live`: this is the only look at it
    old, new = baseline.view(unsigned(width)), private.view(unsigned(width))
    positions = np.flatnonzero(old != new)
    steps = _rank(new[positions], floating) - _rank(old[positions], floating)
    old[positions] = new[positions]
    return _write_steps(positions, steps, new.size, gaps, planes)


def collect(total: ByteArray, gaps: ByteArray, planes: ByteArray, width: int) -> tuple[int, int]:
    """The nonzero integer words of `total` as steps. Gives (gap bytes, changes)."""
    words = total.view(unsigned(width))
    positions = np.flatnonzero(words)
    return _write_steps(positions, words[positions], words.size, gaps, planes)


def apply(target: ByteArray, gaps: ByteArray, planes: tuple[ByteArray, ...], width: int, floating: bool) -> bool:
    """Adds steps in rank space, in place. False, and nothing changed, when they do not fit."""
    words = target.view(unsigned(width))
    ends = np.flatnonzero(gaps != 255)
    if ends.size != planes[0].size or (gaps.size and gaps[-1] == 255):
        return False
    if not ends.size:
        return True
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
    if positions[-1] >= words.size:
        return False
    steps = _unzigzag(_join(planes, width) + words.dtype.type(1))
    words[positions] = _word(_rank(words[positions], floating) + steps, floating)
    return True


def add(target: ByteArray, steps: ByteArray, width: int, floating: bool) -> None:
    """Adds one step to every word, in rank space, in place."""
    words = target.view(unsigned(width))
    words[:] = _word(_rank(words, floating) + steps.view(unsigned(width)), floating)


def split(words: ByteArray, planes: ByteArray, width: int, transform: int) -> None:
    """Byte planes of the transformed words, one after the other in `planes`."""
    values = words.view(unsigned(width))
    if transform == ROTATE:
        values = _rotated(values)
    elif transform == ZIGZAG:
        values = _zigzag(values)
    _split_into(values, planes, values.size)


def merge(planes: tuple[ByteArray, ...], words: ByteArray, width: int, transform: int) -> None:
    """The inverse of `split`."""
    values = _join(planes, width)
    if transform == ROTATE:
        values = _unrotated(values)
    elif transform == ZIGZAG:
        values = _unzigzag(values)
    words.view(unsigned(width))[:] = values


def pack(planes: tuple[ByteArray, ...], codes: ByteArray, longs: ByteArray, width: int) -> int:
    """Two-bit codes of the steps, and all bytes of those that have none. Gives the number of these."""
    count = planes[0].size
    short = planes[0] < 3
    for index in range(1, width):
        short &= planes[index] == 0
    quads = np.zeros((count + 3) // 4 * 4, np.uint8)
    quads[:count] = np.where(short, planes[0], 3)
    quads = quads.reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8)
    codes[: quads.shape[0]] = np.bitwise_or.reduce(quads, axis=1)
    escaped = ~short
    size = int(np.count_nonzero(escaped))
    for index, plane in enumerate(planes):
        longs[index * count : index * count + size] = plane[escaped]
    return size


def _unpack(codes: ByteArray, longs: tuple[ByteArray, ...], count: int) -> tuple[ByteArray, ...] | None:
    """The inverse of `pack`. None when codes and long steps do not fit together."""
    short: ByteArray = (codes[:, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)).reshape(-1)
    escaped = short[:count] == 3
    if short[count:].any() or int(np.count_nonzero(escaped)) != longs[0].size:
        return None
    planes = (short[:count], *(np.zeros(count, np.uint8) for _ in longs[1:]))
    for plane, long in zip(planes, longs, strict=True):
        plane[escaped] = long
    return planes


def apply_packed(
    target: ByteArray,
    gaps: ByteArray,
    codes: ByteArray,
    longs: tuple[ByteArray, ...],
    count: int,
    width: int,
    floating: bool,
) -> bool:
    """`apply` of what `pack` gives. False, and nothing changed, when it does not fit."""
    planes = _unpack(codes, longs, count)
    return planes is not None and apply(target, gaps, planes, width, floating)


def add_sparse(*_: object) -> bool:
    """Nothing is gained by several deltas at once here: always False, nothing changed."""
    return False
