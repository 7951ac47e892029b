"""The one place that imports torch: when a tensor is first at hand, never when a module is loaded."""

from __future__ import annotations

from typing import Any

from deltastore.errors import MissingDependencyError


def import_torch() -> Any:
    """The module `torch`. Raises MissingDependencyError where it is not installed."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("PyTorch is needed for tensors; run `pip install 'deltastore[torch]'`") from None
    return torch
