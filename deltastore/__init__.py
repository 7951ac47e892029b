"""deltastore: git for model weights on object storage.

from deltastore import DeltaStore

with DeltaStore.create("./runs", exist_ok=True) as store:
    store.commit(model, "step 100", metadata={"step": 100})
    weights = store.checkout("main~3").load()
"""

from deltastore.diff import Diff, TensorDiff
from deltastore.errors import DeltaStoreError
from deltastore.history import Commit
from deltastore.snapshot import LazyTensor, Snapshot
from deltastore.stats import StoreStats
from deltastore.store import DeltaStore, Ref
from deltastore.verify import Problem, VerifyReport

__version__ = "0.1.0"

__all__ = [
    "Commit",
    "DeltaStore",
    "DeltaStoreError",
    "Diff",
    "LazyTensor",
    "Problem",
    "Ref",
    "Snapshot",
    "StoreStats",
    "TensorDiff",
    "VerifyReport",
    "__version__",
]
