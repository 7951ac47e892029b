"""Codecs: pure functions between chunk bytes and payload bytes. Buffers are 1-d C-contiguous uint8 arrays.

`kernel` finds, adds and folds steps; `full` and `delta` make payloads of chunks and steps and read them back. Payloads are
bytes from outside: whatever they hold, decoding gives FormatError or stays within the output.
"""

from deltastore.codecs.delta import (
    accumulate_delta,
    accumulate_deltas,
    apply_delta,
    apply_together,
    delta_summary,
    encode_delta,
    is_delta,
    uncompressed,
)
from deltastore.codecs.full import decode_full, encode_full
from deltastore.codecs.word import Steps, Word

__all__ = [
    "Steps",
    "Word",
    "accumulate_delta",
    "accumulate_deltas",
    "apply_delta",
    "apply_together",
    "decode_full",
    "delta_summary",
    "encode_delta",
    "encode_full",
    "is_delta",
    "uncompressed",
]
