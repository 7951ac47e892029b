"""Cold `load()` of a version into fresh memory, against `load_file` + `clone()` of the same tensors.

    python -m benchmarks.load_speed STORE REVISION REPEATS

Prints the median ratio of the times, reference over ours. A process of its own that lets no result go before its end: the
allocator would hand the pages of a dropped one to whoever comes next, and clearing pages is most of a copy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from deltastore import DeltaStore

ROOT = Path(__file__).resolve().parent.parent


def ratio(folder: Path, revision: str, repeats: int) -> float:
    """The median ratio, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.load_speed", str(folder), revision, str(repeats)]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def measure(folder: Path, revision: str, repeats: int) -> float:
    """The median ratio, measured in this process."""
    kept: list[dict[str, torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "reference.safetensors"
        with DeltaStore(folder) as store:  # also imports and starts all that is needed once
            kept.append(store.checkout(revision).load())
        save_file(kept[0], path)
        os.sync()
        ratios = []
        for _ in range(repeats):
            start = time.perf_counter()
            kept.append({name: value.clone() for name, value in load_file(path).items()})
            reference = time.perf_counter() - start
            with DeltaStore(folder) as store:  # opened anew: no cache of ours is warm
                start = time.perf_counter()
                kept.append(store.checkout(revision).load())
                ratios.append(reference / (time.perf_counter() - start))
    return statistics.median(ratios)


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
