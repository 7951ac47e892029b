"""A nested state taken apart into a tree of typed keys, its unique tensors and its plain values, and put together.

Nodes of the tree are JSON values:

    {"d": [[key, node], ...]}    dict         {"o": [[key, node], ...], "m": packed}    OrderedDict and its `_metadata`
    {"l": [node, ...]}           list         {"t": [node, ...]}                        tuple
    {"x": i}                     tensor i     {"v": j}                                  plain value j

Keys are packed scalars, so `0` is not `"0"`. Tied leaves share one tensor index. Nothing here knows what a tensor is.

A tensor that is made of other tensors is a dict with the reserved key `RECIPE`: see `TensorParts`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltastore import canonical
from deltastore.canonical import MAX_DEPTH, show
from deltastore.errors import FormatError, IncompatibleStateError, InvalidInputError

Array = npt.NDArray[np.uint8]
Key = None | bool | int | float | str | bytes
Path = tuple[Key, ...]

RECIPE = "__tensor_subclass__"  # the key of a dict that stands for a tensor subclass; refused in every other dict

WRAPPER_PREFIXES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})
_SCALARS = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (dict, OrderedDict, list, tuple)

# What to write instead, for types that people do put into states.
_CONVERSIONS = {
    "numpy.ndarray": "`torch.from_numpy(array)`",
    "collections.defaultdict": "`dict(value)`",
    "collections.deque": "`list(value)`",
    "builtins.set": "`sorted(value)`",
    "builtins.frozenset": "`sorted(value)`",
    "builtins.range": "`list(value)`",
    "builtins.bytearray": "`bytes(value)`",
    "builtins.memoryview": "`bytes(value)`",
    "builtins.complex": "`(value.real, value.imag)`",
    "torch.Size": "`tuple(value)`",
    "torch.dtype": "`str(value)`",
    "torch.device": "`str(value)`",
    "torch.Generator": "`generator.get_state()`",
    "torch._C.Generator": "`generator.get_state()`",
}


class TensorParts(dict[Any, Any]):
    """What a tensor subclass is made of: under `RECIPE` how it is put together (plain values), then its inner tensors.

    In a tree it is an ordinary dict node, so that a reader that does not know the subclass still finds the inner tensors.
    """


class TensorSource(Protocol):
    """A tensor that bytes can be read from."""

    @property
    def dtype(self) -> str:
        """Name of the element type, such as `"bfloat16"`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in storage elements."""

    @property
    def frozen(self) -> bool:
        """True when the owner says that the values do not change."""

    def read(self, start: int, stop: int) -> Array:
        """Bytes of the logical storage elements [start, stop) in row-major order, little-endian: 1-d uint8.

        May be a view of live memory; valid until the next call from the same thread.
        """


class TensorSink(Protocol):
    """A tensor that bytes can be written to."""

    @property
    def dtype(self) -> str:
        """Name of the element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in storage elements."""

    def view(self, start: int, stop: int) -> Array | None:
        """Writable 1-d uint8 view of the final memory of elements [start, stop); None when there is no such view."""

    def write(self, start: int, stop: int, data: Array) -> None:
        """Put the bytes of elements [start, stop) into place. Several threads may write disjoint ranges."""


def check_range(start: int, stop: int, shape: Sequence[int], name: str = "the tensor") -> int:
    """The number of elements in [start, stop). Raises InvalidInputError unless the range lies in a tensor of this shape."""
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise InvalidInputError(f"[{start}, {stop}) is no range of the {size} elements of {name}")
    return stop - start


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart: `leaves` names the tensor index at each path, in order of appearance."""

    tree: Any
    tensors: list[Any]
    values: list[Any]
    leaves: list[tuple[Path, int]]


