"""States taken apart and put together, without torch: tensors are stand-ins that compare by identity."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_canonical import same, scalars

from deltastore.errors import FormatError, IncompatibleStateError, InvalidInputError
from deltastore.state import (
    check_range,
    flatten,
    leaf_names,
    leaf_paths,
    strip_wrapper_prefixes,
    unflatten,
    unique_leaf_names,
)

ROOT = Path(__file__).parents[1]


class Leaf:
    """Stands for a tensor."""


def is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


states = st.recursive(
    scalars | st.builds(Leaf),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(scalars, inner, max_size=4)
        | st.dictionaries(scalars, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(states)
def test_round_trip(state: Any) -> None:
    flat = flatten(state, is_leaf)
    tree = json.loads(json.dumps(flat.tree))
    assert same(unflatten(tree, flat.tensors, flat.values), state)
    assert same(leaf_paths(tree), flat.leaves)
    for path, index in flat.leaves:
        found = state
        for key in path:
            found = found[key]
        assert found is flat.tensors[index]


def test_optimizer_state_keeps_kinds_of_keys_and_leaves() -> None:
    step, moment = Leaf(), Leaf()
    state = {
        "state": {0: {"step": step, "exp_avg": moment}, "0": None},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": [0], "amsgrad": False}],
        "empty": {"list": [], "dict": {}, "tuple": (), "ordered": OrderedDict(), "bytes": b""},
    }
    flat = flatten(state, is_leaf)
    assert same(unflatten(flat.tree, flat.tensors, flat.values), state)
    assert flat.leaves == [(("state", 0, "step"), 0), (("state", 0, "exp_avg"), 1)]
    assert leaf_names(flat.tree) == ["state.0.step", "state.0.exp_avg"]


def test_metadata_of_an_ordered_dict_survives() -> None:
    state: Any = OrderedDict(weight=Leaf())
    state._metadata = OrderedDict({"": {"version": 1}})
    flat = flatten(state, is_leaf)
    back = unflatten(flat.tree, flat.tensors, flat.values)
    assert same(back._metadata, state._metadata)
    assert not hasattr(unflatten(flatten(OrderedDict(), is_leaf).tree, [], []), "_metadata")
    state._metadata = {"": {"version": object()}}
    with pytest.raises(IncompatibleStateError, match=r"state\._metadata\[''\]\['version'\]"):
        flatten(state, is_leaf)


def test_ties_share_an_index() -> None:
    shared, alone = Leaf(), Leaf()
    flat = flatten({"a": shared, "b": alone, "c": [shared]}, is_leaf, id)
    assert flat.tensors == [shared, alone]
    assert flat.leaves == [(("a",), 0), (("b",), 1), (("c", 0), 0)]
    assert unflatten(flat.tree, flat.tensors, flat.values)["c"][0] is shared
    assert len(flatten([shared, shared], is_leaf).tensors) == 2  # without a key nothing is tied


def test_names_of_a_flat_state_are_its_keys() -> None:
    keys = ["", ".", "a.b", "../x", "a/b", "nul\0", "ü" * 300, "x" * 100_000]
    tree = flatten({key: Leaf() for key in keys}, is_leaf).tree
    assert unique_leaf_names(tree) == keys


def test_two_leaves_of_one_name_are_named() -> None:
    tree = flatten({"a.b": Leaf(), "a": {"b": Leaf()}}, is_leaf).tree
    assert leaf_names(tree) == ["a.b", "a.b"]
    with pytest.raises(IncompatibleStateError, match=r"state\['a.b'\] and state\['a'\]\['b'\] both have the name 'a.b'"):
        unique_leaf_names(tree)
    with pytest.raises(IncompatibleStateError, match=r"state\[0\] and state\['0'\]"):
        unique_leaf_names(flatten({0: Leaf(), "0": Leaf()}, is_leaf).tree)


Pair = namedtuple("Pair", "a b")


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "conversion"),
    [
        (np.zeros(3), r"torch\.from_numpy\(array\)"),
        (np.float32(1), r"value\.item\(\)"),
        (np.float64(1), r"value\.item\(\)"),
        (Pair(1, 2), r"tuple\(value\)"),
        (defaultdict(int), r"dict\(value\)"),
        (Counter(), r"dict\(value\)"),
        (deque(), r"list\(value\)"),
        ({1, 2}, r"sorted\(value\)"),
        (range(3), r"list\(value\)"),
        (bytearray(b"x"), r"bytes\(value\)"),
        (1 + 2j, r"value\.real"),
        (Text("x"), r"str\(value\)"),
        (object(), "its parts"),
        (int, "its parts"),
        ("\ud800", "lone surrogate"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_other_types_are_refused_with_path_and_conversion(value: Any, conversion: str) -> None:
    with pytest.raises(IncompatibleStateError, match=r"^state\['outer'\]\[1\] .*" + conversion):
        flatten({"outer": [0, value]}, is_leaf)


@pytest.mark.parametrize("key", [(1, 2), np.int64(1), Text("x"), "\ud800", frozenset()], ids=repr)
def test_other_keys_are_refused_with_path(key: Any) -> None:
    with pytest.raises(IncompatibleStateError, match=r"state\['outer'\]"):
        flatten({"outer": {key: 1}}, is_leaf)


def test_objects_with_a_state_dict_name_it() -> None:
    class Optimizer:
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(IncompatibleStateError, match=r"value\.state_dict\(\)"):
        flatten({"optimizer": Optimizer()}, is_leaf)


def test_cycles_are_refused_and_shared_containers_are_not() -> None:
    inner: list[Any] = [1]
    flat = flatten([inner, inner], is_leaf)
    assert unflatten(flat.tree, [], flat.values) == [[1], [1]]
    inner.append({"back": inner})
    with pytest.raises(IncompatibleStateError, match=r"state\['x'\]\[1\]\['back'\] contains itself"):
        flatten({"x": inner}, is_leaf)


def test_deep_states_are_refused_not_crashed_on() -> None:
    state: Any = 1
    for _ in range(64):
        state = {"a": state}
    flat = flatten(state, is_leaf)
    assert unflatten(flat.tree, [], flat.values) == state
    for _ in range(1000):
        state = [state]
    with pytest.raises(IncompatibleStateError, match="deeper than 64 levels"):
        flatten(state, is_leaf)
    tree: Any = {"v": 0}
    for _ in range(1000):
        tree = {"l": [tree]}
    with pytest.raises(FormatError, match="deeper than 64 levels"):
        unflatten(tree, [], [1])
    with pytest.raises(FormatError, match="deeper than 64 levels"):
        leaf_paths(tree)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        {},
        {"x": -1},
        {"x": True},
        {"x": 1.0},
        {"x": 5},
        {"v": 5},
        {"x": 0, "v": 0},
        {"d": {}},
        {"l": {"x": 0}},
        {"d": [["a"]]},
        {"d": [["a", {"x": 0}], ["a", {"x": 0}]]},
        {"d": [[["a"], {"x": 0}]]},
        {"d": [[{"i": "x"}, {"x": 0}]]},
        {"d": [], "m": None},
        {"o": [], "m": {"z": 1}},
        {"q": []},
        {"l": [{"l": [{"x": "0"}]}]},
    ],
    ids=str,
)
def test_malformed_trees_are_typed_errors(tree: Any) -> None:
    with pytest.raises(FormatError):
        unflatten(tree, [Leaf()], [1])


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("module._orig_mod.layer.weight", "layer.weight"),
        ("_orig_mod.module.layer.weight", "layer.weight"),
        ("layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
        ("submodule.weight", "submodule.weight"),
        ("module", "module"),
        ("layer.module", "layer.module"),
        ("", ""),
    ],
)
def test_wrapper_prefixes(name: str, bare: str) -> None:
    assert strip_wrapper_prefixes(name) == bare


def test_ranges() -> None:
    assert check_range(2, 6, (2, 3)) == 4
    assert check_range(0, 1, ()) == 1
    for start, stop in [(-1, 2), (3, 2), (0, 7)]:
        with pytest.raises(InvalidInputError, match="6 elements"):
            check_range(start, stop, (2, 3))


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy\n"
        "from deltastore import canonical, digests, dtypes, files, offload, restore, state, tensors, training\n"
        "flat = tensors.flatten_state({'step': 5, 'name': 'x'})\n"
        "assert flat.values == [5, 'x'] and not tensors.module_files({})\n"
        "try:\n    tensors.flatten_state({'w': numpy.zeros(3)})\n"
        "except ValueError as error:\n    assert 'torch.from_numpy(array)' in str(error)\n"
        "else:\n    raise SystemExit('not refused')\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60, cwd=ROOT).returncode == 0


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from deltastore import tensors\n"
        "from deltastore.errors import MissingDependencyError\n"
        "assert tensors.flatten_state({'a': 1}).values == [1]\n"
        "try:\n    tensors.empty_tensor('float32', (2,))\n"
        "except MissingDependencyError as error:\n    assert \"pip install 'deltastore[torch]'\" in str(error)\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60, cwd=ROOT).returncode == 0
