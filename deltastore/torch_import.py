"""The one place that imports torch: when a tensor is first at hand, never when a module is loaded."""

from __future__ import annotations

from typing import Any

from deltastore.errors import MissingDependencyError


def import_torch(purpose: str = "for tensors") -> Any:
    """The module `torch`. Raises MissingDependencyError, which says what it was needed for, where it is not installed."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(f"PyTorch is needed {purpose}; run `pip install 'deltastore[torch]'`") from None
    return torch
