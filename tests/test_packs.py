from __future__ import annotations

import json
import random

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.errors import FormatError, InvalidInputError, UnsupportedFormatError
from deltastore.layout import new_id
from deltastore.options import MAX_CHUNK_BYTES
from deltastore.packs import PackColumns, PackEntry, build_pack, head_length

PACK = new_id()
BASES = [new_id() for _ in range(3)]


def entry(number: int = 0, **changes: object) -> PackEntry:
    values: dict[str, object] = {
        "digest": bytes([number % 256]) * 32,
        "fast_digest": bytes([number % 256]) * 16,
        "raw_length": 100 + number,
        "codec": "raw@1",
        "payload": bytes([number % 256]) * (number % 7),
        **changes,
    }
    return PackEntry(**values)  # type: ignore[arg-type]


def delta(number: int = 0, **changes: object) -> PackEntry:
    return entry(number, **{"codec": "sparse-ulp@1", "span": 1, "base": (BASES[number % 3], number), **changes})


def file_of(entries: list[PackEntry], pack_id: str = PACK) -> bytes:
    built = build_pack(pack_id, entries)
    data = built.head + b"".join(bytes(memoryview(piece)) for piece in built.pieces)
    assert len(data) == built.size
    return data


def with_header(head: bytes, change: object) -> bytes:
    """The head with a changed JSON header; `change` gets the parsed header."""
    end = 8 + int.from_bytes(head[:8], "little")
    header = json.loads(head[8:end])
    change(header)  # type: ignore[operator]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + head[end:]


def with_column(entries: list[PackEntry], name: str, row: int, value: int) -> bytes:
    """The head of these entries with one number of a column overwritten behind the writer's back."""
    head = bytearray(build_pack(PACK, entries).head)
    end = 8 + int.from_bytes(head[:8], "little")
    spec = json.loads(head[8:end])[name]
    size = 4 if spec["dtype"] == "U32" else 1
    at = end + spec["data_offsets"][0] + row * size
    head[at : at + size] = value.to_bytes(size, "little")
    return bytes(head)


entries_strategy = st.lists(
    st.builds(
        PackEntry,
        digest=st.binary(min_size=32, max_size=32),
        fast_digest=st.binary(min_size=16, max_size=16),
        raw_length=st.integers(1, MAX_CHUNK_BYTES),
        codec=st.sampled_from(["raw@1", "planes@1", "future-codec@12"]),
        payload=st.binary(max_size=50),
    )
    | st.builds(
        PackEntry,
        digest=st.binary(min_size=32, max_size=32),
        fast_digest=st.binary(min_size=16, max_size=16),
        raw_length=st.integers(1, MAX_CHUNK_BYTES),
        codec=st.sampled_from(["sparse-ulp@1", "dense-ulp@1"]),
        payload=st.binary(max_size=50).map(lambda data: np.frombuffer(data + b"x", np.uint8)),
        span=st.sampled_from([8**power for power in range(11)]),
        base=st.tuples(st.sampled_from(BASES), st.integers(0, 0xFFFFFFFE)),
    ),
    max_size=20,
)


@given(entries_strategy)
@settings(max_examples=60, deadline=None)
def test_what_was_packed_is_read_back(entries: list[PackEntry]) -> None:
    data = file_of(entries)
    head = data[: head_length(data)]
    columns = PackColumns.parse(PACK, head)
    assert (len(columns), columns.head, columns.size) == (len(entries), len(head), len(data))
    assert columns.digests() == [each.digest for each in entries]
    for row, given_entry in enumerate(entries):
        stored = columns.entry(row)
        assert (stored.pack_id, stored.row) == (PACK, row)
        assert data[stored.offset : stored.offset + stored.stored_length] == bytes(memoryview(given_entry.payload))
        for name in ("digest", "fast_digest", "raw_length", "codec", "span", "base"):
            assert getattr(stored, name) == getattr(given_entry, name)


def test_heads_are_deterministic_and_pieces_are_not_joined() -> None:
    payload = np.arange(100, dtype=np.uint8)
    entries = [entry(1), delta(2, payload=payload), entry(3, payload=memoryview(b"abc"))]
    first, second = build_pack(PACK, entries), build_pack(PACK, entries)
    assert first.head == second.head
    assert first.pieces[1] is payload
    assert int.from_bytes(first.head[:8], "little") % 8 == 0  # so that the columns lie aligned


