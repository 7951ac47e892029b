"""Reads every tensor of a store from its folder, as docs/FORMAT.md describes it, and verifies every digest on the way.

    python tests/independent_reader.py STORE

Shares no code with the library, so that it can bear witness against it. A Mismatch says what does not hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count, takewhile
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import zstandard
from blake3 import blake3
from safetensors import safe_open
from xxhash import xxh3_128_digest

PLACES = ["pack_size", "pack_head", "pack", "row", "digest", "pack_id"]
ENTRIES = ["raw_length", "stored_length", "span", "base_pack", "base_row", "digest", "fast_digest", "codec", "bases", "payload"]
WIDE = {2: "uint16 int16 bits16 float16 bfloat16", 4: "uint32 int32 float32 complex32", 8: "uint64 int64 float64 complex64"}
ITEMSIZES = {dtype: size for size, dtypes in {**WIDE, 16: "complex128"}.items() for dtype in dtypes.split()}  # others: 1 byte
Words = np.ndarray[Any, Any]  # unsigned integers of 1, 2, 4 or 8 bytes


class Mismatch(ValueError):  # noqa: N818
    """The store is not what the format says."""


def check(holds: Any, message: str) -> None:
    if not holds:
        raise Mismatch(message)


# -- documents and digests (sections 2, 5 and 9) -----------------------------------------------------------------------
def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse(data: bytes, kind: str, fields: str) -> Any:
    """A document. It equals its canonical form, so it has no key twice, no NaN and no lone surrogate."""
    document = json.loads(data)
    check(canonical(document) == data, f"a {kind} is not canonical")
    check((document["format"], document["kind"]) == (1, kind), f"no {kind} of format 1: {document}")
    check(document.keys() == {"format", "kind", *fields.split()}, f"a {kind} has other fields: {sorted(document)}")
    return document


def sha256(kind: str, *parts: bytes) -> str:
    return hashlib.sha256(b"".join([f"deltastore {kind} 1\n".encode(), *parts])).hexdigest()


def tensor_digest(dtype: str, shape: list[int], chunk_digests: bytes) -> str:
    return sha256("tensor", canonical({"dtype": dtype, "shape": shape}), b"\n", chunk_digests)


def key_text(key: Any) -> str:
    """What a packed key adds to the name of a leaf."""
    tag, content = next(iter(key.items())) if isinstance(key, dict) else ("", str(key))
    if tag == "f":
        return str(float(np.frombuffer(bytes.fromhex(content), ">f8")[0]))
    return b64decode(content).hex() if tag == "b" else str(content)


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, int]]:
    """Name, kind ("x" stored tensor, "v" plain value) and number of each leaf."""
    kind = next(each for each in "xvltdo" if each in node)
    if kind in "xv":
        yield ".".join(path), kind, node[kind]
        return
    for key, child in enumerate(node[kind]) if kind in "lt" else node[kind]:
        yield from leaves(child, (*path, key_text(key)))


# -- codecs (section 8) ------------------------------------------------------------------------------------------------
def read_streams(payload: bytes, numbers: int, lengths: Callable[..., list[int]]) -> tuple[list[int], list[Words]]:
    """The numbers of a payload and its streams, uint8[n] each, whose raw lengths `lengths` tells from the numbers."""
    at = 1

    def number() -> int:
        nonlocal at
        start, at = at, next(end + 1 for end in range(at, at + 9) if payload[end] < 128)
        return sum((byte & 127) << 7 * place for place, byte in enumerate(payload[start:at]))

    found, streams = [number() for _ in range(numbers)], []
    for (stored, mode), length in [(divmod(number(), 4), length) for length in lengths(*found)]:
        body, at = payload[at : at + stored], at + stored
        check(mode in (1, 2) or (mode, stored) == (0, 0), f"a stream has mode {mode} and {stored} bytes")
        if mode == 2:
            check(stored < length and body[0] == 0, f"{stored} bytes of zstd for {length}, descriptor {body[:1].hex()}")
            frame = zstandard.ZstdDecompressor(max_window_size=2 << 20)
            body = frame.decompress(b"\x28\xb5\x2f\xfd" + body, length, allow_extra_data=False)
        streams.append(np.frombuffer(body if mode else bytes(length), np.uint8))
        check(len(streams[-1]) == length, f"a stream has {len(streams[-1])} bytes, expected {length}")
    check(at == len(payload), f"the streams end at byte {at} of {len(payload)}")
    return found, streams


def decode(codec: str, payload: bytes, raw_length: int, base: bytes | None) -> bytes:
    """The chunk of a full entry (`base` is None) or of a delta on the chunk `base`."""
    check((base is None) == (codec in ("raw@1", "planes@1")), f"{codec} stands in the wrong kind of entry")
    if codec == "raw@1":
        return payload
    check(payload[0] < 8, f"word code {payload[0]}")
    width, floating = 1 << payload[0] % 4, payload[0] >= 4
    (length, rest), bits, sign = divmod(raw_length, width), 8 * width, 1 << 8 * width - 1
    check(rest == 0, f"{raw_length} bytes are no words of {width}")

    def merge(planes: list[Words]) -> Words:
        return np.stack(planes, axis=1).reshape(-1).view(f"<u{width}")

    if base is None:
        words = merge(read_streams(payload, 0, lambda: [length] * width)[1])
        if floating:  # the sign goes back from below the eight bits of the exponent to the top
            low = max(0, bits - 9)  # that many bits lie below the sign
            words = (words >> low + 1 << low) | ((words >> low & 1) << bits - 1) | (words & (1 << low) - 1)
        return words.tobytes()
    if codec == "dense-ulp@1":
        (changes,), planes = read_streams(payload, 1, lambda changes: [length] * width)
        where, zigzag = np.arange(length), merge(planes)
        check(np.count_nonzero(zigzag) == changes, "another number of words changes")
    else:
        check(codec == "sparse-ulp@1", f"unknown codec {codec}")
        layout = lambda changes, gap_bytes, long: [gap_bytes, (changes + 3) // 4, *[long] * width]  # noqa: E731
        (changes, _, _), (gaps, fours, *planes) = read_streams(payload, 3, layout)
        where = np.cumsum(gaps, dtype=np.int64)[gaps < 255] + np.arange(changes)
        check((gaps[-1:] < 255).all() and (where[-1:] < length).all(), "the gaps end with 255 or lead behind the chunk")
        codes = (fours[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1)
        check(not codes[changes:].any(), "unused bits of the codes are not 0")
        zigzag = codes[:changes].astype(f"<u{width}") + 1
        zigzag[codes[:changes] == 3] = merge(planes) + 1
    words = np.frombuffer(base, f"<u{width}").copy()
    old, steps = words[where], zigzag >> 1 ^ -(zigzag & 1)
    ranks = steps + (np.where(old >= sign, ~old, old | sign) if floating else old)
    words[where] = np.where(ranks >= sign, ranks ^ sign, ~ranks) if floating else ranks
    return words.tobytes()


# -- manifests, packs, commits and the log (sections 3 to 7 and 10) ----------------------------------------------------
class Commit:
    """A commit whose id and tree are verified. `names`: name -> number of the stored tensor; ties have the same number."""

    def __init__(self, store: Store, document: bytes) -> None:
        parts = parse(document, "commit", "optional identity placement publish")
        self.store, self.identity, self.placement = store, parts["identity"], parts["placement"]
        self.id = sha256("commit", canonical(self.identity))
        copies = [path.read_bytes() for path in store.root.glob(f"commits/{self.id[:2]}/{self.id}.*.json")]
        check(document in copies, f"commit {self.id} of the log is not there")
        structure = (store.root / self.placement["structure"]["key"]).read_bytes()
        self.structure = parse(structure, "structure", "tree tensors files")
        tensors = [(name, number) for name, kind, number in leaves(self.structure["tree"]) if kind == "x"]
        self.names, self.own = dict(tensors), len({number for _, number in tensors})  # the own tensors come first
        values = self.placement["values"]
        self.packed_values = values if isinstance(values, list) else json.loads(self.read(values["tensor"])[2])
        files = [[file["name"], self.digest(file["tensor"], file["data"])] for file in self.structure["files"]]
        digests = [self.digest(number) for number in range(self.own)]
        tree = {"files": files, "state": self.structure["tree"], "tensors": digests, "values": self.packed_values}
        check(sha256("tree", canonical(tree)) == self.identity["tree"], f"commit {self.id} has another tree")

    def rows(self, number: int) -> list[tuple[str, int, bytes]]:
        _, shape, shard, position = self.structure["tensors"][number]
        end = position - (-math.prod(shape) >> 20)
        return self.store.manifest(self.placement["manifests"][shard]["key"])[position:end] if end > position else []

    def digest(self, number: int | None, inline: str | None = None) -> str:
        """The digest of a stored tensor or, without a number, of the data of an inline file."""
        if number is None:
            data = b64decode(inline or "")
            return tensor_digest("uint8", [len(data)], blake3(data).digest() if data else b"")
        dtype, shape, *_ = self.structure["tensors"][number]
        return tensor_digest(dtype, shape, b"".join(digest for _, _, digest in self.rows(number)))

    def read(self, number: int) -> tuple[str, tuple[int, ...], bytes]:
        """dtype, shape and bytes of a stored tensor, read anew each time."""
        dtype, shape, *_ = self.structure["tensors"][number]
        elements, itemsize = math.prod(shape), ITEMSIZES.get(dtype, 1)
        chunks = [self.store.chunk(*row) for row in self.rows(number)]
        lengths = [itemsize * min(1 << 20, elements - start) for start in range(0, elements, 1 << 20)]
        check([len(chunk) for chunk in chunks] == lengths, f"stored tensor {number} of {self.id} has other lengths")
        return dtype, tuple(shape), b"".join(chunks)

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        return {name: self.read(number) for name, number in self.names.items()}

    @property
    def files(self) -> dict[str, bytes]:
        files = [(file["name"], file["data"], file["tensor"]) for file in self.structure["files"]]
        return {name: b64decode(data) if number is None else self.read(number)[2] for name, data, number in files}


class Store:
    """`refs`: name -> (kind, commit id); `history`: the same after each entry of the log; `commits` by id, in log order."""

    def __init__(self, root: Path) -> None:
        self.root, self.chunk = root, lru_cache(128)(self.read_chunk)
        self.pack, self.manifest = lru_cache(128)(self.read_pack), lru_cache(128)(self.read_manifest)
        self.refs, self.history = dict[str, tuple[str, str]](), list[dict[str, tuple[str, str]]]()
        self.commits = dict[str, Commit]()
        features = parse((root / "store.json").read_bytes(), "store", "uuid index features created_at")["features"]
        check(features == [], f"unknown features {features}")
        log = {int(path.stem): path.read_bytes() for path in root.glob("refs/log/*/*/*.json")}
        for seq in takewhile(log.__contains__, count(1)):
            entry = json.loads(log[seq])
            if entry["kind"] == "commit":
                commit = Commit(self, log[seq])
                self.commits[commit.id] = commit
                self.move(entry["publish"]["ref"], "branch", entry["publish"]["expected"], commit.id)
            elif entry["kind"] == "ref":
                parse(log[seq], "ref", "optional action ref_kind name old new author time")
                self.move(entry["name"], entry["ref_kind"], entry["old"], entry["new"])
            else:
                check(entry["optional"], f"log entry {seq} is of the unknown kind {entry['kind']}")
            self.history.append(dict(self.refs))

    def move(self, name: str, kind: str, old: str | None, new: str | None) -> None:
        check(self.refs.pop(name, None) == (old and (kind, old)), f"{kind} {name} is not at {old}")
        if new:
            self.refs[name] = kind, self.commits[new].id

    def columns(self, key: str, names: list[str], kind: str) -> dict[str, Any]:
        """The metadata and the tensors of a safetensors file, ids of packs as text."""
        with safe_open(self.root / key, "numpy") as file:
            check(file.offset_keys() == names, f"{key} holds other tensors: {file.offset_keys()}")
            found = {**file.metadata(), **{name: file.get_tensor(name) for name in names}}
        check(found["format"] == f"deltastore {kind} 1", f"{key} is no {kind} of format 1")
        return {**found, names[-1]: found[names[-1]]}