@dataclass(slots=True)
class _Flattening:
    is_tensor: Callable[[Any], bool]
    tie_key: Callable[[Any], Hashable | None]
    expand: Callable[[Any, Path], Any]
    tensors: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    leaves: list[tuple[Path, int]] = field(default_factory=list)
    tied: dict[Hashable, int] = field(default_factory=dict)
    open_containers: set[int] = field(default_factory=set)

    def node(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind not in _SCALARS and kind not in _CONTAINERS:
            value = self.expand(value, path)
            kind = type(value)
        if self.is_tensor(value):
            return {"x": self.tensor(value, path)}
        if kind in _SCALARS:
            _pack_scalar(value, describe_path(path))
            self.values.append(value)
            return {"v": len(self.values) - 1}
        if kind not in _CONTAINERS and kind is not TensorParts:
            raise IncompatibleStateError(f"{describe_path(path)} {_refusal(value)}")
        if id(value) in self.open_containers:
            raise IncompatibleStateError(f"{describe_path(path)} contains itself; a state must be a tree")
        if len(path) >= MAX_DEPTH:
            raise IncompatibleStateError(
                f"{describe_path(path[:3])}... is nested deeper than {MAX_DEPTH} levels; flatten it before committing"
            )
        self.open_containers.add(id(value))
        try:
            return self.container(value, path)
        finally:
            self.open_containers.discard(id(value))

    def container(self, value: Any, path: Path) -> Any:
        if type(value) in (list, tuple):
            tag = "l" if type(value) is list else "t"
            return {tag: [self.node(item, (*path, i)) for i, item in enumerate(value)]}
        if RECIPE in value and type(value) is not TensorParts:
            raise IncompatibleStateError(
                f"{describe_path(path)} has the key {RECIPE!r}, which stands for tensor subclasses; rename it"
            )
        pairs = []
        for key, item in value.items():
            if type(key) not in _SCALARS:
                raise IncompatibleStateError(
                    f"{describe_path(path)} has the key {show(key)} of type {_type_name(key)}; expected str, int, "
                    "float, bool, bytes or None: rename it"
                )
            where = (*path, key)
            pairs.append([_pack_scalar(key, f"the key of {describe_path(where)}"), self.node(item, where)])
        if type(value) is not OrderedDict:
            return {"d": pairs}
        node: dict[str, Any] = {"o": pairs}
        if hasattr(value, "_metadata"):  # torch keeps the versions of modules there, beside the entries
            try:
                node["m"] = canonical.pack(value._metadata, f"{describe_path(path)}._metadata")
            except InvalidInputError as error:
                raise IncompatibleStateError(str(error)) from None
        return node

    def tensor(self, value: Any, path: Path) -> int:
        key = self.tie_key(value)
        index = None if key is None else self.tied.get(key)
        if index is None:
            index = len(self.tensors)
            self.tensors.append(value)
            if key is not None:
                self.tied[key] = index
        self.leaves.append((path, index))
        return index


def flatten(
    value: Any,
    is_tensor: Callable[[Any], bool],
    tie_key: Callable[[Any], Hashable | None] = lambda _: None,
    expand: Callable[[Any, Path], Any] = lambda value, _: value,
) -> FlatState:
    """Take a state apart.

    `is_tensor` says which leaves are tensors; leaves with the same `tie_key` share one index (None: never tied).
    `expand` may give, for whatever is no container and no plain value, what stands for it, such as an object's `state_dict()`.
    Containers must be exactly dict, OrderedDict, list or tuple, at most 64 levels deep; keys and other leaves None,
    bool, int, float, str or bytes. Raises IncompatibleStateError naming the path and what to write instead.
    """
    work = _Flattening(is_tensor, tie_key, expand)
    tree = work.node(value, ())
    return FlatState(tree, work.tensors, work.values, work.leaves)


def unflatten(
    tree: Any,
    tensors: Sequence[Any],
    values: Sequence[Any],
    rebuild: Callable[[TensorParts, Path], Any] = lambda parts, _: parts,
    path: Path = (),
) -> Any:
    """Put a state together from its tree, any objects in place of the tensors, and its plain values.

    Args:
        rebuild: makes the tensor that parts stand for, innermost first; by default they stay `TensorParts`.
        path: where the tree is in a larger one; for messages.

    Raises FormatError when the tree is malformed or names an index that is not there.
    """
    return _build(tree, path, tensors, values, rebuild)


def _build(
    node: Any,
    path: Path,
    tensors: Sequence[Any],
    values: Sequence[Any],
    rebuild: Callable[[TensorParts, Path], Any],
) -> Any:
    tag, content = _parse(node, path)
    if tag in ("x", "v"):
        leaves = tensors if tag == "x" else values
        if content >= len(leaves):
            kind = "tensor" if tag == "x" else "value"
            raise FormatError(f"{describe_path(path)} names {kind} {content}, but there are {len(leaves)}")
        return leaves[content]
    if tag in ("l", "t"):
        items = [_build(child, (*path, i), tensors, values, rebuild) for i, child in enumerate(content)]
        return items if tag == "l" else tuple(items)
    mapping: dict[Any, Any] = {} if tag == "d" else OrderedDict()
    for key, child in _pairs(content, path):
        mapping[key] = _build(child, (*path, key), tensors, values, rebuild)
    if "m" in node:
        mapping._metadata = canonical.unpack(node["m"])  # type: ignore[attr-defined]
    return rebuild(TensorParts(mapping), path) if tag == "d" and RECIPE in mapping else mapping


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, node) of every node of a tree, parents before children, in order. Raises FormatError."""
    tag, content = _parse(tree, path)
    yield path, tree
    if tag in ("l", "t"):
        for i, child in enumerate(content):
            yield from walk(child, (*path, i))
    elif tag in ("d", "o"):
        for key, child in _pairs(content, path):
            yield from walk(child, (*path, key))


def leaf_paths(tree: Any, tag: str = "x") -> list[tuple[Path, int]]:
    """(path, index) of every tensor leaf of a tree, in order; with the tag "v" of every plain value. Raises FormatError."""
    return [(path, node[tag]) for path, node in walk(tree) if tag in node]


def tensor_units(tree: Any) -> list[tuple[Path, Any]]:
    """(path, node) of the dicts that stand for tensor subclasses; not of those inside another. Raises FormatError."""
    found: list[tuple[Path, Any]] = []
    for path, node in walk(tree):
        inside = found and path[: len(found[-1][0])] == found[-1][0]
        if "d" in node and not inside and any(pair[0] == RECIPE for pair in node["d"]):
            found.append((path, node))
    return found


def leaf_names(tree: Any) -> list[str]:
    """The name of every tensor leaf, aligned with `leaf_paths`: the parts of its path joined by `.`, ints as digits.

    The name of a leaf of a flat state is thus its key, byte for byte. Names may repeat: see `unique_leaf_names`.
    """
    return [path_name(path) for path, _ in leaf_paths(tree)]


def unique_leaf_names(tree: Any) -> list[str]:
    """`leaf_names`, which must be distinct. Raises IncompatibleStateError naming both leaves that share one."""
    seen: dict[str, Path] = {}
    for path, _ in leaf_paths(tree):
        name = path_name(path)
        if name in seen:
            raise IncompatibleStateError(
                f"{describe_path(seen[name])} and {describe_path(path)} both have the name {show(name)}; "
                "use `snapshot.state()`, which keeps paths, or rename one of them"
            )
        seen[name] = path
    return list(seen)


def is_within(path: Path, roots: Set[Path], longer_than: int = -1) -> bool:
    """Whether a path is one of `roots` or below one of them; only roots of more than `longer_than` keys count."""
    return any(path[:length] in roots for length in range(longer_than + 1, len(path) + 1))


def path_name(path: Path) -> str:
    """The name of a leaf: the parts of its path joined by `.`; bytes as hex digits."""
    return ".".join(key.hex() if isinstance(key, bytes) else str(key) for key in path)


def describe_path(path: Path) -> str:
    """A path for messages, such as `state['optimizer'][0]`."""
    return "state" + "".join(f"[{show(key)}]" for key in path)


def strip_wrapper_prefixes(name: str) -> str:
    """A name without the components that wrappers (DDP, torch.compile, FSDP) put in. For matching, never for storing.

    The last component is a parameter's own name and stays.
    """
    *parents, last = name.split(".")
    return ".".join([part for part in parents if part not in WRAPPER_PREFIXES] + [last])


def _parse(node: Any, path: Path) -> tuple[str, Any]:
    """Tag and content of a node, checked for everything but its children."""
    if len(path) > MAX_DEPTH:
        raise FormatError(f"the tree of a state is nested deeper than {MAX_DEPTH} levels")
    if type(node) is dict:
        tags = set(node)
        tag = "o" if tags == {"o", "m"} else next(iter(tags)) if len(tags) == 1 else ""
        content = node.get(tag)
        if tag in ("x", "v") and type(content) is int and content >= 0:
            return tag, content
        if tag in ("d", "o", "l", "t") and type(content) is list:
            return tag, content
    raise FormatError(f"{describe_path(path)} is no node of a state tree: {show(node)}")


def _pairs(content: list[Any], path: Path) -> Iterator[tuple[Key, Any]]:
    seen: set[Key] = set()
    for pair in content:
        if type(pair) is not list or len(pair) != 2:
            raise FormatError(f"{describe_path(path)}: expected a [key, node] pair, found {show(pair)}")
        key = canonical.unpack_scalar(pair[0])
        if key in seen:
            raise FormatError(f"{describe_path(path)} has the key {show(key)} twice")
        seen.add(key)
        yield key, pair[1]


def _pack_scalar(value: Any, path: str) -> Any:
    try:
        return canonical.pack_scalar(value, path)
    except InvalidInputError as error:
        raise IncompatibleStateError(str(error)) from None


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _refusal(value: Any) -> str:
    """Why a value can't be a part of a state, and what to write instead."""
    name = _type_name(value)
    conversion = _CONVERSIONS.get(name)
    if conversion is None:
        if isinstance(value, np.generic):
            conversion = "`value.item()`"
        elif isinstance(value, tuple):  # namedtuples and torch's return types
            conversion = "`tuple(value)`"
        elif isinstance(value, OrderedDict):
            conversion = "`collections.OrderedDict(value)`"
        elif isinstance(value, dict):
            conversion = "`dict(value)`"
        elif isinstance(value, list):
            conversion = "`list(value)`"
        elif callable(getattr(value, "state_dict", None)):
            conversion = "`value.state_dict()`"
        else:
            plain = next((base for base in (int, float, str, bytes) if isinstance(value, base)), None)
            conversion = f"`{plain.__name__}(value)`" if plain else "its parts as dicts, lists, tensors and plain values"
    return (
        f"is a {name}, which a state can't hold; expected a tensor, None, bool, int, float, str, bytes, or exactly a "
        f"dict, OrderedDict, list or tuple: store {conversion}"
    )
