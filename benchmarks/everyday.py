"""Rows of `make bench` about commits in the background, adapters on a frozen model, and imports of checkpoint folders."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.measure import Row, copy_seconds, model_bytes, seconds
from benchmarks.training import Weights, advance, replay, synthetic_model
from deltastore import DeltaStore
from deltastore.importing import plan_import, run_import

PERIOD_SECONDS = 2.0  # of a trainer that commits at each step
SIDE = 512  # of the matrices that it multiplies


def background(work: Path, size: int, rounds: int) -> Iterator[Row]:
    """What a trainer loses to `commit(wait=False)`: the call itself, and speed while the rest goes on."""
    weights = synthetic_model(size, 64)
    size = model_bytes(weights)
    random = np.random.Generator(np.random.SFC64(1))
    label = f"{size / 1e9:.1f} GB bf16, 1 % changed, one per {PERIOD_SECONDS:g} s"
    threads = torch.get_num_threads()
    with DeltaStore.create(work / "background") as store:
        store.commit(weights, "first")
        for count, whose in ((1, "a trainer with one busy thread"), (threads, f"one on all {threads} processors")):
            torch.set_num_threads(count)
            stalls, speeds = [], []
            for _ in range(rounds):
                alone = _speed(time.perf_counter() + PERIOD_SECONDS)
                busy = []
                for _ in range(3):
                    advance(weights, 0.01, random)
                    start = time.perf_counter()
                    pending = store.commit(weights, "in the background", wait=False)
                    stalls.append(time.perf_counter() - start)
                    busy.append(_speed(start + PERIOD_SECONDS))
                pending.result()
                speeds.append(statistics.mean(busy) / alone)
            bounded = count == 1
            copied = copy_seconds(size) / statistics.median(stalls)
            yield Row(
                f"stall of commit(wait=False), {label}, {whose}: memcpy takes", copied, "of it", (">=", 0.30) if bounded else None
            )
            slower = 100 * (1 - statistics.median(speeds))
            yield Row(f"  speed that {whose} loses between the calls", slower, "%", ("<=", 10.0) if bounded else None)
    torch.set_num_threads(threads)


def _speed(until: float) -> float:
    """Steps per second of a stand-in for training."""
    matrix = torch.ones(SIDE, SIDE)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() < until:
        for _ in range(5):
            matrix @ matrix
        steps += 1
    return steps / (time.perf_counter() - start)


def adapters(work: Path, size: int, rounds: int) -> Iterator[Row]:
    """A frozen model with adapters of 1 % of its size that train."""
    frozen = synthetic_model(size, 64)
    trained: Weights = synthetic_model(size // 100, 64, seed=1)
    module = torch.nn.Module()
    for number, value in enumerate(frozen.values()):
        module.register_parameter(f"weight{number}", torch.nn.Parameter(value, requires_grad=False))
    for number, value in enumerate(trained.values()):
        module.register_parameter(f"adapter{number}", torch.nn.Parameter(value))
    random = np.random.Generator(np.random.SFC64(1))
    ratios = []
    with DeltaStore.create(work / "adapters") as store:
        store.commit(module, "first")
        for step in range(rounds):
            advance(trained, 0.01, random)
            took = seconds(lambda step=step: store.commit(module, f"step {step}"))  # type: ignore[misc]
            ratios.append(min(seconds(lambda: _read(frozen)) for _ in range(3)) / took)
        copies = store._open_committer()._baseline.nbytes()
    label = f"{model_bytes(frozen) / 1e9:.1f} GB of frozen weights"
    yield Row(f"commit() of adapters on {label}: one read of these takes", statistics.median(ratios), "of it", (">=", 1.0))
    yield Row("  private copy that it keeps, of the size of the adapters", copies / model_bytes(trained), "times", ("<=", 1.0))


def imports(work: Path, count: int) -> Iterator[Row]:
    """`deltastore import` of checkpoint folders of MiniLM in bf16, against reading their files."""
    folders = [work / "checkpoints" / f"checkpoint-{step}" for step in range(count)]
    for step, weights in enumerate(replay(steps=count - 1)):
        folders[step].mkdir(parents=True)
        save_file(weights, folders[step] / "model.safetensors", {"format": "pt"})
        (folders[step] / "config.json").write_text("{}")
        (folders[step] / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [{"loss": 1.0}]}))
    label = f"{count} checkpoints of MiniLM bf16"
    reads = min(seconds(lambda: [_read_files(folder) for folder in folders]) for _ in range(3))
    with DeltaStore.create(work / "imports") as store:
        took = seconds(lambda: run_import(store, plan_import(folders)))
        again = seconds(lambda: run_import(store, plan_import(folders)))
    size = model_bytes(weights) * count
    yield Row(f"import of {label}, compared with the disk: reading the files takes", reads / took, "of it")
    yield Row("  raw bytes imported", size / took / 1e6, "MB/s")
    yield Row("  repeated, everything is there and only compared", size / again / 1e6, "MB/s")


def _read_files(folder: Path) -> int:
    """Read every byte of a folder into one small buffer."""
    buffer = bytearray(1 << 20)
    size = 0
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while part := file.readinto(buffer):
                size += part
    return size


def _read(weights: Weights) -> int:
    """Read every byte once, on one thread."""
    return sum(int(value.view(torch.int16).numpy().view(np.int64).sum()) for value in weights.values())