@pytest.mark.parametrize("count", [0, 1, 500])
def test_packs_are_safetensors(count: int) -> None:
    entries = [delta(number) if number % 2 else entry(number) for number in range(count)]
    data = file_of(entries)
    tensors = safetensors.numpy.load(data)
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == {
        "raw_length": ("uint32", (count,)),
        "stored_length": ("uint32", (count,)),
        "span": ("uint32", (count,)),
        "base_pack": ("uint32", (count,)),
        "base_row": ("uint32", (count,)),
        "digest": ("uint8", (count, 32)),
        "fast_digest": ("uint8", (count, 16)),
        "codec": ("uint8", (count,)),
        "bases": ("uint8", (min(3, count // 2), 16)),
        "payload": ("uint8", (sum(number % 7 for number in range(count)),)),
    }
    assert tensors["raw_length"].tolist() == [each.raw_length for each in entries]
    assert tensors["payload"].tobytes() == b"".join(bytes(memoryview(each.payload)) for each in entries)


def test_metadata_says_what_the_file_is(tmp_path: object) -> None:
    path = f"{tmp_path}/pack"
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(file_of([entry(1), delta(2)]))
    with safetensors.safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"format": "deltastore pack 1", "id": PACK, "codecs": "raw@1 sparse-ulp@1"}


def test_head_length_asks_for_more() -> None:
    data = file_of([delta(number) for number in range(40)])
    asked = [0]
    while asked[-1] == 0 or asked[-1] > asked[-2]:
        asked.append(head_length(data[: asked[-1]]))
    assert asked[1] == 8
    assert asked[-1] == len(build_pack(PACK, [delta(number) for number in range(40)]).head)
    assert len(asked) <= 5


def test_columns_cost_at_most_70_bytes_a_row_and_800_bytes_a_pack() -> None:
    thousand = len(build_pack(PACK, [delta(number) for number in range(1000)]).head)
    one = len(build_pack(PACK, [delta()]).head)
    assert one <= 900
    assert (thousand - one) / 999 <= 70


@pytest.mark.parametrize(
    "wrong",
    [
        entry(digest=b"short"),
        entry(fast_digest=bytes(17)),
        entry(raw_length=0),
        entry(raw_length=MAX_CHUNK_BYTES + 1),
        entry(raw_length=-1),
        entry(raw_length=1 << 40),
        entry(payload=bytes(MAX_CHUNK_BYTES + (64 << 10) + 1)),
        entry(codec="raw"),
        entry(codec="Raw@1"),
        entry(codec="two words@1"),
        entry(span=1),
        delta(base=None),
        delta(span=0),
        delta(span=2),
        delta(span=7),
        delta(span=8**11),
        delta(base=(PACK, 0)),
        delta(base=("x", 0)),
        delta(base=(BASES[0], 0xFFFFFFFF)),
        delta(base=(BASES[0], -1)),
    ],
)
def test_what_no_reader_accepts_is_not_packed(wrong: PackEntry) -> None:
    with pytest.raises(InvalidInputError, match=PACK):
        build_pack(PACK, [entry(), wrong])


def test_a_pack_needs_an_id() -> None:
    with pytest.raises(InvalidInputError, match="not a pack id"):
        build_pack("x", [])


# -- hostile bytes ----------------------------------------------------------------------------------------------------


def test_a_head_cut_anywhere_is_refused() -> None:
    head = build_pack(PACK, [entry(1), delta(2), delta(3)]).head
    PackColumns.parse(PACK, head)
    for end in range(len(head)):
        with pytest.raises(FormatError, match=PACK):
            PackColumns.parse(PACK, head[:end])
    with pytest.raises(FormatError, match=PACK):
        PackColumns.parse(PACK, head + b"\0")


def test_flipped_bits_give_a_format_error_or_columns_that_hold() -> None:
    entries = [entry(1), delta(2), delta(3, span=8)]
    head = build_pack(PACK, entries).head
    refused = 0
    for at in range(len(head)):
        for bit in (at % 8, 7):
            damaged = bytearray(head)
            damaged[at] ^= 1 << bit
            try:
                assert head_length(bytes(damaged)) >= 8
                columns = PackColumns.parse(PACK, bytes(damaged))
            except FormatError:
                refused += 1
                continue
            for row in range(len(columns)):
                stored = columns.entry(row)
                assert columns.head <= stored.offset <= stored.offset + stored.stored_length <= columns.size
                assert 0 < stored.raw_length <= MAX_CHUNK_BYTES
                assert (stored.base is None) == (stored.span == 0)
    assert refused > len(head)


def test_random_bytes_are_refused() -> None:
    chance = random.Random(5)
    for _ in range(300):
        data = chance.randbytes(chance.randrange(200))
        for size in (len(data), chance.randrange(100)):
            framed = size.to_bytes(8, "little") + data
            with pytest.raises(FormatError):
                PackColumns.parse(PACK, framed)


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("raw_length", 1, 0, "row 1 has an impossible raw length"),
        ("raw_length", 0, MAX_CHUNK_BYTES + 1, "row 0 has an impossible raw length"),
        ("stored_length", 1, 0xFFFFFFFF, "row 1 has an impossible stored length"),
        ("stored_length", 1, 3, "its payloads have"),
        ("span", 0, 1, "row 0 has an impossible base for a delta"),
        ("span", 1, 3, "row 1 has an impossible span"),
        ("span", 1, 0, "row 1 has an impossible base for a full entry"),
        ("base_pack", 1, 1, "row 1 has an impossible base for a delta"),
        ("base_pack", 1, 0xFFFFFFFF, "row 1 has an impossible base for a delta"),
        ("base_row", 1, 0xFFFFFFFF, "row 1 has an impossible base for a delta"),
        ("base_row", 0, 0, "row 0 has an impossible base for a full entry"),
        ("codec", 1, 2, "row 1 has an impossible codec"),
        ("bases", 6, 0x40, "something else than uuid7"),
    ],
)
def test_impossible_columns_are_refused_by_name(name: str, row: int, value: int, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        PackColumns.parse(PACK, with_column([entry(1), delta(2)], name, row, value))
    assert f"pack {PACK}" in str(caught.value)


def test_a_pack_that_is_based_on_itself_is_refused() -> None:
    other = new_id()
    head = build_pack(other, [delta(base=(PACK, 0))]).head
    with pytest.raises(FormatError, match="names itself as a base"):
        PackColumns.parse(PACK, with_header(head, lambda header: header["__metadata__"].update(id=PACK)))


def test_headers_that_do_not_fit_are_refused() -> None:
    head = build_pack(PACK, [entry(1), delta(2)]).head
    changes = {
        "another id": lambda h: h["__metadata__"].update(id=BASES[0]),
        "codec ids": lambda h: h["__metadata__"].update(codecs="raw@1 ../x"),
        "format ''": lambda h: h["__metadata__"].pop("format"),
        "of texts": lambda h: h["__metadata__"].update(format=1),
        "no __metadata__": lambda h: h.pop("__metadata__"),
        "extra": lambda h: h.update(extra=h["codec"]),
        "tensors": lambda h: h.pop("codec"),
        "'span' is not": lambda h: h["span"].update(dtype="I32"),
        "'raw_length' is not": lambda h: h["raw_length"].update(shape=[-1]),
        "'stored_length' is not": lambda h: h["stored_length"].update(shape=[True]),
        "'digest' is not": lambda h: h["digest"].update(shape=[2, 31]),
        "'base_row' is not": lambda h: h["base_row"].update(shape=[2, 1]),
        "does not stand": lambda h: h["span"].update(shape=[3]),
        "end within": lambda h: [
            h["raw_length"].update(shape=[10**15], data_offsets=[0, 4 * 10**15]),
        ],
        "differ in length": lambda h: (h["raw_length"].update(shape=[4], data_offsets=[0, 16]), h.update(span=h["span"])),
        "does not follow": lambda h: h["payload"].update(data_offsets=[0, 3]),
        "no data_offsets": lambda h: h["payload"].update(data_offsets=[0]),
        "exactly the keys": lambda h: h["payload"].update(more=1),
    }
    for name, change in changes.items():
        damaged = with_header(head, change)
        with pytest.raises(FormatError) as caught:
            PackColumns.parse(PACK, damaged)
        assert PACK in str(caught.value), name


def test_columns_of_unequal_length_are_refused() -> None:
    one, two = build_pack(PACK, [entry(1)]).head, build_pack(PACK, [entry(1), entry(1)]).head
    start = [8 + int.from_bytes(each[:8], "little") for each in (one, two)]
    body = two[start[1] : start[1] + 8] + one[start[0] + 4 :]  # two raw lengths, one of everything else

    def change(header: dict[str, dict[str, list[int]]]) -> None:
        for name, spec in header.items():
            if name == "raw_length":
                spec.update(shape=[2], data_offsets=[0, 8])
            elif name != "__metadata__":
                spec["data_offsets"] = [offset + 4 for offset in spec["data_offsets"]]

    head = with_header(one, change)
    head = head[: 8 + int.from_bytes(head[:8], "little")] + body
    with pytest.raises(FormatError, match="its columns differ in length"):
        PackColumns.parse(PACK, head)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"1",
        b"{",
        b"\xff\xff",
        b'{"a":1,"a":2}',
        b"[" * 30_000,
        b'{"__metadata__":' + b"9" * 20_000 + b"}",
        b'{"raw_length":null}',
        b'{"__metadata__":{"format":"deltastore pack 1","x":"\\ud800"}}',
    ],
)
def test_strange_json_is_refused(text: bytes) -> None:
    data = len(text).to_bytes(8, "little") + text
    with pytest.raises(FormatError):
        PackColumns.parse(PACK, data)


def test_a_huge_header_length_allocates_nothing() -> None:
    for length in (1 << 16, 1 << 40, (1 << 64) - 1):
        with pytest.raises(FormatError, match="header of"):
            head_length(length.to_bytes(8, "little") + b"{}")


def test_newer_packs_ask_for_an_upgrade() -> None:
    head = with_header(build_pack(PACK, []).head, lambda h: h["__metadata__"].update(format="deltastore pack 2"))
    with pytest.raises(UnsupportedFormatError, match="upgrade deltastore"):
        PackColumns.parse(PACK, head)


def test_rows_that_are_not_there_are_refused() -> None:
    columns = PackColumns.parse(PACK, build_pack(PACK, [entry()]).head)
    for row in (-1, 1, 1 << 40):
        with pytest.raises(FormatError, match=f"pack {PACK} has 1 rows"):
            columns.entry(row)


def test_unknown_codecs_are_kept() -> None:
    columns = PackColumns.parse(PACK, build_pack(PACK, [entry(codec="from-the-future@3")]).head)
    assert columns.entry(0).codec == "from-the-future@3"
