"""Payload framing: numbers and byte streams, each stream stored in the cheapest of three modes.

A number is an unsigned LEB128 varint. Each stream has a head, varint(stored length << 2 | mode), and the heads of all
streams of a payload stand before the first stored byte. Raw lengths follow from the numbers before them, so nothing is
decompressed without a known bound.

    mode 0   all bytes are zero, nothing is stored
    mode 1   raw
    mode 2   one zstd frame without magic number, content size, checksum or dictionary; its window is the smallest power of
             two from 1 KiB to 1 MiB that holds the stream, 1 MiB for longer ones

The streams here carry next to no repetition: matches that zstd finds are accidents, cost more than the Huffman codes they
replace, and slow both directions down. So the compressor runs with the fastest strategy, the longest minimum match (7)
and a table of 64 entries, which comes nearest to Huffman coding alone: the exponent planes of MiniLM need 0.326 of their
raw bytes (order-0 entropy 0.325) against 0.363 with level 1 and 0.405 with level 3, at more than twice the speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import zstandard

from deltastore.codecs.word import ByteArray, Word
from deltastore.errors import FormatError

ZERO, RAW, ZSTD = 0, 1, 2
Payload = bytes | bytearray | memoryview | ByteArray

MIN_ZSTD_BYTES = 24  # below, no frame is shorter than its content
MIN_WINDOW_LOG, MAX_WINDOW_LOG = 10, 20
SAMPLE_BYTES = 1 << 14  # looked at before a large stream is compressed
INCOMPRESSIBLE = 0.985  # order-0 share from which a large stream stays raw
_LARGE = 8 * SAMPLE_BYTES
_SMALL_VARINTS = tuple(bytes([number]) for number in range(128))


class _Coders(threading.local):
    """zstd contexts: reusable, not thread-safe, so one pair per thread."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
            compression_level=1,
            strategy=zstandard.STRATEGY_FAST,
            window_log=MAX_WINDOW_LOG,
            hash_log=6,
            min_match=7,
            target_length=0,
            write_content_size=0,
            write_checksum=0,
            write_dict_id=0,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS, max_window_size=1 << MAX_WINDOW_LOG
        )


_coders = _Coders()


def decompressor() -> Callable[..., bytes]:
    """How this thread decompresses a stream: (frame, raw length, False, False) -> bytes. For the native kernel."""
    decompress: Callable[..., bytes] = _coders.decompressor.decompress
    return decompress


def varint(number: int) -> bytes:
    """An unsigned LEB128 number."""
    if number < 128:
        return _SMALL_VARINTS[number]
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _frame_start(length: int) -> bytes:
    """The first two bytes of the frame of a stream: nothing but a window, which RFC 8878 writes as (log - 10) << 3."""
    log = min(max((length - 1).bit_length(), MIN_WINDOW_LOG), MAX_WINDOW_LOG)
    return bytes([0, (log - MIN_WINDOW_LOG) << 3])


def _worth_compressing(raw: ByteArray) -> bool:
    """Whether a large stream's order-0 entropy, estimated from 16 slices of it, leaves something to save."""
    if raw.size < _LARGE:
        return True
    slices = raw[: raw.size // 16 * 16].reshape(16, -1)[:, : SAMPLE_BYTES // 16]
    shares = np.bincount(slices.ravel(), minlength=256) / SAMPLE_BYTES
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum()) / 8 < INCOMPRESSIBLE


def _is_zero(raw: ByteArray) -> bool:
    if raw.size <= SAMPLE_BYTES:
        return not raw.tobytes().strip(b"\0")  # a tenth of the time that NumPy takes to begin
    return not raw.max()  # quicker than any(), which converts to bool


def _store(raw: ByteArray, compress: bool) -> tuple[int, bytes | memoryview]:
    if _is_zero(raw):
        return ZERO, b""
    if compress and raw.size >= MIN_ZSTD_BYTES and _worth_compressing(raw):
        frame: bytes = _coders.compressor.compress(raw.data)
        start = _frame_start(raw.size)
        if len(frame) < raw.size and frame[0] == 0 and frame[1] <= start[1]:  # a larger window than was used does no harm
            return ZSTD, frame if frame[1] == start[1] else start + frame[2:]
    return RAW, raw.data


def write_payload(word: Word, numbers: Sequence[int], streams: Sequence[ByteArray], *, compress: bool = True) -> bytes:
    """A payload: word code byte, varint numbers, stream heads, stored streams.

    Without `compress` all streams are raw or zero: larger, but read in no time.
    """
    stored = [_store(stream, compress) for stream in streams]
    head = bytes([word.code]) + b"".join(map(varint, numbers))
    heads = b"".join(varint(len(body) << 2 | mode) for mode, body in stored)
    return b"".join([head, heads, *(body for _, body in stored)])


class PayloadReader:
    """Reads a payload from front to back; everything that does not add up is a FormatError naming `what`."""

    def __init__(self, payload: Payload, what: str) -> None:
        view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        self._bytes = view.cast("B") if len(payload) else memoryview(b"")
        self._at = 0
        self._what = what

    def damaged(self, problem: str) -> FormatError:
        """The error for a problem in this payload."""
        return FormatError(
            f"{self._what} payload of {len(self._bytes)} bytes: {problem}; the pack is damaged, run `deltastore verify`"
        )

    def word(self) -> Word:
        """The word of the first byte."""
        if not len(self._bytes):
            raise self.damaged("no word code byte")
        self._at = 1
        return Word.from_code(self._bytes[0])

    def number(self, limit: int, name: str) -> int:
        """A varint of at most `limit`."""
        number = 0
        at = self._at
        for shift in range(0, 63, 7):
            if at >= len(self._bytes):
                raise self.damaged(f"ends inside the {name}")
            byte = self._bytes[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                self._at = at
                if number > limit:
                    raise self.damaged(f"{name} is {number}, expected at most {limit}")
                return number
        raise self.damaged(f"{name} is longer than 9 bytes")

    def streams(self, raw_lengths: Sequence[int]) -> list[ByteArray]:
        """All streams up to the end of the payload, given their raw lengths. Arrays may be read-only views."""
        heads = [self.number(length << 2 | 3, "stream head") for length in raw_lengths]
        expected = self._at + sum(head >> 2 for head in heads)
        if expected != len(self._bytes):
            raise self.damaged(f"streams end at byte {expected}")
        return [self._stream(head & 3, head >> 2, length) for head, length in zip(heads, raw_lengths, strict=True)]

    def _stream(self, mode: int, stored: int, length: int) -> ByteArray:
        body = self._bytes[self._at : self._at + stored]
        self._at += stored
        if mode == ZERO and not stored:
            return np.zeros(length, np.uint8)
        if mode == RAW and stored == length:
            return np.frombuffer(body, np.uint8)
        if mode == ZSTD and 2 < stored < length and body[:2] == _frame_start(length):
            try:
                raw = _coders.decompressor.decompress(body, max_output_size=length, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise self.damaged(f"a stream of {stored} bytes does not decompress ({error})") from None
            if len(raw) == length:
                return np.frombuffer(raw, np.uint8)
            raise self.damaged(f"a stream decompresses to {len(raw)} bytes, expected {length}")
        raise self.damaged(f"a stream of {length} bytes can't be {stored} bytes in mode {mode}")
