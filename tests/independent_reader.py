"""Reads a store from the objects in its folder alone, as docs/FORMAT.md describes them, and verifies every digest on the way.

Shares no code with the library, so that it can bear witness against it. An AssertionError says what does not hold.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from blake3 import blake3
from independent_packs import Packs

Content = tuple[str, tuple[int, ...], bytes]  # dtype, shape and bytes of a tensor


# -- documents (sections 2, 5 and 9) ----------------------------------------------------------------------------------
def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse(data: bytes, kind: str, fields: str) -> Any:
    """A document. It equals its canonical form, so it has no key twice, no fraction, no NaN and no lone surrogate."""
    document = json.loads(data)
    assert canonical(document) == data, f"a {kind} is not canonical"
    assert (document["format"], document["kind"]) == (1, kind), f"no {kind} of format 1: {document}"
    assert document.keys() == {"format", "kind", *fields.split()}, f"a {kind} has other fields: {sorted(document)}"
    return document


def sha256(kind: str, *parts: bytes) -> str:
    return hashlib.sha256(b"".join([f"deltastore {kind} 1\n".encode(), *parts])).hexdigest()


def tensor_digest(dtype: str, shape: list[int], digests: bytes) -> str:
    return sha256("tensor", canonical({"dtype": dtype, "shape": shape}), b"\n", digests)


def unpack(value: Any) -> Any:
    """A plain value from its packed form."""
    if not isinstance(value, (list, dict)):
        return value
    tag, content = next(iter(value.items())) if isinstance(value, dict) else ("l", cast("Any", value))
    if tag in "do":
        return (dict if tag == "d" else OrderedDict)([(unpack(key), unpack(each)) for key, each in content])
    if tag in "lt":
        return (list if tag == "l" else tuple)([unpack(each) for each in content])
    if tag == "f":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    return int(content) if tag == "i" else b64decode(content)


def build(node: Any, leaf: Callable[[str, str, int], Any], path: tuple[str, ...] = ()) -> Any:
    """The nested state of a node; `leaf` makes what stands in it from name, kind ("x" tensor, "v" value) and number."""
    kind = next(each for each in "xvltdo" if each in node)
    if kind in "xv":
        return leaf(".".join(path), kind, node[kind])
    if kind in "lt":
        items = [build(each, leaf, (*path, str(at))) for at, each in enumerate(node[kind])]
        return items if kind == "l" else tuple(items)
    state: dict[Any, Any] = {} if kind == "d" else OrderedDict()
    for key, each in [(unpack(packed), each) for packed, each in node[kind]]:
        state[key] = build(each, leaf, (*path, key.hex() if isinstance(key, bytes) else str(key)))
    if "m" in node:
        vars(state)["_metadata"] = unpack(node["m"])
    return state


# -- commits (sections 4, 5, 9 and 10) --------------------------------------------------------------------------------
@dataclass
class Version:
    """A commit. `read` gives a stored tensor; whatever uses it reads anew each time."""

    id: str
    identity: dict[str, Any]
    placement: dict[str, Any]
    structure: dict[str, Any]
    plain: list[Any]
    read: Callable[[int], Content]

    def state(self) -> Any:
        return build(self.structure["tree"], lambda _, kind, at: self.read(at) if kind == "x" else self.plain[at])

    def numbers(self, kind: str) -> dict[str, int]:
        """Name -> number of the stored tensor ("x") or plain value ("v"). Tied names have the same number."""
        found: dict[str, int] = {}
        build(self.structure["tree"], lambda name, each, at: found.update({name: at} if each == kind else {}))
        return found

    @property
    def tensors(self) -> dict[str, Content]:
        return {name: self.read(at) for name, at in self.numbers("x").items()}

    @property
    def values(self) -> dict[str, Any]:
        return {name: self.plain[at] for name, at in self.numbers("v").items()}

    @property
    def files(self) -> dict[str, bytes]:
        files = [(file["name"], file["data"], file["tensor"]) for file in self.structure["files"]]
        return {name: b64decode(data) if at is None else self.read(at)[2] for name, data, at in files}


class Store:
    """`refs`: name -> (kind, commit id); `commits`: id -> Version, in the order of the log."""

    def __init__(self, root: Path) -> None:
        self.root, self.packs = root, Packs(root)
        self.refs, self.commits = dict[str, tuple[str, str]](), dict[str, Version]()
        store = parse((root / "store.json").read_bytes(), "store", "uuid index features created_at")
        assert store["features"] == [], f"unknown features {store['features']}"
        log = {int(path.stem): path.read_bytes() for path in root.glob("refs/log/*/*/*.json")}
        for seq in itertools.takewhile(log.__contains__, itertools.count(1)):
            entry = json.loads(log[seq])
            if entry["kind"] == "commit":
                version = self.read_commit(log[seq])
                self.commits[version.id] = version
                self.move(entry["publish"]["ref"], "branch", entry["publish"]["expected"], version.id)
            elif entry["kind"] == "ref":
                parse(log[seq], "ref", "optional action ref_kind name old new author time")
                self.move(entry["name"], entry["ref_kind"], entry["old"], entry["new"])
            else:
                assert entry["optional"], f"log entry {seq} is of the unknown kind {entry['kind']}"
            for path in root.glob(f"refs/snapshot/*/{seq:012}.json"):
                snapshot = parse(path.read_bytes(), "snapshot", "epoch seq previous refs commits")
                refs = {ref["name"]: (ref["kind"], ref["commit"]) for ref in snapshot["refs"]}
                assert refs == self.refs, f"{path} has other refs than the log before it"

    def move(self, name: str, kind: str, old: str | None, new: str | None) -> None:
        assert self.refs.pop(name, None) == (old and (kind, old)), f"{kind} {name} is not at {old}"
        if new:
            self.refs[name] = kind, self.commits[new].id

    def read_commit(self, document: bytes) -> Version:
        parts = parse(document, "commit", "optional identity placement publish")
        identity, placement = parts["identity"], parts["placement"]
        structure = parse((self.root / placement["structure"]["key"]).read_bytes(), "structure", "tree tensors files")

        def rows(number: int) -> list[Any]:
            _, shape, shard, position = structure["tensors"][number]
            end = position - (-math.prod(shape) >> 20)
            return self.packs.manifest(placement["manifests"][shard]["key"])[position:end] if end > position else []

        def read(number: int) -> Content:
            dtype, shape, *_ = structure["tensors"][number]
            itemsize = max(1, int((re.findall(r"\d+", dtype) or [8])[0]) // 8)
            chunks = [self.packs.chunk(pack_id, row, digest) for pack_id, row, digest in rows(number)]
            assert sum(map(len, chunks)) == math.prod(shape) * itemsize, f"stored tensor {number} has another length"
            assert all(len(chunk) == itemsize << 20 for chunk in chunks[:-1]), f"the grid of tensor {number} is another"
            return dtype, tuple(shape), b"".join(map(bytes, chunks))

        def stored_digest(number: int) -> str:
            dtype, shape, *_ = structure["tensors"][number]
            return tensor_digest(dtype, shape, b"".join(digest for _, _, digest in rows(number)))

        files = []
        for file in structure["files"]:
            data = b64decode(file["data"] or "")
            inline = tensor_digest("uint8", [len(data)], blake3(data).digest() if data else b"")
            files.append([file["name"], inline if file["tensor"] is None else stored_digest(file["tensor"])])
        packed = placement["values"]
        packed = packed if isinstance(packed, list) else json.loads(read(packed["tensor"])[2])
        commit_id, plain = sha256("commit", canonical(identity)), [unpack(value) for value in packed]
        version = Version(commit_id, identity, placement, structure, plain, read)
        own = [stored_digest(number) for number in range(1 + max(version.numbers("x").values(), default=-1))]
        tree = canonical({"files": files, "state": structure["tree"], "tensors": own, "values": packed})
        assert sha256("tree", tree) == identity["tree"], f"commit {commit_id} has another tree"
        copies = self.root.glob(f"commits/{commit_id[:2]}/{commit_id}.*.json")
        assert document in [path.read_bytes() for path in copies], f"commit {commit_id} of the log is not there"
        return version


def read_store(path: Path | str) -> Store:
    return Store(Path(path))
