"""What tests want from a commit that independent_reader has read: nested states, plain values and files."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from independent_reader import Commit, Store, parse

Content = tuple[str, tuple[int, ...], bytes]  # dtype, shape and bytes of a tensor


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


def state_of(commit: Commit) -> Any:
    """The nested state, with the contents of its tensors in their places."""

    def leaf(_: str, kind: str, number: int) -> Any:
        return commit.read(number) if kind == "x" else unpack(commit.values[number])

    return build(commit.structure["tree"], leaf)


def values_of(commit: Commit) -> dict[str, Any]:
    """Name -> plain value."""
    found: dict[str, Any] = {}
    build(
        commit.structure["tree"],
        lambda name, kind, number: found.update({name: unpack(commit.values[number])} if kind == "v" else {}),
    )
    return found


def tensors_of(commit: Commit) -> dict[str, Content]:
    return {name: commit.read(number) for name, number in commit.names.items()}


def files_of(commit: Commit) -> dict[str, bytes]:
    return {name: each if isinstance(each, bytes) else commit.read(each)[2] for name, each in commit.files.items()}


def check_snapshots(store: Store) -> int:
    """Checks that each snapshot has the refs of the log up to its seq; how many there are."""
    snapshots = sorted(store.root.glob("refs/snapshot/*/*.json"))
    for path in snapshots:
        snapshot = parse(path.read_bytes(), "snapshot", "epoch seq previous refs commits")
        refs = {ref["name"]: (ref["kind"], ref["commit"]) for ref in snapshot["refs"]}
        assert refs == store.history[snapshot["seq"] - 1], f"{path} has other refs than the log before it"
        assert path.stem == f"{snapshot['seq']:012}", f"{path} stands for seq {snapshot['seq']}"
    return len(snapshots)
