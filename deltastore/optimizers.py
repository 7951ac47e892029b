"""A torch optimizer gets its state back: existing tensors in place, missing ones made with the stored dtypes.

`Optimizer.load_state_dict` casts moments to the dtype of their parameter, so a resumed run would not equal one that was
not interrupted. Parameters are matched as torch does: by their position in the parameter groups.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from deltastore import canonical, subclasses
from deltastore.canonical import show
from deltastore.errors import IncompatibleStateError
from deltastore.fills import Fills, Stored
from deltastore.state import RECIPE, Path, TensorParts, describe_path, path_name, strip_wrapper_prefixes
from deltastore.torch_import import import_torch

Make = Callable[[Stored, str], Any]

_NO_OPTIONS = {"params", "param_names", "initial_lr"}  # keys of groups that say nothing about the kind of optimizer


def plan_optimizer(optimizer: Any, stored: Any, path: Path, fills: Fills) -> Callable[[], None]:
    """Plan what `stored`, a state with `Stored` in place of its tensors, makes of an optimizer.

    Adds its tensors to `fills`. What is returned puts tensors and plain values into place, once the bytes are there:
    afterwards the optimizer holds exactly the stored state. Options of its groups that the commit has not stay.

    Raises:
        IncompatibleStateError: this is no optimizer's state, that of another kind, or groups or parameters differ in number.
    """
    groups, saved_groups = optimizer.param_groups, _checked_groups(stored, path)
    parameters = _matched(groups, saved_groups, path)
    prefix = f"{path_name(path)}." if path else ""
    parted = _parted(groups, saved_groups)
    state: dict[Any, Any] = {}
    for index, entry in stored["state"].items():
        name = f"{prefix}state.{path_name((index,))}"
        parameter, group = parameters.get(index, (None, {}))
        owner = index if parameter is None else parameter  # torch keeps what belongs to no parameter under its own key
        existing = optimizer.state.get(owner)
        if type(entry) is not dict:
            state[owner] = _merged(entry, existing, name, fills, _maker(fills, parameter, group, ""))
            continue
        known = existing if isinstance(existing, dict) else {}
        state[owner] = {
            key: _merged(value, known.get(key), f"{name}.{path_name((key,))}", fills, _maker(fills, parameter, group, key))
            for key, value in entry.items()
        }
    options = [
        {
            key: _merged(
                value,
                None if (id(group.get(key)), key) in parted else group.get(key),
                f"{prefix}param_groups.{number}.{path_name((key,))}",
                fills,
                _maker(fills, next(iter(group["params"]), None) if saved.get("capturable") else None, saved, key),
            )
            for key, value in saved.items()
            if key != "params"
        }
        for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
    ]

    def settle() -> None:
        for owner in [owner for owner in optimizer.state if owner not in state]:
            del optimizer.state[owner]
        for owner, entry in state.items():
            live = optimizer.state.get(owner)
            if type(live) is dict and type(entry) is dict:
                live.clear()
                live.update(entry)
            else:
                optimizer.state[owner] = entry
        for group, new in zip(groups, options, strict=True):
            group.update(new)

    return settle


def _checked_groups(stored: Any, path: Path) -> list[dict[Any, Any]]:
    sound = (
        isinstance(stored, dict)
        and stored.keys() == {"state", "param_groups"}
        and isinstance(stored["state"], dict)
        and isinstance(stored["param_groups"], list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in stored["param_groups"])
    )
    if not sound:
        raise IncompatibleStateError(
            f"{describe_path(path)} is an optimizer, but the commit has something else there; expected what `state_dict()` of an "
            "optimizer gives, a dict of state and param_groups. Nothing was written."
        )
    groups: list[dict[Any, Any]] = stored["param_groups"]
    return groups


def _matched(
    groups: list[dict[str, Any]], saved_groups: list[dict[Any, Any]], path: Path
) -> dict[Any, tuple[Any, dict[Any, Any]]]:
    """Saved index -> live parameter and saved group."""
    where = describe_path(path)
    if len(groups) != len(saved_groups):
        raise IncompatibleStateError(
            f"{where} has {len(groups)} parameter groups, the commit has {len(saved_groups)}; make the optimizer with the same "
            "groups. Nothing was written."
        )
    matched: dict[Any, tuple[Any, dict[Any, Any]]] = {}
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise IncompatibleStateError(
                f"{where}: group {number} has {len(group['params'])} parameters, the commit has {len(saved['params'])}; make the "
                "optimizer with the same parameters in the same order. Nothing was written."
            )
        here, there = group.keys() - saved.keys() - _NO_OPTIONS, saved.keys() - group.keys() - _NO_OPTIONS
        if here and there:  # one of both alone is another version of torch, or a scheduler
            raise IncompatibleStateError(
                f"{where} is of another kind than the commit's: its groups have {show(sorted(map(str, here)))}, those of the "
                f"commit {show(sorted(map(str, there)))}; make the same optimizer. Nothing was written."
            )
        names, saved_names = group.get("param_names"), saved.get("param_names")
        for live, kept in zip(names, saved_names, strict=False) if names and saved_names else ():
            if strip_wrapper_prefixes(str(live)) != strip_wrapper_prefixes(str(kept)):
                raise IncompatibleStateError(
                    f"{where}: group {number} has parameter {live!r} where the commit has {kept!r}; make the optimizer with the "
                    "same parameters in the same order. Nothing was written."
                )
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            if type(index) is not int or index in matched:
                raise IncompatibleStateError(f"{where}: parameter {index!r} of the commit is no index, or comes twice")
            matched[index] = parameter, saved
    return matched


def _parted(groups: list[dict[str, Any]], saved_groups: list[dict[Any, Any]]) -> set[tuple[int, Any]]:
    """(id, key) of tensors that groups share here, such as a default `lr`, where the commit has one for each."""
    shared: dict[tuple[int, Any], set[Any]] = {}
    for group, saved in zip(groups, saved_groups, strict=True):
        for key, value in saved.items():
            if isinstance(value, Stored) and group.get(key) is not None:
                shared.setdefault((id(group[key]), key), set()).add(value.number)
    return {at for at, numbers in shared.items() if len(numbers) > 1}


def _maker(fills: Fills, parameter: Any, group: dict[Any, Any], key: Any) -> Make:
    """Makes missing state on the device of its parameter; step counters stay on the CPU where torch wants them there."""
    on_cpu = parameter is None or (key == "step" and not (group.get("capturable") or group.get("fused")))
    device = "cpu" if on_cpu else parameter.device
    return lambda stored, name: fills.create(stored.number, name, device, like=parameter)


def _merged(stored: Any, existing: Any, name: str, fills: Fills, make: Make) -> Any:
    """The stored value, with existing tensors where there are some and new ones where there are none."""
    is_tensor = isinstance(existing, import_torch().Tensor)
    if isinstance(stored, Stored):
        if not is_tensor or subclasses.flattens(existing):
            return make(stored, name)
        fills.fill(stored.number, existing, name)
        return existing
    if type(stored) is TensorParts:
        return _merged_parts(stored, existing if is_tensor and subclasses.flattens(existing) else None, name, fills, make)
    if type(stored) in (dict, OrderedDict):
        known = existing if isinstance(existing, dict) else {}
        merged = {
            key: _merged(value, known.get(key), f"{name}.{path_name((key,))}", fills, make) for key, value in stored.items()
        }
        return merged if type(stored) is dict else OrderedDict(merged)
    if type(stored) in (list, tuple):
        same = type(existing) is type(stored) and len(existing) == len(stored)
        before = existing if same else [None] * len(stored)
        return type(stored)(_merged(value, before[i], f"{name}.{i}", fills, make) for i, value in enumerate(stored))
    return stored


def _merged_parts(stored: TensorParts, existing: Any, name: str, fills: Fills, make: Make) -> Any:
    path = (name,)
    live = {} if existing is None else subclasses.parts_of(existing, path)
    if live and canonical.encode(live[RECIPE]) != canonical.encode(stored[RECIPE]):
        fills.problems.append(f"{name!r} is {show(live[RECIPE])}, the commit has {show(stored[RECIPE])}")
        return existing
    inner = {
        key: value if key == RECIPE else _merged(value, live.get(key), f"{name}.{key}", fills, make)
        for key, value in stored.items()
    }
    return subclasses.rebuild(TensorParts(inner), path) if existing is None else existing
