"""Full chunks: `raw@1` and `planes@1`.

`planes@1` is the word code byte and `width` streams, the byte planes of the words, lowest first. In float words the sign is moved
below the eight bits after it before, so that the exponent, the only part that compresses well, fills the highest plane of bf16
and fp32, and the lower planes of numbers of less precision (fp32 made of bf16 or fp16) stay zero, which they would not if the
whole word were rotated. Whole MiniLM: 66.5 % of its raw bytes in bf16, 81.9 % in fp32 (order-0 entropy of the planes 81.9 %).
"""

from __future__ import annotations

import numpy as np

from deltastore.codecs import kernel
from deltastore.codecs.streams import Payload, PayloadReader, write_payload
from deltastore.codecs.word import ByteArray, Word, word_count
from deltastore.errors import FormatError, UnsupportedFormatError

RAW, PLANES = "raw@1", "planes@1"
WORTHWHILE = 0.98  # planes are kept when they need at most this share of the raw bytes


def encode_full(raw: ByteArray, word: Word) -> tuple[str, bytes]:
    """The smallest full encoding of a chunk (1-d uint8): codec id and payload, never longer than the chunk."""
    word_count(raw, word)
    planes = kernel.split(raw, word, "rotate" if word.floating else "plain")
    payload = write_payload(word, (), planes)
    if len(payload) <= WORTHWHILE * raw.size:
        return PLANES, payload
    return RAW, raw.tobytes()


def decode_full(codec: str, payload: Payload, out: ByteArray) -> None:
    """Fills `out`, 1-d uint8 of the chunk's raw length. FormatError for damaged, UnsupportedFormatError for unknown bytes."""
    if codec == RAW:
        if len(payload) != out.size:
            raise FormatError(f"{RAW} payload has {len(payload)} bytes, its chunk {out.size}: run `deltastore verify`")
        out[:] = np.frombuffer(payload, np.uint8)
        return
    if codec != PLANES:
        raise UnsupportedFormatError(
            f"codec {codec!r} of a full chunk is unknown here, expected {RAW} or {PLANES}: upgrade deltastore"
        )
    reader = PayloadReader(payload, PLANES)
    word = reader.word()
    if out.size % word.width:
        raise reader.damaged(f"{word.width}-byte words can't fill {out.size} bytes")
    planes = reader.streams([out.size // word.width] * word.width)
    kernel.merge(tuple(planes), word, "rotate" if word.floating else "plain", out)
