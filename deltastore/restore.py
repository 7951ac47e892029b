"""What loading a version into live objects will do: planned and checked as a whole before anything is written.

Tensors are filled in place; optimizers get missing state; other objects their whole state by `load_state_dict`; plain values
are replaced in the dicts and lists that hold them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deltastore import canonical, subclasses
from deltastore.canonical import show
from deltastore.errors import IncompatibleStateError, short_name
from deltastore.fills import Fills, Stored
from deltastore.live_objects import give_state, is_optimizer
from deltastore.optimizers import plan_optimizer
from deltastore.state import RECIPE, Path, TensorSink, is_within, leaf_paths, path_name, unflatten, walk
from deltastore.targets import Survey, TargetObject, replace_value, survey
from deltastore.versions import Version, match_leaves

_NAMED = 5  # names of each kind in one message


@dataclass(frozen=True, slots=True)
class Restored:
    """What `load_into` restored.

    Attributes:
        names: the tensors, by their names in the target; those of optimizers and other objects last.
        created: those of them that did not exist there, such as the moments of an optimizer that has not made a step.
        values: how many plain values (numbers, texts, flags) were set.
        objects: names of the optimizers, schedulers and other objects that took their part as a whole.
    """

    names: tuple[str, ...]
    created: tuple[str, ...]
    values: int
    objects: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """How many tensors were restored, tied ones counted by name."""
        return len(self.names)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What is read into which memory, what `settle` does once it is there, and what to report then."""

    sinks: list[tuple[int, TensorSink]]
    steps: list[Callable[[], None]]
    restored: Restored

    def settle(self) -> None:
        """Put everything that is no tensor filled in place where it belongs."""
        for step in self.steps:
            step()


def plan_restore(version: Version, values: Sequence[Any], target: Any, *, strict: bool, cast: bool) -> RestorePlan:
    """Plan what `load_into` does. Reads no tensor bytes, writes nothing.

    Args:
        values: the plain values of the version.
        strict: refuse a target that lacks something of the version, or has more.
        cast: convert floating values to the dtypes of the target.

    Raises:
        IncompatibleStateError: names or kinds do not match, or a shape or dtype differs.
    """
    planner = _Planner(version, values, survey(target), cast)
    planner.claim_objects()
    planner.tensors()
    planner.objects()
    planner.values_of(target)
    planner.recipes()
    planner.refuse_misfits(strict)
    return planner.plan()


