"""Every digest of format 1: of chunks, tensors, trees and commits.

A chunk is known by BLAKE3; xxh3-128 (seed 0, canonical big-endian form) stands beside it as the fast check. What is
built of chunks is known by SHA-256 over a domain line, a canonical document and the digests below it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from deltastore import canonical
from deltastore.options import CHUNK_ELEMENTS

DIGEST_BYTES = 32  # BLAKE3 and SHA-256
FAST_DIGEST_BYTES = 16  # xxh3-128

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


def chunk_digest(buffer: Buffer) -> bytes:
    """BLAKE3 of the raw bytes of a chunk: 32 bytes. Large buffers are hashed with the interpreter lock released."""
    return blake3.blake3(buffer).digest()  # type: ignore[arg-type]


def fast_digest(buffer: Buffer) -> bytes:
    """xxh3-128 of the raw bytes of a chunk: 16 bytes, big-endian."""
    return xxhash.xxh3_128_digest(buffer)  # type: ignore[arg-type]


def tensor_digest(dtype: str, shape: Sequence[int], digests: bytes) -> bytes:
    """SHA-256 over dtype name, shape and the concatenated 32-byte chunk digests in flat order."""
    document = canonical.dumps({"dtype": dtype, "shape": [int(size) for size in shape]})
    return hashlib.sha256(b"deltastore tensor 1\n" + document + b"\n" + digests).digest()


def bytes_digest(data: bytes) -> str:
    """The tensor digest, as hex digits, of some bytes as a tensor of uint8: that of a file, stored inline or in chunks."""
    view = memoryview(data)
    digests = b"".join(chunk_digest(view[at : at + CHUNK_ELEMENTS]) for at in range(0, len(data), CHUNK_ELEMENTS))
    return tensor_digest("uint8", (len(data),), digests).hex()


def tree_digest(document: dict[str, Any]) -> str:
    """SHA-256, in hex, of a tree document.

    Its members: `files` ([name, tensor digest in hex] pairs), `state` (the root node), `tensors` (tensor digests in
    hex) and `values` (packed plain values).
    """
    return hashlib.sha256(b"deltastore tree 1\n" + canonical.dumps(document)).hexdigest()


def commit_id(identity: dict[str, Any]) -> str:
    """SHA-256, in hex, of the identity document of a commit."""
    return hashlib.sha256(b"deltastore commit 1\n" + canonical.dumps(identity)).hexdigest()
