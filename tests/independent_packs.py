"""Manifests, packs and the chunks in them, as sections 6 to 8 of docs/FORMAT.md describe them; part of independent_reader."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3
from safetensors import safe_open
from xxhash import xxh3_128_digest

PLACES = ["pack_size", "pack_head", "pack", "row", "digest", "pack_id"]
COLUMNS = ["raw_length", "stored_length", "span", "base_pack", "base_row", "digest", "fast_digest", "codec", "bases"]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes


class Packs:
    """The packs and manifests of a folder. Keeps what was read last."""

    def __init__(self, root: Path) -> None:
        self.root, self.chunk = root, lru_cache(128)(self.read_chunk)
        self.pack, self.manifest = lru_cache(128)(self.read_pack), lru_cache(128)(self.read_manifest)

    def columns(self, key: str, names: list[str], kind: str) -> dict[str, Any]:
        """The metadata and the columns of a safetensors file."""
        with safe_open(self.root / key, "numpy") as file:
            assert [name for name in file.offset_keys() if name != "payload"] == names, f"{key} holds other tensors"
            metadata = file.metadata()
            assert metadata["format"] == f"deltastore {kind} 1", f"{key} is no {kind} of format 1"
            columns = {name: file.get_tensor(name) for name in names}
        for name in {"pack_id", "bases"} & columns.keys():
            columns[name] = [str(UUID(bytes=bytes(each))) for each in columns[name]]
        return {**metadata, **columns}

    def read_manifest(self, key: str) -> list[tuple[str, int, bytes]]:
        """Pack id, row in that pack and digest of each chunk."""
        manifest = self.columns(key, PLACES, "manifest")
        packs = [manifest["pack_id"][at] for at in manifest["pack"]]
        return list(zip(packs, manifest["row"].tolist(), map(bytes, manifest["digest"]), strict=True))

    def read_pack(self, pack_id: str) -> dict[str, Any]:
        key = f"packs/{pack_id[-2:]}/{pack_id}"
        pack, data = self.columns(key, COLUMNS, "pack"), np.memmap(self.root / key, np.uint8, "r")
        assert pack["id"] == pack_id, f"{key} says that it is pack {pack['id']}"
        ends = np.cumsum(pack["stored_length"], dtype=np.int64)
        return {**pack, "payloads": np.split(data[len(data) - ends[-1] :], ends[:-1])}

    def read_chunk(self, pack_id: str, row: int, digest: bytes | None = None) -> Bytes:
        """The chunk of an entry, verified, as are those that it is based on."""
        pack = self.pack(pack_id)
        base_pack, base_row, raw_length = (int(pack[name][row]) for name in ("base_pack", "base_row", "raw_length"))
        base = self.chunk(pack["bases"][base_pack], base_row) if pack["span"][row] else None
        codec = pack["codecs"].split(" ")[pack["codec"][row]]
        chunk = decode(codec, bytes(pack["payloads"][row]), raw_length, base)
        assert len(chunk) == raw_length, f"row {row} of pack {pack_id} has another length"
        assert xxh3_128_digest(bytes(chunk)) == bytes(pack["fast_digest"][row]), f"xxh3 of row {row}, pack {pack_id}"
        assert blake3(bytes(chunk)).digest() == bytes(pack["digest"][row]), f"BLAKE3 of row {row}, pack {pack_id}"
        assert digest in (None, bytes(pack["digest"][row])), f"row {row} of pack {pack_id} is another chunk"
        return chunk


def read_streams(payload: bytes, count: int, lengths: Callable[..., list[int]]) -> tuple[list[int], list[Bytes]]:
    """The `count` numbers of a payload and its streams, whose raw lengths `lengths` tells from the numbers."""
    at = 1

    def number() -> int:
        nonlocal at
        start, at = at, next(end + 1 for end in range(at, at + 9) if payload[end] < 128)
        return sum((byte & 127) << 7 * place for place, byte in enumerate(payload[start:at]))

    numbers = [number() for _ in range(count)]
    streams = []
    for (stored, mode), length in [(divmod(number(), 4), length) for length in lengths(*numbers)]:
        body, at = payload[at : at + stored], at + stored
        if mode == 2:
            assert stored < length, f"{stored} bytes of zstd for a stream of {length}"
            assert body[0] == 0, f"frame header descriptor {body[0]}"
            frame = zstandard.ZstdDecompressor(max_window_size=2 << 20)
            body = frame.decompress(b"\x28\xb5\x2f\xfd" + body, length, allow_extra_data=False)
        assert mode in (1, 2) or (mode, stored) == (0, 0), f"a stream has mode {mode} and {stored} bytes"
        streams.append(np.frombuffer(body, np.uint8) if mode else np.zeros(length, np.uint8))
        assert len(streams[-1]) == length, f"a stream has {len(streams[-1])} bytes, expected {length}"
    assert at == len(payload), f"the streams end at byte {at} of {len(payload)}"
    return numbers, streams


def decode(codec: str, payload: bytes, raw_length: int, base: Bytes | None) -> Bytes:
    """The chunk, uint8[raw_length], of a full entry (`base` is None) or of a delta on `base`."""
    assert (base is None) == (codec in ("raw@1", "planes@1")), f"{codec} stands in the wrong kind of entry"
    if codec == "raw@1":
        return np.frombuffer(payload, np.uint8)
    assert payload[0] < 8, f"word code {payload[0]}"
    width, floating = 1 << payload[0] % 4, payload[0] >= 4
    length, bits, word = raw_length // width, 8 * width, np.dtype(f"<u{width}")
    assert length * width == raw_length, f"{raw_length} bytes are no words of {width}"

    def merge(planes: list[Bytes]) -> Words:
        return np.stack(planes, axis=1).reshape(-1).view(word)

    if base is None:
        assert codec == "planes@1"
        words = merge(read_streams(payload, 0, lambda: [length] * width)[1])
        return (untransformed(words, bits) if floating else words).view(np.uint8)
    if codec == "dense-ulp@1":
        (count,), planes = read_streams(payload, 1, lambda count: [length] * width)
        where, zigzag = np.arange(length), merge(planes)
        assert np.count_nonzero(zigzag) == count, "another number of words changes"
    else:
        assert codec == "sparse-ulp@1", f"unknown codec {codec}"
        layout = lambda count, gap_bytes, long: [gap_bytes, (count + 3) // 4, *[long] * width]  # noqa: E731
        (count, _, _), (gaps, fours, *planes) = read_streams(payload, 3, layout)
        where = np.cumsum(gaps, dtype=np.int64)[gaps < 255] + np.arange(count)
        assert (gaps[-1:] < 255).all(), "the gaps end with 255"
        assert (where[-1:] < length).all(), "a change lies behind the chunk"
        codes = (fours[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1)
        assert not codes[count:].any(), "unused bits of the codes are not 0"
        zigzag = codes[:count].astype(word) + 1
        zigzag[codes[:count] == 3] = merge(planes) + 1
    steps = zigzag >> 1 ^ -(zigzag & 1)
    words = base.copy().view(word)
    ranks = swapped(words[where], bits) if floating else words[where]
    words[where] = swapped(ranks + steps, bits, back=True) if floating else ranks + steps
    return words.view(np.uint8)


def untransformed(words: Words, bits: int) -> Words:
    """Moves the sign back from below the eight bits of the exponent (seven in words of 8 bits) to the top."""
    low = max(0, bits - 9)  # that many bits lie below the sign
    return (words >> low + 1 << low) | ((words >> low & 1) << bits - 1) | (words & (1 << low) - 1)


def swapped(words: Words, bits: int, back: bool = False) -> Words:
    """Ranks of sign-magnitude words, or the words of ranks."""
    sign = 1 << bits - 1
    return np.where(words >= sign, words ^ sign, ~words) if back else np.where(words >= sign, ~words, words | sign)
