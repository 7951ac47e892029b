"""Canonical JSON: golden vectors, round trips, and everything that must be refused."""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore import canonical
from deltastore.errors import FormatError, InvalidInputError

VECTORS = json.loads((Path(__file__).parents[1] / "schemas/examples/canonical.json").read_text(encoding="utf-8"))
NAN = struct.unpack(">d", bytes.fromhex("fff4000000000001"))[0]  # signalling, negative, with a payload

# The values behind the vectors, by name. Written by hand: nothing here comes out of the code under test.
VALUES: dict[str, Any] = {
    "null": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**63, -(10**30)],
    "floats": [0.0, -0.0, 1.5, float("inf"), float("-inf"), 5e-324, NAN],
    "text": ["", 'quote " backslash \\ slash /', "line\n tab\t bell\x07 delete\x7f", "é e\u0301 \U0001f600"],
    "bytes": [b"", b"\x00\xff\x10"],
    "typed keys": {"0": 1, 0: 2, None: 3, 1.5: 4, b"0": 5, True: 6},
    "containers": [[], (), {}, OrderedDict(), (1,), OrderedDict(b=1, a=2), {"b": 1, "a": 2}],
}


def same(left: Any, right: Any) -> bool:
    """Equality that tells 0 from False, -0.0 from 0.0, and one NaN from another."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right)


def test_every_vector_has_a_value() -> None:
    assert VALUES.keys() == VECTORS.keys()


@pytest.mark.parametrize("name", VALUES)
def test_golden_vectors(name: str) -> None:
    assert canonical.encode(VALUES[name]).decode("utf-8") == VECTORS[name]
    assert same(canonical.unpack(json.loads(VECTORS[name])), VALUES[name])


texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary()
plain_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(scalars, inner, max_size=4)
        | st.dictionaries(scalars, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(plain_values)
def test_round_trip(value: Any) -> None:
    assert same(canonical.unpack(json.loads(canonical.encode(value))), value)


@settings(deadline=None)
@given(plain_values, plain_values)
def test_equal_bytes_mean_equal_values(left: Any, right: Any) -> None:
    assert (canonical.encode(left) == canonical.encode(right)) == same(left, right)


def test_dumps_sorts_by_code_point_without_white_space() -> None:
    assert canonical.dumps({"é": [1, True, None], "z": {}, "A": "ä"}) == '{"A":"ä","z":{},"é":[1,true,null]}'.encode()
    # UTF-16 order would put the astral letter first
    assert list(json.loads(canonical.dumps({"\U0001f600": 1, "\uffff": 2}))) == ["\uffff", "\U0001f600"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, "\ud800x"]}, r"value\['a'\]\[1\] has a lone surrogate at position 0"),
        ({"\udfff": 1}, "lone surrogate"),
        ({"a": {1, 2}}, r"value\['a'\] is a builtins.set"),
        ([np.float64(1.0)], r"value\[0\] is a numpy.float64"),
        ({(1, 2): 3}, "the key of value"),
        (10**5000, "16610 bits"),
    ],
    ids=["surrogate", "surrogate key", "set", "numpy scalar", "tuple key", "long integer"],
)
def test_what_can_not_be_packed_is_named(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        canonical.encode(value)


def test_deep_and_cyclic_values_are_refused() -> None:
    deep: Any = 1
    for _ in range(canonical.MAX_DEPTH):
        deep = [deep]
    assert same(canonical.unpack(json.loads(canonical.encode(deep))), deep)
    with pytest.raises(InvalidInputError, match="deeper than 64"):
        canonical.encode([deep])
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(InvalidInputError, match="contains itself"):
        canonical.encode(cyclic)
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(InvalidInputError, match="nested deeper"):
        canonical.dumps(deep)
    with pytest.raises(FormatError, match="nested deeper"):
        canonical.unpack(deep)


@pytest.mark.parametrize("value", [1.5, math.nan, {"a": (1,)}, {1: 2}, {"a": "\ud800"}, b"x"])
def test_dumps_takes_json_with_text_and_integers_only(value: Any) -> None:
    with pytest.raises(InvalidInputError):
        canonical.dumps(value)


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "1.5",
        "{}",
        '{"i":5}',
        '{"i":"05"}',
        '{"i":"-0"}',
        '{"i":"+1"}',
        '{"i":"1_0"}',
        '{"i":"\u0663"}',
        '{"f":"3FF8000000000000"}',
        '{"f":"3ff8"}',
        '{"b":"AB=="}',
        '{"b":"AA"}',
        '{"b":"A A="}',
        '{"b":"\u00e9"}',
        '{"t":1}',
        '{"d":{}}',
        '{"d":[["a"]]}',
        '{"d":[["a",null],["a",null]]}',
        '{"d":[[{"i":"0"},null],[false,null]]}',
        '{"d":[[["a"],null]]}',
        '{"q":[]}',
        '{"i":"1","f":"3ff8000000000000"}',
        '"\\ud800"',
        '{"i":"' + "9" * 5000 + '"}',
    ],
)
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(FormatError):
        canonical.unpack(json.loads(text))