class _Planner:
    def __init__(self, version: Version, values: Sequence[Any], found: Survey, cast: bool) -> None:
        self._version = version
        self._tree = version.structure.tree
        self._values = values
        self._target = found
        self._fills = Fills(version, cast=cast)
        self._steps: list[Callable[[], None]] = []  # values, optimizers
        self._last_steps: list[Callable[[], None]] = []  # what may look at them: schedulers
        self._claims: list[tuple[TargetObject, Path, Any]] = []
        self._count = 0
        self._taken: set[Path] = set()
        self._used: set[int] = set()
        self._missing: dict[str, list[str]] = {}
        self._unexpected: dict[str, list[str]] = {}

    def claim_objects(self) -> None:
        """Find the node of the tree that belongs to each object."""
        nodes = list(walk(self._tree)) if self._target.objects else []
        pairs = match_leaves(
            [(each.path, each.name) for each in self._target.objects], [(path, path_name(path)) for path, _ in nodes]
        )
        self._missing["objects"] = [each.name for at, each in enumerate(self._target.objects) if at not in pairs]
        for at, each in enumerate(self._target.objects):
            if at in pairs:
                path, node = nodes[pairs[at]]
                self._claims.append((each, path, node))
                self._taken.add(path)
                self._used.update(number for _, number in leaf_paths(node))

    def objects(self) -> None:
        """Plan for each object what it does with its node."""
        for each, path, node in self._claims:
            self._count += sum(RECIPE not in below for below, _ in leaf_paths(node, "v"))
            self._object(each, path, node)

    def _object(self, each: TargetObject, path: Path, node: Any) -> None:
        stored = [Stored(number) for number in range(len(self._version.tensors))]
        if is_optimizer(each.value):
            self._steps.append(
                plan_optimizer(each.value, unflatten(node, stored, self._values, path=path), each.path, self._fills)
            )
            return
        unflatten(node, stored, self._values, _known_class, path)  # finds unknown subclasses before anything is written
        memory: list[Any] = [None] * len(stored)
        for below, number in leaf_paths(node):
            memory[number] = self._fills.create(number, path_name((*each.path, *below)))

        def load() -> None:
            state = unflatten(node, memory, self._values, subclasses.rebuild, path)
            try:
                give_state(each.value, state)
            except Exception as error:
                error.add_note(f"while {each.name!r} took its state by load_state_dict; what came before it is restored already")
                raise

        self._last_steps.append(load)

    def tensors(self) -> None:
        """Match the tensor leaves."""
        stored = [
            (path, name, number)
            for name, (path, number) in zip(self._version.names, self._version.leaves, strict=True)
            if not is_within(path, self._taken)
        ]
        targets = self._target.tensors
        pairs = match_leaves([(each.path, each.name) for each in targets], [(path, name) for path, name, _ in stored])
        matched = {at: stored[pairs[at]][2] for at in sorted(pairs)}
        filled = {targets[at].tie for at in matched}  # ties fill all their names, however they are declared
        for at, number in matched.items():
            self._fills.fill(number, targets[at].tensor, targets[at].name)
        self._used.update(matched.values())
        self._missing["tensors"] = [each.name for each in targets if each.tie not in filled]
        self._unexpected["tensors"] = [name for _, name, number in stored if number not in self._used]

    def recipes(self) -> None:
        """Tensor subclasses must be put together alike."""
        if not self._target.recipes:
            return
        nodes = [(path, dict_node["d"]) for path, dict_node in walk(self._tree) if "d" in dict_node]
        stored = [(path, pairs) for path, pairs in nodes if any(key == RECIPE for key, _ in pairs)]
        matches = match_leaves(
            [(each.path, each.name) for each in self._target.recipes], [(path, path_name(path)) for path, _ in stored]
        )
        for at, match in matches.items():
            each = self._target.recipes[at]
            recipe = unflatten(next(node for key, node in stored[match][1] if key == RECIPE), (), self._values)
            if canonical.encode(recipe) != canonical.encode(each.recipe):
                self._fills.problems.append(
                    f"{short_name(each.name)!r} is made as {show(each.recipe, 200)}, the commit has {show(recipe, 200)}"
                )

    def values_of(self, target: Any) -> None:
        """Match the plain values. Those that can't be replaced must be equal."""
        stored = [
            (path, path_name(path), number)
            for path, number in leaf_paths(self._tree, "v")
            if RECIPE not in path and not is_within(path, self._taken)
        ]
        targets = self._target.values
        pairs = match_leaves([(each.path, each.name) for each in targets], [(path, name) for path, name, _ in stored])
        self._count += len(pairs)
        for at, match in pairs.items():
            each, value = targets[at], self._values[stored[match][2]]
            if not each.fixed:
                self._steps.append(lambda path=each.path, value=value: replace_value(target, path, value))  # type: ignore[misc]
            elif canonical.encode(value) != canonical.encode(each.value):
                self._fills.problems.append(
                    f"{short_name(each.name)!r} is {show(each.value)} and can't be replaced, the commit has {show(value)}"
                )
        used = set(pairs.values())
        self._missing["values"] = [each.name for at, each in enumerate(targets) if at not in pairs]
        self._unexpected["values"] = [name for at, (_, name, _) in enumerate(stored) if at not in used]

    def refuse_misfits(self, strict: bool) -> None:
        """Raise for names that do not match, when `strict`, and for what does not fit."""
        found = f"commit {self._version.document.commit_id()[:12]} does not fit the target"
        if strict and (any(self._missing.values()) or any(self._unexpected.values())):
            parts = self._mismatches()
            raise IncompatibleStateError(
                f"{found}: {'; '.join(parts)}. Nothing was written. Use strict=False to copy what is common."
            )
        problems, hints = self._fills.problems, list(self._fills.hints)[:3]
        if problems:
            more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            advice = f"Nothing was written. {'; '.join(hints)}".strip()
            raise IncompatibleStateError(f"{found}: {'; '.join(problems[:_NAMED])}{more}. {advice}")

    def _mismatches(self) -> list[str]:
        found = self._target
        here = [*(t.name for t in found.tensors), *(v.name for v in found.values), *(each.name for each in found.objects)]
        there = [*self._version.names, *(path_name(path) for path, _ in leaf_paths(self._tree, "v"))]
        parts = [
            f"{len(names)} of the target's {kind} are not in the commit: {_listed(names, there, 'nearest in the commit')}"
            for kind, names in self._missing.items()
            if names
        ]
        parts += [
            f"{len(names)} of the commit's {kind} are not in the target: {_listed(names, here, 'nearest in the target')}"
            for kind, names in self._unexpected.items()
            if names
        ]
        return parts

    def plan(self) -> RestorePlan:
        """The finished plan."""
        names, created = tuple(self._fills.names), tuple(self._fills.created)
        restored = Restored(names, created, self._count, tuple(each.name for each, _, _ in self._claims))
        return RestorePlan(self._fills.sinks(), [*self._steps, *self._last_steps], restored)


def _known_class(parts: Any, path: Path) -> Any:
    subclasses.find_class(parts, path)
    return parts


def _listed(names: list[str], others: list[str], near_text: str) -> str:
    shown = []
    for name in names[:_NAMED]:
        near = difflib.get_close_matches(name[:200], others, n=1)
        shown.append(f"{short_name(name)!r}" + (f" ({near_text}: {short_name(near[0])!r})" if near else ""))
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")
