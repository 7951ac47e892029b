"""Sizes and chain lengths of a store, read from its files with the safetensors package alone (docs/FORMAT.md)."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

FULL = 0xFFFFFFFF  # base of an entry that stands alone
CHAIN_LIMIT = 10_000


def object_bytes(folder: Path) -> int:
    """Bytes of every object of the store: packs, manifests, structures, commits and log; not the SQL index."""
    return sum(
        Path(place, name).stat().st_size
        for place, _, names in os.walk(folder)
        for name in names
        if not name.startswith("index.sqlite")
    )


def index_bytes(folder: Path) -> int:
    """Bytes of the SQL index; call it when the store is closed."""
    return sum(path.stat().st_size for path in folder.glob("index.sqlite*"))


class Packs:
    """The columns of all packs of a store."""

    def __init__(self, folder: Path) -> None:
        self._columns = {path.name: load_file(path) for path in (folder / "packs").glob("*/*")}

    def names(self) -> set[str]:
        """Ids of all packs."""
        return set(self._columns)

    def payload_bytes(self, names: set[str], span: int) -> int:
        """Stored payload bytes of the entries of one span in some packs."""
        return sum(int(c["stored_length"][c["span"] == span].sum()) for c in (self._columns[name] for name in names))

    def deltas(self, pack: str, row: int) -> int:
        """How many deltas are applied to read an entry."""
        count = 0
        while True:
            columns = self._columns[pack]
            base = int(columns["base_pack"][row])
            if base == FULL:
                return count
            pack, row = _pack_name(columns["bases"][base]), int(columns["base_row"][row])
            count += 1
            if count > CHAIN_LIMIT:
                raise ValueError("a chain without an end")


def deepest(folder: Path) -> int:
    """The most deltas on the cold path of any chunk of any commit."""
    packs = Packs(folder)
    known: dict[tuple[str, int], int] = {}
    most = 0
    for path in (folder / "commits").glob("*/*.json"):
        for place in json.loads(path.read_bytes())["placement"]["manifests"]:
            manifest = load_file(folder / place["key"])
            names = [_pack_name(row) for row in manifest["pack_id"]]
            for pack, row in zip(manifest["pack"], manifest["row"], strict=True):
                entry = (names[int(pack)], int(row))
                if entry not in known:
                    known[entry] = packs.deltas(*entry)
                most = max(most, known[entry])
    return most


def _pack_name(raw: np.ndarray) -> str:
    return str(uuid.UUID(bytes=raw.tobytes()))
