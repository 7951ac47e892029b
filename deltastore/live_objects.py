"""Objects that are part of a state while they live: modules, optimizers, schedulers and whatever else has a `state_dict()`."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from deltastore.state import Path


def state_of(value: Any, _path: Path = ()) -> Any:
    """What stands for a live object in a state: its `state_dict()`, a plain dict for a Counter; any other value itself.

    A module gives its parameters themselves (`keep_vars`), so that it can be seen which of them are trained.
    """
    if type(value) is Counter:  # the milestones of MultiStepLR
        return dict(value)
    if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
        return value
    if is_module(value):
        return value.state_dict(keep_vars=True)
    return value.state_dict()


def give_state(value: Any, state: Any) -> None:
    """Hand an object its state by `load_state_dict`; a counter that `state_of` made a dict is one again."""
    own = value.state_dict() if callable(getattr(value, "state_dict", None)) else None
    if type(state) is dict and type(own) is dict:
        state = {key: Counter(part) if type(own.get(key)) is Counter else part for key, part in state.items()}
    value.load_state_dict(state)


def is_module(value: Any) -> bool:
    """Whether a value is a torch module; looks without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Whether a value is a torch optimizer; looks without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)
