"""Deltas: `sparse-ulp@1` and `dense-ulp@1`, the steps from one version of a chunk to another.

    sparse-ulp@1   word code byte; changes, gap bytes, long steps; streams: gaps, two-bit codes, `width` planes of long steps
    dense-ulp@1    word code byte; changes; streams: `width` planes of zigzag(step) over all words of the chunk

Numbers and streams are framed as in `streams`, gaps and codes made as in `kernel`.

Which one: sparse below a density of 0.5, dense from 0.6 on, between the two whichever is smaller. Measured on chunks of 2^20
words, real MiniLM weights with Laplacian updates, bytes of sparse / dense: bf16 at density 0.02 0.52, at 0.23 0.70, at 0.45
0.93, at 0.61 1.02, at 0.75 1.08; fp32 at 0.25 0.80, at 0.50 0.98, at 0.56 0.99, at 0.82 1.09. From 0.5 on the dense form also
decodes three times faster.

The two-bit codes: on a step of MiniLM bf16 at 1 % density, the bytes of all zigzag steps as one plane cost 1.20 bytes per change
with the gaps, codes and long planes 1.15, because 90 % of the steps are +1 or -1, too few kinds for Huffman codes, while
four codes in a byte are many. It also makes the raw form of small tensors 1.25 bytes per change instead of 2 to 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltastore.codecs import kernel
from deltastore.codecs.streams import Payload, PayloadReader, decompressor, write_payload
from deltastore.codecs.word import ByteArray, Steps, Word, unsigned
from deltastore.errors import FormatError, UnsupportedFormatError

SPARSE, DENSE = "sparse-ulp@1", "dense-ulp@1"
SPARSE_BELOW = 0.5  # share of changed words below which the sparse form is always taken
DENSE_FROM = 0.6  # and from which the dense one is
_MAX_COUNT = 1 << 40


def encode_delta(steps: Steps) -> tuple[str, bytes]:
    """Codec id and payload of some steps."""
    if steps.density < SPARSE_BELOW:
        return SPARSE, encode_sparse(steps)
    if steps.density >= DENSE_FROM:
        return DENSE, encode_dense(steps)
    sparse, dense = encode_sparse(steps), encode_dense(steps)
    return (SPARSE, sparse) if len(sparse) <= len(dense) else (DENSE, dense)


def uncompressed(codec: str, payload: bytes, steps: Steps) -> tuple[str, bytes]:
    """A delta of `encode_delta` in the form that is quickest to sum again: a sparse one without zstd, a dense one as it is."""
    return (codec, encode_sparse(steps, compress=False)) if codec == SPARSE else (codec, payload)


def encode_sparse(steps: Steps, *, compress: bool = True) -> bytes:
    """A `sparse-ulp@1` payload."""
    codes, longs = kernel.pack(steps)
    numbers = (steps.count, steps.gaps.size, longs[0].size)
    return write_payload(steps.word, numbers, (steps.gaps, codes, *longs), compress=compress)


def encode_dense(steps: Steps) -> bytes:
    """A `dense-ulp@1` payload."""
    total = kernel.zeros(steps.length * steps.word.width)
    kernel.accumulate(total, steps)
    return write_payload(steps.word, (steps.count,), kernel.split(total, steps.word, "zigzag"))


def is_delta(codec: str) -> bool:
    """Whether a chunk of this codec needs a base."""
    return codec in (SPARSE, DENSE)


def delta_summary(codec: str, payload: Payload) -> tuple[Word, int]:
    """The word of a delta and the number of words it changes, from the first bytes."""
    reader = _reader(codec, payload)
    return reader.word(), reader.number(_MAX_COUNT, "number of changes")


def apply_delta(codec: str, payload: Payload, target: ByteArray) -> None:
    """Takes `target`, 1-d uint8 with the bytes of the base, to the version of the delta, in place.

    FormatError for a damaged payload or one of another chunk, UnsupportedFormatError for an unknown codec; the target is then
    untouched.
    """
    reader = _reader(codec, payload)
    word = reader.word()
    _decode(reader, codec, word, target, word.floating)


def apply_together(deltas: Sequence[tuple[str, Payload]], target: ByteArray) -> list[int]:
    """Applies as many of the deltas (codec, payload) as one call of the native kernel takes.

    Steps commute, so any of them may come first. Gives the indices of the others, which are yet to be applied by
    `apply_delta`: it takes all forms, and says what is wrong with a damaged one.
    """
    for codec, payload in deltas:
        if codec == SPARSE and len(payload):
            try:
                word = Word.from_code(payload[0])
            except FormatError:
                break
            return _add_together(deltas, target, word, word.floating)
    return list(range(len(deltas)))


def _add_together(deltas: Sequence[tuple[str, Payload]], target: ByteArray, word: Word, floating: bool) -> list[int]:
    sparse = [index for index, (codec, _) in enumerate(deltas) if codec == SPARSE]
    rest = [index for index, (codec, _) in enumerate(deltas) if codec != SPARSE]
    if target.size % word.width:
        return sparse + rest
    decompress = decompressor()
    for start in range(0, len(sparse), kernel.TOGETHER):
        group = sparse[start : start + kernel.TOGETHER]
        if not kernel.add_sparse(target, [deltas[index][1] for index in group], decompress, word, floating):
            rest += group
    return rest


def accumulate_delta(codec: str, payload: Payload, total: ByteArray, word: Word) -> None:
    """Adds the steps of a delta to the integers of `total`, 1-d uint8 of the chunk's size, in place. Errors as `apply_delta`."""
    reader = _reader(codec, payload)
    found = reader.word()
    if found != word:
        raise reader.damaged(f"its words are {found}, expected {word}")
    _decode(reader, codec, word, total, False)


def accumulate_deltas(deltas: Sequence[tuple[str, Payload]], total: ByteArray, word: Word) -> None:
    """`accumulate_delta` for several deltas (codec, payload)."""
    for index in _add_together(deltas, total, word, False):
        accumulate_delta(*deltas[index], total, word)


def _reader(codec: str, payload: Payload) -> PayloadReader:
    if not is_delta(codec):
        raise UnsupportedFormatError(
            f"codec {codec!r} of a delta is unknown here, expected {SPARSE} or {DENSE}: upgrade deltastore"
        )
    return PayloadReader(payload, codec)


def _decode(reader: PayloadReader, codec: str, word: Word, target: ByteArray, floating: bool) -> None:
    if target.size % word.width:
        raise reader.damaged(f"{word.width}-byte words can't fill {target.size} bytes")
    length = target.size // word.width
    count = reader.number(length, "number of changes")
    if codec == DENSE:
        planes = reader.streams([length] * word.width)
        steps = kernel.merge(tuple(planes), word, "zigzag")
        changes = np.count_nonzero(steps.view(unsigned(word.width)))
        if changes != count:
            raise reader.damaged(f"{changes} words change, it says {count}")
        kernel.add(target, steps, Word(word.width, floating))
        return
    gap_bytes = reader.number(count + length // 255, "number of gap bytes")
    escaped = reader.number(count, "number of long steps")
    gaps, codes, *longs = reader.streams([gap_bytes, (count + 3) // 4] + [escaped] * word.width)
    kernel.apply_packed(target, gaps, codes, tuple(longs), count, Word(word.width, floating))
