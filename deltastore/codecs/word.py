"""Words and steps: what the codecs see of a tensor.

A chunk is a run of *words* of 1, 2, 4 or 8 little-endian bytes. Words are either sign-magnitude floats (float64 down to
float8, whatever the split of exponent and mantissa) or integers (also bool and packed types).

`rank` maps a word to an integer: for floats it orders the bit patterns as the numbers they stand for, `~x` when the sign bit
is set and `x | sign` else; for integers it is the identity. A *step* is `rank(new) - rank(old)` modulo 2^bits. No arithmetic
on floats takes part, so NaN payloads, -0.0 and infinities are words like all others, and the steps of successive
versions add up to the step between the first and the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltastore.errors import FormatError, InvalidInputError

ByteArray = npt.NDArray[np.uint8]
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Word:
    """The kind of a word: `width` in bytes, and whether its bits are a sign-magnitude float."""

    width: int
    floating: bool

    def __post_init__(self) -> None:
        if self.width not in WIDTHS:
            raise InvalidInputError(f"a word is 1, 2, 4 or 8 bytes wide, not {self.width!r}: split the element into words")

    @property
    def code(self) -> int:
        """The byte that stands for this word in payloads: log2(width), plus 4 for floats."""
        return self.width.bit_length() - 1 | (4 if self.floating else 0)

    @staticmethod
    def from_code(code: int) -> Word:
        """The word of a code byte. FormatError when there is none."""
        if not 0 <= code < 8:
            raise FormatError(
                f"payload begins with word code {code}, expected 0 to 7: its bytes are damaged, run `deltastore verify`"
            )
        return _WORDS[code]


_WORDS = tuple(Word(1 << (code & 3), code >= 4) for code in range(8))


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The nonzero steps of `length` words.

    `gaps`: uint8, for each change the number of unchanged words before it (255 = add 255 and go on).
    `planes`: `word.width` uint8 arrays of one byte per change, the little-endian bytes of zigzag(step) - 1.
    """

    word: Word
    length: int
    gaps: ByteArray
    planes: tuple[ByteArray, ...]

    @property
    def count(self) -> int:
        """Number of changed words."""
        return self.planes[0].size

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.gaps.nbytes + sum(plane.nbytes for plane in self.planes)

    @property
    def density(self) -> float:
        """Share of changed words, 0.0 when there are none at all."""
        return self.count / self.length if self.length else 0.0


def word_count(buffer: ByteArray, word: Word) -> int:
    """Number of words in a 1-d uint8 buffer. InvalidInputError when it does not hold whole words."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise InvalidInputError(
            f"codecs work on 1-d contiguous uint8 arrays, found {buffer.ndim}-d {buffer.dtype}: "
            "use np.ascontiguousarray(x).reshape(-1).view(np.uint8)"
        )
    if buffer.size % word.width:
        raise InvalidInputError(f"{buffer.size} bytes are no whole number of {word.width}-byte words: check the dtype")
    return buffer.size // word.width


def unsigned(word_width: int) -> np.dtype[Any]:
    """The little-endian unsigned NumPy dtype of a word."""
    return np.dtype(f"<u{word_width}")
