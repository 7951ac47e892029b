from __future__ import annotations

import json
import random

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.errors import FormatError, InvalidInputError, UnsupportedFormatError
from deltastore.layout import new_id
from deltastore.manifests import CUT_FROM_ROWS, ChunkRow, Manifest, PackRef, cut_manifests
from deltastore.options import MANIFEST_ROWS

IDS = [new_id() for _ in range(5)]
KEY = f"manifests/{IDS[0][-2:]}/{IDS[0]}"


def manifest(rows: int = 3, packs: int = 2) -> Manifest:
    refs = tuple(PackRef(IDS[number], 100 + number, 10**10 + number) for number in range(packs))
    index = np.arange(rows, dtype=np.uint32)
    return Manifest(refs, index % max(packs, 1), index * 7, np.repeat(index.astype(np.uint8), 32).reshape(rows, 32))


@given(
    rows=st.lists(st.tuples(st.sampled_from(IDS), st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32))),
    sizes=st.lists(st.tuples(st.integers(8, 2**32 - 1), st.integers(0, 2**60)), min_size=5, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_what_was_built_is_read_back(rows: list[tuple[str, int, bytes]], sizes: list[tuple[int, int]]) -> None:
    packs = [PackRef(pack_id, head, head + rest) for pack_id, (head, rest) in zip(IDS, sizes, strict=True)]
    chunks = [ChunkRow(*row) for row in rows]
    built = Manifest.from_rows(packs, chunks)
    parsed = Manifest.parse(built.build(), KEY)
    assert parsed.packs == tuple(packs)
    assert parsed.rows(0, len(parsed)) == chunks
    assert parsed.rows(1, 3) == chunks[1:3]
    assert parsed.build() == built.build()


@pytest.mark.parametrize(("rows", "packs"), [(0, 0), (0, 1), (1, 1), (5000, 5)])
def test_manifests_are_safetensors(rows: int, packs: int) -> None:
    built = manifest(rows, packs)
    tensors = safetensors.numpy.load(built.build())
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == {
        "pack_size": ("uint64", (packs,)),
        "pack_head": ("uint32", (packs,)),
        "pack": ("uint32", (rows,)),
        "row": ("uint32", (rows,)),
        "digest": ("uint8", (rows, 32)),
        "pack_id": ("uint8", (packs, 16)),
    }
    assert np.array_equal(tensors["row"], built.row)


def test_a_manifest_costs_40_bytes_a_row() -> None:
    assert len(manifest(1000).build()) - len(manifest(0).build()) <= 40 * 1000 + 64
    assert len(manifest(0, 0).build()) <= 512


@pytest.mark.parametrize(
    "wrong",
    [
        Manifest((), np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros((1, 32), np.uint8)),
        Manifest((PackRef(IDS[0], 9, 9),), np.zeros(1, np.uint32), np.zeros(2, np.uint32), np.zeros((1, 32), np.uint8)),
        Manifest((PackRef(IDS[0], 9, 9),), np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros((1, 31), np.uint8)),
        Manifest((PackRef(IDS[0], 9, 9),) * 2, *(np.zeros(0, np.uint32),) * 2, np.zeros((0, 32), np.uint8)),
        Manifest((PackRef("x", 9, 9),), *(np.zeros(0, np.uint32),) * 2, np.zeros((0, 32), np.uint8)),
        Manifest((PackRef(IDS[0], 10, 9),), *(np.zeros(0, np.uint32),) * 2, np.zeros((0, 32), np.uint8)),
        Manifest((PackRef(IDS[0], 7, 9),), *(np.zeros(0, np.uint32),) * 2, np.zeros((0, 32), np.uint8)),
        Manifest((PackRef(IDS[0], 9, 1 << 63),), *(np.zeros(0, np.uint32),) * 2, np.zeros((0, 32), np.uint8)),
    ],
)
def test_parts_that_do_not_fit_are_not_built(wrong: Manifest) -> None:
    with pytest.raises(InvalidInputError, match="new manifest"):
        wrong.build()


def test_rows_need_their_pack_in_the_table() -> None:
    with pytest.raises(InvalidInputError, match=IDS[1]):
        Manifest.from_rows([PackRef(IDS[0], 9, 9)], [ChunkRow(IDS[1], 0, bytes(32))])


# -- hostile bytes ----------------------------------------------------------------------------------------------------


def test_a_manifest_cut_anywhere_is_refused() -> None:
    data = manifest().build()
    for end in range(len(data)):
        with pytest.raises(FormatError, match=KEY):
            Manifest.parse(data[:end], KEY)
    with pytest.raises(FormatError, match=KEY):
        Manifest.parse(data + b"\0", KEY)


def test_flipped_bits_give_a_format_error_or_a_manifest_that_holds() -> None:
    data = manifest().build()
    refused = 0
    for at in range(len(data)):
        for bit in (at % 8, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                parsed = Manifest.parse(bytes(damaged), KEY)
            except FormatError:
                refused += 1
                continue
            assert all(row.pack_id for row in parsed.rows(0, len(parsed)))
            assert all(8 <= ref.head <= ref.size for ref in parsed.packs)
    assert refused > 0.7 * len(data)


def damaged_column(name: str, at: int, data: bytes) -> bytes:
    whole = bytearray(manifest().build())
    start = 8 + int.from_bytes(whole[:8], "little")
    begin = start + json.loads(whole[8:start])[name]["data_offsets"][0] + at
    whole[begin : begin + len(data)] = data
    return bytes(whole)


@pytest.mark.parametrize(
    ("name", "at", "data", "message"),
    [
        ("pack", 4, b"\x02", "beyond the table of 2"),
        ("pack_head", 0, b"\x07", "impossible sizes"),
        ("pack_size", 0, bytes(8), "impossible sizes"),
        ("pack_size", 7, b"\xff", "impossible sizes"),
        ("pack_id", 6, b"\x40", "something else than uuid7"),
        ("pack_id", 0, manifest(0).build()[-16:], "twice in its table"),
    ],
    ids=["table", "head", "no-size", "size", "no-uuid7", "twice"],  # ids of packs differ from run to run
)
def test_impossible_columns_are_refused(name: str, at: int, data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Manifest.parse(damaged_column(name, at, data), KEY)


def test_newer_manifests_ask_for_an_upgrade() -> None:
    data = manifest().build().replace(b"deltastore manifest 1", b"deltastore manifest 2")
    with pytest.raises(UnsupportedFormatError, match="upgrade deltastore"):
        Manifest.parse(data, KEY)
    with pytest.raises(FormatError, match="expected 'deltastore manifest 1'"):
        Manifest.parse(data.replace(b"deltastore manifest 2", b"deltastore catalogue1"), KEY)


# -- where manifests are cut ------------------------------------------------------------------------------------------


def model(tensors: int, seed: int = 0) -> list[tuple[bytes, int]]:
    chance = random.Random(seed)
    return [(f'["layer.{number}.weight"]'.encode(), chance.randrange(0, 60)) for number in range(tensors)]


@given(st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 6000)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_runs_cover_all_tensors_and_keep_the_limit(tensors: list[tuple[bytes, int]]) -> None:
    runs = cut_manifests(tensors)
    assert [position for run in runs for position in run] == list(range(len(tensors)))
    for run in runs:
        rows = sum(tensors[position][1] for position in run)
        assert len(run) == 1 or rows <= MANIFEST_ROWS


def test_small_models_have_one_manifest() -> None:
    assert cut_manifests([]) == []
    assert cut_manifests([(b"a", 0)]) == [range(1)]
    assert cut_manifests([(bytes([number]), CUT_FROM_ROWS // 256) for number in range(256)]) == [range(256)]


def test_a_change_moves_only_the_cuts_near_it() -> None:
    tensors = model(3000)

    def runs(named: list[tuple[bytes, int]]) -> set[tuple[tuple[bytes, int], ...]]:
        return {tuple(named[position] for position in run) for run in cut_manifests(named)}

    before = runs(tensors)
    assert len(before) > 30
    for changed in (
        [(b"new", 40), *tensors],
        [*tensors[:1500], (b"new", 2000), *tensors[1500:]],
        tensors[:700] + tensors[760:],
        [*tensors, (b"new", 3)],
    ):
        assert len(before - runs(changed)) <= 12
