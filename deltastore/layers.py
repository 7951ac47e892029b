"""Tensors by layer: how large each layer is, and which share of it changed, between two versions or along a history.

A layer is the first parts of a tensor's name, without the last one: "model.layers.11" of "model.layers.11.mlp.weight" at
depth 3.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltastore.chunk_reader import ChunkReader
from deltastore.delta_counts import quick_diff
from deltastore.diff import Diff, run_diff
from deltastore.errors import RevisionNotFoundError
from deltastore.history import Commit
from deltastore.progress import Done
from deltastore.versions import Version, Versions

MAX_LAYERS = 40  # the depth is chosen so that there are no more, where that is possible

_NUMBER = re.compile(r"\d{1,18}")

NamedElements = Sequence[tuple[str, int]]  # names of tensors and how many elements they have


@dataclass(frozen=True, slots=True)
class LayerChange:
    """How much of a layer changed.

    Attributes:
        changed_elements: elements that differ; all of a tensor that is new, gone or of another dtype or shape.
        elements: all elements of the layer after the change, and those of tensors that are gone.
        changed_bytes: raw bytes of the chunks that differ.
        tensors: how many tensors differ.
    """

    name: str
    changed_elements: int
    elements: int
    changed_bytes: int
    tensors: int

    @property
    def share(self) -> float:
        """Changed elements of all, 0 to 1."""
        return self.changed_elements / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """Changed shares along a history.

    Attributes:
        layers: names, in the order of the newest version.
        commits: oldest first, without those that have no parent to compare with.
        shares: `shares[layer][commit]`, 0 to 1; None where the commit has no such layer.
        complete: False when time ran out before the oldest commit that was asked for.
    """

    layers: tuple[str, ...]
    commits: tuple[Commit, ...]
    shares: tuple[tuple[float | None, ...], ...]
    complete: bool


def layer_of(name: str, depth: int) -> str:
    """The layer that a tensor belongs to."""
    parts = name.split(".")
    return ".".join(parts[: max(1, min(depth, len(parts) - 1))])


def choose_depth(names: Iterable[str], limit: int = MAX_LAYERS) -> int:
    """The largest depth that gives at most `limit` layers; 1 when even that gives more."""
    names = list(names)
    deepest = max((name.count(".") for name in names), default=1)
    depth = 1
    while depth < deepest and len({layer_of(name, depth + 1) for name in names}) <= limit:
        depth += 1
    return depth


def named_elements(version: Version) -> NamedElements:
    """Every tensor of a version, tied ones under each of their names."""
    leaves = zip(version.names, version.leaves, strict=True)
    return [(name, version.tensors[number].elements) for name, (_, number) in leaves]


def named_bytes(version: Version) -> list[tuple[str, int]]:
    """Every tensor of a version with its bytes, tied ones once."""
    found: dict[int, tuple[str, int]] = {}
    for name, (_, number) in zip(version.names, version.leaves, strict=True):
        found.setdefault(number, (name, version.tensors[number].nbytes))
    return list(found.values())


def layer_sizes(tensors: Iterable[tuple[str, int]], depth: int) -> dict[str, int]:
    """Sums of (name, figure) by layer.

    In order of appearance, numbered layers by number: files list tensors by name, so "layers.10" would come before "layers.2".
    """
    sizes: dict[str, int] = {}
    for name, figure in tensors:
        layer = layer_of(name, depth)
        sizes[layer] = sizes.get(layer, 0) + figure
    first: dict[str, int] = {}
    for at, layer in enumerate(sizes):
        first.setdefault(_NUMBER.sub("#", layer), at)
    return {layer: sizes[layer] for layer in sorted(sizes, key=lambda each: (first[_NUMBER.sub("#", each)], _numbers(each)))}


def _numbers(layer: str) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(layer)]


def layer_changes(diff: Diff, after: NamedElements, depth: int | None = None) -> list[LayerChange]:
    """The layers that a difference touches, in the order of the tensors. `after` are all tensors of its second version."""
    gone = [(each.name, each.elements) for each in diff.tensors if each.status == "removed"]
    everything = [*after, *gone]
    depth = choose_depth(name for name, _ in everything) if depth is None else depth
    elements = layer_sizes(everything, depth)
    changed = layer_sizes(
        ((each.name, each.elements if each.changed_elements is None else each.changed_elements) for each in diff.tensors), depth
    )
    size = layer_sizes(((each.name, each.changed_bytes) for each in diff.tensors), depth)
    count = layer_sizes(((each.name, 1) for each in diff.tensors), depth)
    return [LayerChange(name, changed[name], elements[name], size[name], count[name]) for name in elements if name in changed]


def run_layer_history(
    reader: ChunkReader,
    versions: Versions,
    commits: Sequence[Commit],
    *,
    depth: int | None = None,
    seconds: float = 60,
    progress: Done | None = None,
) -> LayerHistory:
    """Compare each of some commits, newest first, with its first parent.

    Most commits tell by the head of their deltas how much they changed; of the others the chunks that changed are read. It
    begins with the newest commit and goes no further back than it gets in `seconds`.
    """
    deadline = time.monotonic() + seconds
    rows: list[tuple[Commit, dict[str, LayerChange], dict[str, int]]] = []
    complete = True
    for commit in commits:
        if not commit.parents:
            continue
        if rows and time.monotonic() > deadline:
            complete = False
            break
        after = versions.get(commit.id)
        try:
            before = versions.get(commit.parents[0])
        except RevisionNotFoundError:  # forgotten, with all before it
            break
        tensors = named_elements(after)
        depth = choose_depth(name for name, _ in tensors) if depth is None else depth
        parent = Commit.from_identity(commit.parents[0], before.document.identity)
        sides = (parent, before), (commit, after)
        diff = quick_diff(reader, *sides)
        if diff is None:
            diff = run_diff(reader, *sides)
        rows.append((commit, {each.name: each for each in layer_changes(diff, tensors, depth)}, layer_sizes(tensors, depth)))
        if progress is not None:
            progress(1)
    layers = list(dict.fromkeys(layer for _, _, sizes in rows for layer in sizes))
    rows.reverse()
    shares = tuple(
        tuple(changes[layer].share if layer in changes else 0.0 if layer in sizes else None for _, changes, sizes in rows)
        for layer in layers
    )
    return LayerHistory(tuple(layers), tuple(commit for commit, _, _ in rows), shares, complete)
