"""What a version is loaded into: the live tensors, plain values and objects of a module or a nested state.

A module is its tensors, which are filled in place; optimizers and other objects stay whole, and take their part of the state
in their own way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltastore import subclasses
from deltastore.errors import IncompatibleStateError
from deltastore.live_objects import is_module, is_optimizer, state_of
from deltastore.state import RECIPE, Path, describe_path, is_within, leaf_paths, path_name
from deltastore.storable import storage_pointer, tie_key, why_not_stored, why_not_written
from deltastore.tensors import flatten_tensors
from deltastore.torch_import import import_torch

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor leaf that is loaded into; leaves with the same `tie` are one tensor."""

    path: Path
    name: str
    tensor: Any
    tie: int


@dataclass(frozen=True, slots=True)
class TargetValue:
    """A plain value; `fixed` when nobody can put another one into its place, because an object made a copy of it."""

    path: Path
    name: str
    value: Any
    fixed: bool


@dataclass(frozen=True, slots=True)
class TargetObject:
    """An object that takes its part of the state as a whole."""

    path: Path
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """How a tensor subclass is put together. It can't be changed, only its inner tensors can."""

    path: Path
    name: str
    recipe: Any


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything in a target, in order."""

    tensors: list[TargetTensor]
    values: list[TargetValue]
    objects: list[TargetObject]
    recipes: list[TargetRecipe]


class ExtraState:
    """What a module keeps by `set_extra_state`, as an object with `load_state_dict`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def load_state_dict(self, state: Any) -> None:
        """Hand the state over."""
        self._module.set_extra_state(state)


class _Explorer:
    def __init__(self) -> None:
        self.torch = import_torch()
        self.objects: list[TargetObject] = []
        self.recipes: list[TargetRecipe] = []
        self.copied: set[Path] = set()  # containers that were made for this survey: what is put there would be lost
        self.owned: list[tuple[Path, set[int], set[int]]] = []  # of each module, ids and storages of its tensors

    def expand(self, value: Any, path: Path) -> Any:
        """What stands for a value: the tensors of a module, the parts of a subclass, nothing for other objects."""
        if isinstance(value, self.torch.Tensor):
            if not subclasses.flattens(value):
                return value
            self.copied.add(path)
            parts = subclasses.parts_of(value, path)
            self.recipes.append(TargetRecipe(path, path_name(path), parts[RECIPE]))
            return parts
        if is_module(value):
            self.copied.add(path)
            return self._module(value, path)
        if type(value) is Counter:
            return state_of(value)
        if not is_optimizer(value):
            if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
                return value  # refused as any other stranger
            if not callable(getattr(value, "load_state_dict", None)):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                raise IncompatibleStateError(
                    f"{describe_path(path)} is a {kind}, which has no load_state_dict; leave it out and use `snapshot.state()`"
                )
        self.objects.append(TargetObject(path, path_name(path), value))
        return {}

    def _module(self, module: Any, path: Path) -> Any:
        state = state_of(module)
        for key in [key for key in state if type(key) is str and key.rpartition(".")[2] == _EXTRA_STATE]:
            try:
                owner = module.get_submodule(key.rpartition(".")[0])
            except AttributeError:
                continue  # a hook has renamed it
            del state[key]
            self.objects.append(TargetObject((*path, key), path_name((*path, key)), ExtraState(owner)))
        live = [*module.parameters(), *module.buffers()]
        storages = {storage_pointer(tensor) for tensor in live if why_not_stored(tensor) is None}
        self.owned.append((path, {id(tensor) for tensor in live}, storages))
        return state

    def why_lost(self, path: Path, tensor: Any) -> str | None:
        """Why values put into a tensor would not reach the module that gave it."""
        if not tensor.numel():
            return None
        for root, ids, storages in self.owned:
            inside = path[: len(root)] == root and not is_within(path, self.copied, longer_than=len(root))
            if inside and id(tensor) not in ids and storage_pointer(tensor) not in storages:
                return "is a copy made by `state_dict()`; use `module.load_state_dict(snapshot.state())`"
        return None


def survey(target: Any) -> Survey:
    """Look at a module, another live object or a nested state that is loaded into. Changes nothing.

    Raises IncompatibleStateError naming all that can't be written to, and what a module only makes a copy of.
    """
    explorer = _Explorer()
    flat = flatten_tensors(target, "loaded into", tie_key, explorer.expand)
    tensors = []
    for path, index in flat.leaves:
        tensor = flat.tensors[index]
        problem = why_not_written(tensor) or explorer.why_lost(path, tensor)
        if problem is not None:
            raise IncompatibleStateError(f"{describe_path(path)} {problem}")
        tensors.append(TargetTensor(path, path_name(path), tensor, index))
    values = [
        TargetValue(path, path_name(path), flat.values[number], _is_fixed(target, path, explorer.copied))
        for path, number in leaf_paths(flat.tree, "v")
        if RECIPE not in path
    ]
    return Survey(tensors, values, explorer.objects, explorer.recipes)


def _is_fixed(target: Any, path: Path, copied: set[Path]) -> bool:
    """Whether no dict or list of the caller holds this value, directly or in tuples."""
    if is_within(path, copied):
        return True
    return all(type(holder) is tuple for holder in _holders(target, path))


def _holders(target: Any, path: Path) -> Iterator[Any]:
    for key in path:
        yield target
        target = target[key]


def replace_value(target: Any, path: Path, value: Any) -> None:
    """Put a plain value into its place; a tuple is made anew in the dict or list that holds it."""
    holder = list(_holders(target, path))[-1]
    last: Any = path[-1]
    if type(holder) is tuple:
        replace_value(target, path[:-1], (*holder[:last], value, *holder[last + 1 :]))
    else:
        holder[last] = value
