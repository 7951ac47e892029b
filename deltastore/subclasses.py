"""Tensor subclasses that are several tensors, taken apart and put together by their own `__tensor_flatten__`.

What is stored is a recipe of plain values and the inner tensors: see `state.TensorParts`. The class is named by module and
qualified name, and never imported because a stored document says so: it must have been imported already, or registered.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from deltastore.canonical import show
from deltastore.errors import FormatError, IncompatibleStateError, InvalidInputError
from deltastore.state import RECIPE, Path, TensorParts, describe_path, path_name
from deltastore.storable import known_subclass
from deltastore.torch_import import import_torch

Tensor = Any
Class = TypeVar("Class", bound=type)

_DTYPE, _SIZE = "__torch_dtype__", "__torch_size__"
_SCALARS = (type(None), bool, int, float, str, bytes)
_FIELDS = {"module": str, "qualname": str, "size": tuple, "stride": tuple}

_registered: dict[tuple[str, str], type] = {}


def register_subclass(cls: Class) -> Class:
    """Allow stored tensors to come back as this class, by its module and qualified name. Works as a decorator.

    Classes at the top level of modules that are imported already are found without it.

    Raises:
        InvalidInputError: it is no tensor class with `__tensor_flatten__` and `__tensor_unflatten__`.
    """
    if not _is_flattenable(cls):
        raise InvalidInputError(f"{cls!r} is no tensor subclass with __tensor_flatten__ and __tensor_unflatten__")
    _registered[cls.__module__, cls.__qualname__] = cls
    return cls


def _is_flattenable(kind: Any) -> bool:
    methods = ("__tensor_flatten__", "__tensor_unflatten__")
    return (
        isinstance(kind, type)
        and issubclass(kind, import_torch().Tensor)
        and known_subclass(kind) is None
        and all(callable(getattr(kind, name, None)) for name in methods)
    )


def flattens(tensor: Tensor) -> bool:
    """Whether a tensor can be stored as its inner tensors."""
    return _is_flattenable(type(tensor))


def parts_of(tensor: Tensor, path: Path) -> TensorParts:
    """Recipe and inner tensors. Raises IncompatibleStateError when the recipe is not made of plain values."""
    torch = import_torch()
    names, context = tensor.__tensor_flatten__()
    kind = type(tensor)
    recipe = {
        "module": kind.__module__,
        "qualname": kind.__qualname__,
        "size": tuple(int(n) for n in tensor.shape),
        "stride": tuple(int(n) for n in tensor.stride()),
        "context": _encoded(context, path, "context"),
    }
    inner = {name: getattr(tensor, name) for name in names}
    for name, value in inner.items():
        if type(name) is not str or name == RECIPE or not isinstance(value, torch.Tensor):
            found = f"{name!r}, a {type(value).__module__}.{type(value).__qualname__}"
            raise IncompatibleStateError(f"{describe_path(path)}: __tensor_flatten__ names {found}; expected inner tensors")
    return TensorParts({RECIPE: recipe, **inner})


def rebuild(parts: TensorParts, path: Path) -> Tensor:
    """The tensor that a recipe and its inner tensors make.

    Raises:
        IncompatibleStateError: the class is neither imported nor registered, or refuses the parts.
        FormatError: there is no recipe where one should be.
    """
    torch = import_torch()
    kind = find_class(parts, path)
    recipe = parts[RECIPE]
    inner = {name: value for name, value in parts.items() if name != RECIPE}
    context = _decoded(recipe["context"], path)
    try:
        made = kind.__tensor_unflatten__(inner, context, torch.Size(recipe["size"]), recipe["stride"])  # type: ignore[attr-defined]
    except Exception as error:
        raise IncompatibleStateError(
            f"{describe_path(path)}: {recipe['module']}.{recipe['qualname']} does not take its stored parts: {error}; "
            f"read them one by one, such as {path_name((*path, next(iter(inner), '')))!r}"
        ) from error
    return made


def find_class(parts: TensorParts, path: Path) -> type:
    """The class that a recipe names. Raises like `rebuild`."""
    recipe = parts[RECIPE]
    sound = type(recipe) is dict and recipe.keys() == {*_FIELDS, "context"}
    if not sound or not all(type(recipe[name]) is kind for name, kind in _FIELDS.items()):
        raise FormatError(f"{describe_path(path)} is no recipe of a tensor subclass: {show(recipe)}")
    if not all(type(n) is int and n >= 0 for n in (*recipe["size"], *recipe["stride"])):
        raise FormatError(f"{describe_path(path)} is no recipe of a tensor subclass: its size or stride is impossible")
    module, qualname = recipe["module"], recipe["qualname"]
    found: Any = _registered.get((module, qualname)) or sys.modules.get(module)
    for part in () if isinstance(found, type) else qualname.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None  # no getattr: that may import things
    if found is None or not _is_flattenable(found):
        names = [path_name((*path, name)) for name in parts if name != RECIPE]
        raise IncompatibleStateError(
            f"tensor {path_name(path)!r} is a {show(module)[1:-1]}.{show(qualname)[1:-1]}, which is not known here; import its "
            "module, or give the class to `deltastore.training.register_subclass`, and try again. "
            f"Its parts can be read by name: {', '.join(map(repr, names))}"
        )
    return found  # type: ignore[no-any-return]


def _encoded(value: Any, path: Path, where: str) -> Any:
    """A context as plain values; dtypes and sizes as dicts with one reserved key."""
    torch = import_torch()
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if kind is torch.Size:
        return {_SIZE: tuple(value)}
    if kind in (list, tuple):
        return kind(_encoded(item, path, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is dict and not {_DTYPE, _SIZE, RECIPE} & value.keys() and all(type(key) in _SCALARS for key in value):
        return {key: _encoded(item, path, f"{where}[{show(key)}]") for key, item in value.items()}
    raise IncompatibleStateError(
        f"{describe_path(path)}: what __tensor_flatten__ gives beside its tensors can't be stored: {where} is "
        f"{show(value)}; expected None, bool, int, float, str, bytes, tuple, list, dict, torch.dtype or torch.Size"
    )


def _decoded(value: Any, path: Path) -> Any:
    torch = import_torch()
    if type(value) in (list, tuple):
        return type(value)(_decoded(item, path) for item in value)
    if type(value) is dict:
        if value.keys() == {_SIZE}:
            if type(value[_SIZE]) is not tuple or not all(type(n) is int for n in value[_SIZE]):
                raise FormatError(f"{describe_path(path)} has a malformed recipe: {show(value[_SIZE])} is no size")
            return torch.Size(value[_SIZE])
        if value.keys() == {_DTYPE}:
            dtype = vars(torch).get(value[_DTYPE]) if type(value[_DTYPE]) is str else None
            if not isinstance(dtype, torch.dtype):
                raise IncompatibleStateError(
                    f"{describe_path(path)} needs the dtype {show(value[_DTYPE])}, which torch {torch.__version__} has not"
                )
            return dtype
        return {key: _decoded(item, path) for key, item in value.items()}
    return value
