"""Reads a store as docs/FORMAT.md describes it and verifies every digest: `python tests/independent_reader.py STORE`.

Shares no code with the library, so that it can bear witness against it. An AssertionError says what does not hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from base64 import b64decode
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import zstandard
from blake3 import blake3
from safetensors import safe_open
from xxhash import xxh3_128_digest

WIDE = {2: "uint16 int16 bits16 float16 bfloat16", 4: "uint32 int32 float32 complex32", 8: "uint64 int64 float64 complex64"}
ITEMSIZES = {dtype: size for size, dtypes in {**WIDE, 16: "complex128"}.items() for dtype in dtypes.split()}  # others: 1 byte
HEADS = {"planes@1": (0, 0), "dense-ulp@1": (1, 0), "sparse-ulp@1": (3, 2)}  # numbers, and streams before the planes


def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse(data: bytes, kind: str, fields: str) -> Any:
    """A document. It equals its canonical form, so it has no key twice, no NaN and no lone surrogate."""
    document = json.loads(data)
    assert canonical({**document, "format": 1, "kind": kind}) == data, f"no canonical {kind} of format 1: {document}"
    assert document.keys() == {"format", "kind", *fields.split()}, f"a {kind} has other fields: {sorted(document)}"
    return document


def sha256(kind: str, document: Any, *rest: bytes) -> str:
    return hashlib.sha256(b"".join([f"deltastore {kind} 1\n".encode(), canonical(document), *rest])).hexdigest()


def tensors_by_name(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """Name and number of the stored tensor of each tensor in a node."""
    kind, content = next((each, node[each]) for each in "xvltdo" if each in node)
    if kind == "x":
        yield ".".join(path), content
    for key, child in () if kind in "xv" else enumerate(content) if kind in "lt" else content:
        tag, text = next(iter(key.items())) if isinstance(key, dict) else ("", str(key))
        text = str(np.frombuffer(bytes.fromhex(text), ">f8")[0]) if tag == "f" else b64decode(text).hex() if tag == "b" else text
        yield from tensors_by_name(child, (*path, text))


def read_streams(codec: str, payload: bytes, width: int, length: int) -> tuple[list[int], list[Any]]:
    """The numbers and the streams, uint8[n] each, of the payload of a chunk of `length` words."""
    (count, others), found, at = HEADS[codec], list[int](), 1
    while len(found) < count + others + width:
        start, at = at, next(end + 1 for end in range(at, at + 9) if payload[end] < 128)
        found.append(sum((byte & 127) << 7 * place for place, byte in enumerate(payload[start:at])))
    lengths, streams = [found[1], (found[0] + 3) // 4, *[found[2]] * width] if others else [length] * width, []
    for (stored, mode), expected in zip([divmod(head, 4) for head in found[count:]], lengths, strict=True):
        body, at = payload[at : at + stored], at + stored
        if mode == 2:
            assert (stored < expected, body[0]) == (True, 0), f"a frame of {stored} bytes for {expected}, descriptor {body[0]}"
            frame = zstandard.ZstdDecompressor(max_window_size=2 << 20)
            body = frame.decompress(b"\x28\xb5\x2f\xfd" + body, expected, allow_extra_data=False)
        streams.append(np.frombuffer(body if mode else body + bytes(expected), np.uint8))
        assert (mode < 3, len(streams[-1])) == (True, expected), f"mode {mode}, {len(streams[-1])} bytes, expected {expected}"
    assert at == len(payload), f"the streams end at byte {at} of {len(payload)}"
    return found[:count], streams


def decode(codec: str, payload: bytes, raw_length: int, base: bytes | None) -> bytes:
    """The chunk of a full entry (`base` is None) or of a delta on the chunk `base`."""
    assert (base is None) == (codec in ("raw@1", "planes@1")), f"{codec} stands in the wrong kind of entry"
    if codec == "raw@1":
        return payload
    assert payload[0] < 8, f"word code {payload[0]}"
    width, floating = 1 << payload[0] % 4, payload[0] >= 4
    length, bits, sign, word = raw_length // width, 8 * width, 1 << 8 * width - 1, f"<u{width}"
    numbers, streams = read_streams(codec, payload, width, length)
    planes = np.stack(streams[-width:], axis=1).reshape(-1).view(word)
    if base is None:
        low = max(0, bits - 9)  # in floats that many bits lie below the sign, which goes back to the top
        moved = (planes >> low + 1 << low) | ((planes >> low & 1) << bits - 1) | (planes & (1 << low) - 1)
        return bytes(moved if floating else planes)
    where, zigzag = np.arange(length), planes
    if codec == "sparse-ulp@1":
        (count, *_), (gaps, fours, *_) = numbers, streams
        where = np.cumsum(gaps, dtype=np.int64)[gaps < 255] + np.arange(count)
        assert not (gaps[-1:] == 255).any() | (where[-1:] >= length).any(), "the gaps end with 255 or lead behind the chunk"
        codes = (fours[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1)
        assert not codes[count:].any(), "unused bits of the codes are not 0"
        zigzag = codes[:count].astype(word) + 1
        zigzag[codes[:count] == 3] = planes + 1
    assert np.count_nonzero(zigzag) == numbers[0], "another number of words changes"
    words = np.frombuffer(base, word).copy()
    old, steps = words[where], zigzag >> 1 ^ -(zigzag & 1)
    ranks = steps + (np.where(old >= sign, ~old, old | sign) if floating else old)
    words[where] = np.where(ranks >= sign, ranks ^ sign, ~ranks) if floating else ranks
    return bytes(words)


class Store:
    """`refs`: name -> (kind, commit id); `history`: the same after each entry of the log; `commits`: by id, in log order."""

    def __init__(self, root: Path) -> None:
        self.root, self.chunk = root, lru_cache(128)(self.read_chunk)
        self.pack, self.manifest = lru_cache(128)(self.read_pack), lru_cache(128)(self.read_manifest)
        assert parse((root / "store.json").read_bytes(), "store", "uuid index features created_at")["features"] == []
        self.refs, self.commits, self.history = dict[str, tuple[str, str]](), dict[str, Commit](), list[Any]()
        log = {int(path.stem): path.read_bytes() for path in root.glob("refs/log/*/*/*.json")}
        while document := log.get(len(self.history) + 1):
            entry = json.loads(document)
            if entry["kind"] == "commit":
                commit, publish = Commit(self, document), entry["publish"]
                self.commits[commit.id] = commit
                self.move("branch", publish["ref"], publish["expected"], commit.id)
            elif entry["kind"] == "ref":
                parse(document, "ref", "optional action ref_kind name old new author time")
                self.move(entry["ref_kind"], entry["name"], entry["old"], entry["new"])
            else:
                assert entry["optional"], f"a log entry is of the unknown kind {entry['kind']}"
            self.history.append(dict(self.refs))

    def move(self, kind: str, name: str, old: str | None, new: str | None) -> None:
        assert self.refs.pop(name, None) == (old and (kind, old)), f"{kind} {name} is not at {old}"
        self.refs |= {name: (kind, self.commits[new].id)} if new else {}

    def columns(self, key: str, kind: str) -> dict[str, Any]:
        with safe_open(self.root / key, "numpy") as file:
            assert file.metadata()["format"] == f"deltastore {kind} 1", f"{key} is no {kind} of format 1"
            return {**file.metadata(), **{name: file.get_tensor(name) for name in file.offset_keys()}}

    def read_manifest(self, key: str) -> list[tuple[str, int, bytes]]:
        """Pack id, row in that pack and digest of each chunk."""
        found = self.columns(key, "manifest")
        packs = [str(UUID(bytes=bytes(found["pack_id"][at]))) for at in found["pack"]]
        return list(zip(packs, found["row"].tolist(), map(bytes, found["digest"]), strict=True))

    def read_pack(self, pack_id: str) -> dict[str, Any]:
        pack = self.columns(f"packs/{pack_id[-2:]}/{pack_id}", "pack")
        ends = np.cumsum(pack["stored_length"], dtype=np.int64)
        assert (pack["id"], len(pack["payload"])) == (pack_id, ends[-1]), f"pack {pack_id} has another id or length"
        return {**pack, "payload": np.split(pack["payload"], ends[:-1])}

    def read_chunk(self, pack_id: str, row: int) -> bytes:
        """The chunk of an entry, verified, as are those that it is based on."""
        pack = self.pack(pack_id)
        base_pack, base_row, raw_length = (int(pack[name][row]) for name in ("base_pack", "base_row", "raw_length"))
        base = self.chunk(str(UUID(bytes=bytes(pack["bases"][base_pack]))), base_row) if pack["span"][row] else None
        chunk = decode(pack["codecs"].split(" ")[pack["codec"][row]], bytes(pack["payload"][row]), raw_length, base)
        assert (xxh3_128_digest(chunk), len(chunk)) == (bytes(pack["fast_digest"][row]), raw_length), f"xxh3: {pack_id} {row}"
        assert blake3(chunk).digest() == bytes(pack["digest"][row]), f"BLAKE3: {pack_id} {row}"
        return chunk


class Commit:
    """A verified commit. `names`: name -> number of the stored tensor; `files`: name -> data, or such a number."""

    def __init__(self, store: Store, document: bytes) -> None:
        parts = parse(document, "commit", "optional identity placement publish")
        self.store, self.identity, self.placement = store, parts["identity"], parts["placement"]
        self.id, self.stored, self.files = sha256("commit", self.identity), list[Any](), dict[str, bytes | int]()
        assert document in [path.read_bytes() for path in store.root.glob(f"commits/{self.id[:2]}/{self.id}.*.json")], self.id
        self.structure = parse((store.root / self.placement["structure"]["key"]).read_bytes(), "structure", "tree tensors files")
        digests, file_digests, named = list[str](), [], list(tensors_by_name(self.structure["tree"]))
        self.names, self.own = dict(named), len({number for _, number in named})  # the own tensors are the first
        for dtype, shape, shard, position in self.structure["tensors"]:
            end = position - (-math.prod(shape) >> 20)
            rows = store.manifest(self.placement["manifests"][shard]["key"])[position:end] if end > position else []
            self.stored.append((dtype, tuple(shape), rows))
            digests.append(sha256("tensor", {"dtype": dtype, "shape": shape}, b"\n", *[digest for *_, digest in rows]))
        for file in self.structure["files"]:
            number, data = file["tensor"], b64decode(file["data"] or "")
            inline = sha256("tensor", {"dtype": "uint8", "shape": [len(data)]}, b"\n", blake3(data).digest() if data else b"")
            file_digests.append([file["name"], inline if number is None else digests[number]])
            self.files[file["name"]] = data if number is None else number
        values = self.placement["values"]
        self.values = values if isinstance(values, list) else json.loads(self.read(values["tensor"])[2])  # packed
        tree = {"files": file_digests, "state": self.structure["tree"], "tensors": digests[: self.own], "values": self.values}
        assert sha256("tree", tree) == self.identity["tree"], f"commit {self.id} has another tree"

    def read(self, number: int) -> tuple[str, tuple[int, ...], bytes]:
        """dtype, shape and bytes of a stored tensor, verified."""
        dtype, shape, rows = self.stored[number]
        chunks = [self.store.chunk(pack_id, row) for pack_id, row, _ in rows]
        assert [blake3(chunk).digest() for chunk in chunks] == [digest for *_, digest in rows], f"chunks of tensor {number}"
        step, size = ITEMSIZES.get(dtype, 1) << 20, ITEMSIZES.get(dtype, 1) * math.prod(shape)
        assert [*map(len, chunks)] == [min(step, size - at) for at in range(0, size, step)], f"lengths of tensor {number}"
        return dtype, shape, b"".join(chunks)


if __name__ == "__main__":
    for commit in Store(Path(sys.argv[1])).commits.values():
        sizes = [len(commit.read(number)[2]) for number in range(len(commit.stored))]  # of files and values, too
        print(commit.id[:12], commit.own, "tensors", sum(sizes[: commit.own]), "bytes")
