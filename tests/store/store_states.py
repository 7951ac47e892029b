"""States with every bit pattern and layout, and oracles that read torch memory without deltastore."""

from __future__ import annotations

import sqlite3
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from deltastore import DeltaStore
from deltastore.codecs import kernel, numpy_kernel
from deltastore.dtypes import DTYPES

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
STORABLE = [dtype for dtype in DTYPES if hasattr(torch, dtype.name)]


# -- bits -------------------------------------------------------------------------------------------------------------


def raw(tensor: torch.Tensor) -> bytes:
    """The logical row-major bytes of a tensor, taken by torch alone."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    integers = tensor.view(INTEGERS[tensor.element_size()])
    return integers.contiguous().reshape(-1).numpy().tobytes()


def special_patterns(itemsize: int) -> np.ndarray:
    """uint8[n, itemsize]: zeros of both signs, NaNs with payloads, infinities, denormals, extremes of usual float formats."""
    width = min(itemsize, 8)
    bits = 8 * width
    sign, full = 1 << (bits - 1), (1 << bits) - 1
    values = {0, 1, 2, sign, sign | 1, sign - 1, full, full - 1}
    for mantissa in {1: (2, 3), 2: (7, 10), 4: (23,), 8: (52, 23 + 32)}[width]:
        infinity = (sign - 1) >> mantissa << mantissa
        for magnitude in (
            infinity,
            infinity + 1,
            infinity | 1 << (mantissa - 1),
            infinity - 1,
            1 << mantissa,
            (1 << mantissa) - 1,
        ):
            values |= {magnitude, magnitude | sign}
    words = np.array(sorted(values), f"<u{width}").view(np.uint8).reshape(-1, width)
    return np.tile(words, itemsize // width)


def random_patterns(rng: np.random.Generator, count: int, itemsize: int) -> np.ndarray:
    """uint8[count, itemsize]: a third special patterns, the rest random."""
    out = rng.integers(0, 256, (count, itemsize), np.uint8)
    specials = special_patterns(itemsize)
    chosen = rng.random(count) < 1 / 3
    out[chosen] = specials[rng.integers(0, len(specials), int(chosen.sum()))]
    return out


class Memory:
    """Memory of a tensor that is changed element by element, as patterns of bits."""

    def __init__(self, rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> None:
        self._rng = rng
        self._itemsize = dtype.itemsize
        count = int(np.prod(shape))
        self.bytes = random_patterns(rng, count, dtype.itemsize)
        integers = torch.from_numpy(self.bytes.reshape(-1)).view(INTEGERS[dtype.itemsize])
        if dtype.itemsize == 16:
            self.tensor = torch.view_as_complex(integers.view(torch.float64).reshape((*shape, 2)))
        else:
            self.tensor = integers.reshape(tuple(shape)).view(getattr(torch, dtype.name))

    def change(self, density: float) -> None:
        """Give about this share of the elements new patterns, half of them a near one (a flipped low bit)."""
        chosen = np.flatnonzero(self._rng.random(len(self.bytes)) < density)
        new = random_patterns(self._rng, len(chosen), self._itemsize)
        near = self._rng.random(len(chosen)) < 0.5
        new[near] = self.bytes[chosen[near]]
        new[near, 0] ^= 1
        self.bytes[chosen] = new


def same(found: Any, expected: Any) -> bool:
    """Deep equality: exact types, order, float bits, tensor dtype, shape and bits."""
    if isinstance(expected, torch.Tensor):
        alike = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and found.shape == expected.shape
        return alike and raw(found) == raw(expected)
    if type(found) is not type(expected):
        return False
    if isinstance(expected, float):
        return struct.pack(">d", found) == struct.pack(">d", expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        if isinstance(expected, OrderedDict) and not same(
            getattr(found, "_metadata", None), getattr(expected, "_metadata", None)
        ):
            return False
        return same(list(found.keys()), list(expected.keys())) and same(list(found.values()), list(expected.values()))
    return bool(found == expected)


# -- kernels ----------------------------------------------------------------------------------------------------------


@contextmanager
def numpy_codecs() -> Iterator[None]:
    """The NumPy kernel instead of the one in use."""
    before = kernel._backend
    kernel._backend = numpy_kernel
    try:
        yield
    finally:
        kernel._backend = before


# -- what lies in a store ---------------------------------------------------------------------------------------------


def objects(folder: Path, kind: str = "") -> dict[str, int]:
    """Sizes of all files below a store's folder, by key; those of one kind ("packs", "manifests" …) when it is given."""
    start = folder / kind if kind else folder
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(start.rglob("*")) if path.is_file()}


def bucket_objects(folder: Path) -> dict[str, int]:
    """Sizes of all objects, without the index and its side files."""
    return {key: size for key, size in objects(folder).items() if not key.startswith(("index.sqlite", ".staging"))}


def sql(folder: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Ask, or change, the index of a store by hand."""
    with closing(sqlite3.connect(folder / "index.sqlite", timeout=60)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        found = connection.execute(query, values).fetchall()
        connection.commit()
    return found


def columns(folder: Path, pack_id: str) -> dict[str, np.ndarray]:
    """The columns of a pack, as the safetensors library sees them."""
    with safetensors.safe_open(folder / "packs" / pack_id[-2:] / pack_id, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def pack_contents(folder: Path) -> list[dict[str, bytes]]:
    """Payload and columns of each pack, oldest pack first, without the ids of packs."""
    found = []
    for pack_id in sorted(key.rsplit("/", 1)[1] for key in objects(folder, "packs")):
        found.append({name: values.tobytes() for name, values in columns(folder, pack_id).items() if name != "bases"})
    return found


def text_of_uuid(data: np.ndarray) -> str:
    """16 bytes as the text of a uuid."""
    digits = data.tobytes().hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def chain(folder: Path, pack_id: str, row: int, cache: dict[str, dict[str, np.ndarray]]) -> list[tuple[str, int, int]]:
    """(pack id, row, span) from an entry down to a full one, resolved from pack columns by hand."""
    found = []
    while True:
        if pack_id not in cache:
            cache[pack_id] = columns(folder, pack_id)
        table = cache[pack_id]
        found.append((pack_id, row, int(table["span"][row])))
        if table["base_pack"][row] == 0xFFFFFFFF:
            return found
        pack_id, row = text_of_uuid(table["bases"][table["base_pack"][row]]), int(table["base_row"][row])


def manifest_rows(folder: Path, store: DeltaStore, revision: str) -> Iterator[tuple[set[str], list[tuple[str, int]]]]:
    """(pack table, rows as pack id and row) of every manifest of a version, read by the safetensors library."""
    version = store._versions.get(store.get_commit(revision).id)
    for place in version.document.placement.manifests:
        with safetensors.safe_open(folder / place.key, "numpy") as file:
            ids = [text_of_uuid(each) for each in file.get_tensor("pack_id")]
            packs, rows = file.get_tensor("pack"), file.get_tensor("row")
        yield set(ids), [(ids[pack], int(row)) for pack, row in zip(packs, rows, strict=True)]
