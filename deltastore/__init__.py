"""deltastore: git for model weights on object storage.

from deltastore import DeltaStore

with DeltaStore.create("./runs", exist_ok=True) as store:
    store.commit(model, "step 100", metadata={"step": 100})
    weights = store.checkout("main~3").load()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltastore.diff import Diff, TensorDiff
    from deltastore.errors import DeltaStoreError
    from deltastore.history import Commit
    from deltastore.layers import LayerChange, LayerHistory
    from deltastore.pending import PendingCommit
    from deltastore.restore import Restored
    from deltastore.snapshot import LazyTensor, Snapshot
    from deltastore.stats import DiskUsage, Forecast, StoreStats, Usage
    from deltastore.store import DeltaStore, Ref
    from deltastore.verify import Problem, VerifyReport

__version__ = "0.1.0"

__all__ = [
    "Commit",
    "DeltaStore",
    "DeltaStoreError",
    "Diff",
    "DiskUsage",
    "Forecast",
    "LayerChange",
    "LayerHistory",
    "LazyTensor",
    "PendingCommit",
    "Problem",
    "Ref",
    "Restored",
    "Snapshot",
    "StoreStats",
    "TensorDiff",
    "Usage",
    "VerifyReport",
    "__version__",
]

# Imported when they are asked for (PEP 562), so that a command loads only the parts that it uses.
_HOMES = {
    "Commit": "history",
    "DeltaStore": "store",
    "DeltaStoreError": "errors",
    "Diff": "diff",
    "DiskUsage": "stats",
    "Forecast": "stats",
    "LayerChange": "layers",
    "LayerHistory": "layers",
    "LazyTensor": "snapshot",
    "PendingCommit": "pending",
    "Problem": "verify",
    "Ref": "store",
    "Restored": "restore",
    "Snapshot": "snapshot",
    "StoreStats": "stats",
    "TensorDiff": "diff",
    "Usage": "stats",
    "VerifyReport": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
