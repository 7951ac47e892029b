"""Objects that are part of a state while they live: modules, optimizers, schedulers and whatever else has a `state_dict()`."""

from __future__ import annotations

import sys
from typing import Any

from deltastore.state import Path


def state_of(value: Any, _path: Path = ()) -> Any:
    """What stands for a live object in a state: its `state_dict()`; any other value itself.

    A module gives its parameters themselves (`keep_vars`), so that it can be seen which of them are trained.
    """
    if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
        return value
    return value.state_dict(keep_vars=True) if is_module(value) else value.state_dict()


def is_module(value: Any) -> bool:
    """Whether a value is a torch module; looks without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Whether a value is a torch optimizer; looks without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)
