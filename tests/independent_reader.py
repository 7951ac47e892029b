"""Reads a store from the objects in its folder alone, as docs/FORMAT.md describes them, and verifies every digest on the way.

Shares no code with the library, so that it can bear witness against it. `BrokenStore` says what does not hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import zstandard
from blake3 import blake3
from safetensors import safe_open
from xxhash import xxh3_128_digest

COLUMNS = ["raw_length", "stored_length", "span", "base_pack", "base_row", "digest", "fast_digest", "codec", "bases"]
PLACES = ["pack_size", "pack_head", "pack", "row", "digest", "pack_id"]
Content = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes of a tensor


class BrokenStore(Exception):
    pass


def check(holds: bool, what: str) -> None:
    if not holds:
        raise BrokenStore(what)


# -- documents (sections 2, 5 and 9) ------------------------------------------------------------------------------------
def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse(data: bytes, kind: str, fields: str) -> Any:
    """A document. It equals its canonical form, so it has no key twice, no fraction, no NaN and no lone surrogate."""
    document = json.loads(data)
    check(canonical(document) == data, f"a {kind} is not canonical")
    check((document["format"], document["kind"]) == (1, kind), f"not a {kind} of format 1")
    check(document.keys() == {"format", "kind", *fields.split()}, f"a {kind} has other fields: {sorted(document)}")
    return document


def sha256(kind: str, *parts: bytes) -> str:
    return hashlib.sha256(b"".join([f"deltastore {kind} 1\n".encode(), *parts])).hexdigest()


def tensor_digest(dtype: str, shape: list[int], digests: bytes) -> str:
    return sha256("tensor", canonical({"dtype": dtype, "shape": shape}), b"\n", digests)


def unpack(value: Any) -> Any:
    """A plain value from its packed form."""
    if isinstance(value, list):
        return [unpack(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in "do":
        return (dict if tag == "d" else OrderedDict)((unpack(key), unpack(each)) for key, each in content)
    if tag == "f":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    return {"i": int, "b": b64decode, "t": lambda items: tuple(map(unpack, items))}[tag](content)


def build(node: Any, leaf: Callable[[str, str, int], Any], path: tuple[str, ...] = ()) -> Any:
    """The nested state of a node; `leaf` makes what stands in it from name, kind ("x" tensor, "v" value) and number."""
    kind = next(each for each in "xvltdo" if each in node)
    if kind in "xv":
        return leaf(".".join(path), kind, node[kind])
    if kind in "lt":
        items = [build(each, leaf, (*path, str(at))) for at, each in enumerate(node[kind])]
        return items if kind == "l" else tuple(items)
    state = {} if kind == "d" else OrderedDict()
    for key, each in [(unpack(packed), each) for packed, each in node[kind]]:
        state[key] = build(each, leaf, (*path, key.hex() if isinstance(key, bytes) else str(key)))
    if "m" in node:
        state._metadata = unpack(node["m"])  # type: ignore[attr-defined]
    return state


# -- codecs (section 8) -------------------------------------------------------------------------------------------------
def read_streams(payload: bytes, count: int, lengths: Callable[..., list[int]]) -> tuple[list[int], list[np.ndarray]]:
    """Numbers and streams of a payload; `lengths` tells the raw length of every stream from the `count` numbers."""
    numbers: list[int] = []
    at, raw_lengths = 1, None
    while raw_lengths is None or len(numbers) < count + len(raw_lengths):
        ends = next(end for end in range(at, at + 9) if payload[end] < 128)
        numbers.append(sum((payload[i] & 127) << 7 * (i - at) for i in range(at, ends + 1)))
        at = ends + 1
        if len(numbers) == count: raw_lengths = lengths(*numbers)
    streams = []
