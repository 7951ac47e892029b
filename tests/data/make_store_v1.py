"""Makes `store-v1/`, a store of format 1 that every later version must read, and `store-v1.json`, what is in it.

    python tests/data/make_store_v1.py [FOLDER]

Tensors, values and files are the same each time; times, uuids and therefore commit ids are not. Refuses to overwrite: the
store of a released format stays as it is for ever. It holds all codecs, words of 1, 2, 4 and 8 bytes, integer and float,
deltas over 1, 8 and 64 versions, ties, plain values, files, branches and tags.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sqlite3
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltastore import DeltaStore

COMMITS = 66  # heights 0 to 65: the first deltas over 64 versions are at 64
LIMIT = 1_000_000  # bytes of the whole store
WORDS = {  # one tensor of each: by width and kind of word
    "float8_e4m3fn": np.uint8,
    "uint8": np.uint8,
    "bfloat16": np.uint16,
    "int16": np.uint16,
    "float32": np.uint32,
    "int32": np.uint32,
    "float64": np.uint64,
    "int64": np.uint64,
}


class Words:
    """The tensors and the words in their memory."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.tensors: dict[str, torch.Tensor] = {}
        self.words: dict[str, np.ndarray[Any, Any]] = {}
        weights = torch.from_numpy(rng.normal(0, 0.02, 384).astype(np.float32))
        for name, word in WORDS.items():
            dtype = getattr(torch, name)
            values = weights if dtype.is_floating_point else (weights * 1000).abs()
            self.words[name] = values.to(dtype).view(torch.uint8).numpy().view(word)
            self.tensors[name] = torch.from_numpy(self.words[name].view(np.uint8)).view(dtype).reshape(16, 24)

    def step(self, number: int) -> None:
        """Move a few words by a few steps, one by any; every eighth time all words of one tensor by one step."""
        for at, words in enumerate(self.words.values()):
            if number % 4 == at % 4:  # each tensor every fourth time
                where = self.rng.choice(len(words), 6, replace=False)
                words[where] += np.array([1, -1 % (1 << 8 * words.itemsize), 2, 1, 3, 200], words.dtype)
            if number % 8 == at:
                words ^= words.dtype.type(1)


def state(words: Words, number: int) -> dict[str, Any]:
    layers = OrderedDict(words.tensors)
    layers["tied"] = words.tensors["bfloat16"]
    vars(layers)["_metadata"] = OrderedDict([("", {"version": 1})])
    odd = {"empty": torch.empty(0, 3), "scalar": torch.tensor(number, dtype=torch.int32), "true": torch.tensor([True])}
    values = {"step": number, "lr": 1e-3 / (number + 1), "betas": (0.9, 0.999), "name": "naïve", "none": None, "raw": b"\0\xff"}
    return {"layers": layers, "odd": odd, "optimizer": {0: {"nan": float("nan"), "zero": -0.0}, "groups": [values]}}


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Name and content of every leaf."""
    if isinstance(node, (dict, list, tuple)):
        for key, each in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(each, (*path, str(key)))
    else:
        yield ".".join(path), node


def described(tensor: torch.Tensor) -> list[Any]:
    """dtype, shape and SHA-256 of the bytes, by torch alone."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(data).hexdigest()]


class Recorder:
    """Commits, and notes what every commit must give; tensors as positions in `contents`."""

    def __init__(self, store: DeltaStore) -> None:
        self.store = store
        self.commits: dict[str, Any] = {}
        self.contents: list[list[Any]] = []

    def content(self, tensor: torch.Tensor) -> int:
        content = described(tensor)
        if content not in self.contents:
            self.contents.append(content)
        return self.contents.index(content)

    def commit(self, state: Any, message: str, files: dict[str, bytes], branch: str) -> None:
        commit = self.store.commit(state, message, branch=branch, files=files, metadata={"message": message}, author="Ada")
        self.commits[commit.id] = {
            "message": message,
            "parents": list(commit.parents),
            "tensors": {name: self.content(leaf) for name, leaf in leaves(state) if isinstance(leaf, torch.Tensor)},
            "values": {name: repr(leaf)[:80] for name, leaf in leaves(state) if not isinstance(leaf, torch.Tensor)},
        }


def make(folder: Path) -> dict[str, Any]:
    """The store, and what is in it."""
    rng = np.random.default_rng(1)
    words = Words(rng)
    files = {"config.json": b'{"layers":8}', "empty.txt": b"", "vocabulary.bin": rng.bytes(6000)}
    with DeltaStore.create(folder) as store:
        recorder = Recorder(store)
        for number in range(COMMITS):
            recorder.commit(state(words, number), f"step {number}", files, "main")
            words.step(number)
        store.create_tag("best", revision="main~5")
        store.create_branch("exp/short", revision="main~60")
        for number in (0, 3):
            words.step(number)
            history = "".join(f"line {line} of a long text\n" for line in range(3000))
            recorder.commit({**state(words, number), "history": history}, f"short {number}", files, "exp/short")
        store.create_branch("gone", revision="best")
        store.delete_branch("gone")
        store.reset_branch("exp/short", revision="exp/short~1")
        refs = {ref.name: [ref.kind, ref.commit_id] for ref in store.list_refs()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return {"refs": refs, "files": digests, "contents": recorder.contents, "commits": recorder.commits}


def main() -> None:
    parent = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder, expected = parent / "store-v1", parent / "store-v1.json"
    if folder.exists() or expected.exists():
        sys.exit(f"{folder} or {expected.name} beside it exists; a frozen store is never made anew")
    os.environ["LOGNAME"] = "ada"  # no name of this machine or its user goes into the store
    socket.gethostname = lambda: "example.org"
    description = make(folder)
    (folder / ".staging").rmdir()
    with closing(sqlite3.connect(folder / "index.sqlite")) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    expected.write_text(json.dumps(description, separators=(",", ":")).replace("]],", "]],\n").replace("}},", "}},\n") + "\n")
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in [*files, expected])
    print(f"{folder}: {len(files)} files; {size} bytes with {expected.name}")
    if size > LIMIT:
        sys.exit(f"more than {LIMIT} bytes")


if __name__ == "__main__":
    main()
