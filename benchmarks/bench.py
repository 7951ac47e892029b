"""`make bench`: size and speed against memcpy (into touched memory), safetensors and torch.save, as ratios of one run.

    python -m benchmarks.bench [--quick] [--only NAME ...] [--folder PLACE]

Every row says what was measured, what it must be, and whether it is. Shared machines drift by tens of percent: reference and
candidate take turns, the median ratio counts. The deltas are those of real training (`benchmarks.training`); large models
are synthetic, with the same density and the same law of changes.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks import everyday, load_speed, store_files
from benchmarks.measure import Row, copy_seconds, model_bytes, seconds
from benchmarks.training import FineTuning, Weights, advance, replay, synthetic_model
from deltastore import DeltaStore

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of a run, and an empty folder to work in."""

    work: Path
    steps: int
    speed_bytes: int
    memory_bytes: int
    chunks: int
    repeats: int

    @classmethod
    def full(cls, work: Path) -> Setting:
        """The sizes of the budget."""
        return cls(work, 128, 1_000_000_000, 2_000_000_000, 6700, 5)

    @classmethod
    def quick(cls, work: Path) -> Setting:
        """About a minute."""
        return cls(work, 16, 200_000_000, 300_000_000, 1000, 3)


# -- size -------------------------------------------------------------------------------------------------------------


def payload(setting: Setting) -> Iterator[Row]:
    """Payload bytes of one step of MiniLM at lr 3e-6, per changed element: the first step, which changes about 1 %.

    Later steps change less, 0.75 % in the long run, and then each change costs more: its gap is longer.
    """
    folder = setting.work / "payload"
    with DeltaStore.create(folder) as store:
        before: Weights = {}
        known: set[str] = set()
        for step, weights in enumerate(replay(steps=7)):
            store.commit(weights, f"step {step}")
            packs = store_files.Packs(folder)
            if before and step in (1, 7):
                changed = sum(
                    int((before[name].view(torch.int16) != value.view(torch.int16)).sum()) for name, value in weights.items()
                )
                share = 100 * changed / sum(value.numel() for value in weights.values())
                cost = packs.payload_bytes(packs.names() - known, span=1) / changed
                must = ("<=", 1.22) if step == 1 else None
                yield Row(f"payload of MiniLM step {step}, bf16, lr 3e-6, {share:.2f} % changed", cost, "B/change", must)
            before, known = weights, packs.names()


def history(setting: Setting) -> Iterator[Row]:
    """Bytes added by consecutive commits in raw copies, deltas on the deepest cold path, and evenness of commit times."""
    folder = history_store(setting)
    times = [float(line) for line in (folder.parent / "history.times").read_text().split()]
    first, raw = (int(text) for text in (folder.parent / "history.sizes").read_text().split())
    added = store_files.object_bytes(folder) + store_files.index_bytes(folder) - first
    full = setting.steps == 128
    what = f"bytes added by {setting.steps} commits of MiniLM, everything counted, in raw copies"
    yield Row(what, added / raw, "copies", ("<=", 1.25) if full else None)
    yield Row("  of that the SQL index", store_files.index_bytes(folder) / raw, "copies")
    yield Row("  deltas on the deepest cold path of any version", store_files.deepest(folder), "deltas", ("<=", 15))
    evenness = max(times[1:]) / statistics.median(times[1:])
    yield Row("slowest of these commits against the median one", evenness, "times", ("<=", 3.0) if full else None)
    yield Row("  median commit() of the 45 MB", statistics.median(times[1:]), "s")


def history_store(setting: Setting) -> Path:
    """The store of `setting.steps` consecutive MiniLM commits, made once per run."""
    folder = setting.work / "history"
    if folder.exists():
        return folder
    times, first, raw = [], 0, 0
    with DeltaStore.create(folder) as store:
        for step, weights in enumerate(replay(steps=setting.steps)):
            start = time.perf_counter()
            store.commit(weights, f"step {step}", metadata={"step": step})
            times.append(time.perf_counter() - start)
            if step == 0:
                first, raw = store_files.object_bytes(folder), model_bytes(weights)
    (setting.work / "history.times").write_text("\n".join(map(str, times)))
    (setting.work / "history.sizes").write_text(f"{first} {raw}")
    return folder


def first_commit(setting: Setting) -> Iterator[Row]:
    """What the first commit of MiniLM stores, as a share of the raw bytes."""
    training = FineTuning(warmup=0)
    for dtype, must in ((torch.bfloat16, 68.5), (torch.float32, 80.5)):
        weights = training.weights(dtype)
        folder = setting.work / f"first-{dtype}"
        with DeltaStore.create(folder) as store:
            store.commit(weights, "first")
        share = 100 * store_files.object_bytes(folder) / model_bytes(weights)
        yield Row(f"first commit of MiniLM, {str(dtype).removeprefix('torch.')}", share, "% of raw", ("<=", must))


# -- speed ------------------------------------------------------------------------------------------------------------


def commit_speed(setting: Setting) -> Iterator[Row]:
    """Whole commit() of a bf16 model with 1 % changed, and of one whose parameters are frozen."""
    weights = synthetic_model(setting.speed_bytes, 64)
    size = model_bytes(weights)
    random = np.random.Generator(np.random.SFC64(1))
    ratios, saves, pickles = [], [], []
    folder = setting.work / "speed"
    with DeltaStore.create(folder) as store:
        first = seconds(lambda: store.commit(weights, "first"))
        for step in range(setting.repeats):
            advance(weights, 0.01, random)
            os.sync()
            took = seconds(lambda step=step: store.commit(weights, f"step {step}"))  # type: ignore[misc]
            ratios.append(copy_seconds(size) / took)
            saves.append(seconds(lambda: save_file(weights, setting.work / "copy.safetensors")) / took)
            pickles.append(seconds(lambda: torch.save(weights, setting.work / "copy.pt")) / took)
    label = f"{size / 1e9:.1f} GB bf16"
    yield Row(f"commit() of {label}, 1 % changed: memcpy takes", statistics.median(ratios), "of it", (">=", 0.10))
    yield Row("  safetensors save_file takes (no sync)", statistics.median(saves), "of it")
    yield Row("  torch.save takes (no sync)", statistics.median(pickles), "of it")
    yield Row("  first commit()", size / first / 1e9, "GB/s")
    (setting.work / "copy.pt").unlink()
    yield from _load_rows(setting, folder, [(f"main~{setting.repeats}", 0)], label)
    shutil.rmtree(folder)
    yield from _frozen_rows(setting, weights)


def background(setting: Setting) -> Iterator[Row]:
    """See `everyday.background`."""
    yield from everyday.background(setting.work, setting.speed_bytes, setting.repeats)


def adapters(setting: Setting) -> Iterator[Row]:
    """See `everyday.adapters`."""
    yield from everyday.adapters(setting.work, setting.speed_bytes, setting.repeats)


def imports(setting: Setting) -> Iterator[Row]:
    """See `everyday.imports`."""
    yield from everyday.imports(setting.work, 20 if setting.steps >= 20 else 6)


def _frozen_rows(setting: Setting, weights: Weights) -> Iterator[Row]:
    module = torch.nn.Module()
    for number, value in enumerate(weights.values()):
        module.register_parameter(f"weight{number}", torch.nn.Parameter(value, requires_grad=False))
    size = model_bytes(weights)
    folder = setting.work / "frozen"
    with DeltaStore.create(folder) as store:
        store.commit(module, "first")
        ratios = []
        for step in range(setting.repeats):
            took = seconds(lambda step=step: store.commit(module, f"step {step}"))  # type: ignore[misc]
            ratios.append(copy_seconds(size) / took)
    yield Row(
        f"commit() of {size / 1e9:.1f} GB of frozen parameters: memcpy takes",
        statistics.median(ratios),
        "of it",
        (">=", 0.5),
    )
    shutil.rmtree(folder)


def cold_loads(setting: Setting) -> Iterator[Row]:
    """Cold load() of MiniLM at depth 0 and at the deepest version, against load_file + clone()."""
    folder = history_store(setting)
    top = setting.steps
    deep = next(step for step in range(top, -1, -1) if _digits(step) == max(_digits(s) for s in range(top + 1)))
    yield from _load_rows(setting, folder, [(f"main~{top}", 0), (f"main~{top - deep}", _digits(deep))], "MiniLM bf16")


def _digits(height: int) -> int:
    """Sum of the digits to base eight: the deltas on the path to a version when everything changes at each step."""
    return 0 if height == 0 else height % 8 + _digits(height // 8)


def _load_rows(setting: Setting, folder: Path, revisions: list[tuple[str, int]], label: str) -> Iterator[Row]:
    for revision, depth in revisions:
        measured = load_speed.ratio(folder, revision, setting.repeats)
        must = {0: 0.7, 15: 0.35}.get(depth)
        what = f"cold load() of {label} at depth {depth}: load_file + clone() takes"
        yield Row(what, measured, "of it", None if must is None else (">=", must))


def bookkeeping(setting: Setting) -> Iterator[Row]:
    """SQL and documents of one commit with many chunks: everything after the last chunk was encoded.

    A 7B model in bf16 has 6 700 chunks in some 300 tensors. Here a chunk has 256 elements instead of 2^20 and all change at each
    commit: as many rows, pack entries and manifests, but little payload.
    """
    from deltastore import scanner, versions
    from deltastore.commit import Committer

    times: list[float] = []
    publish = Committer._publish

    def timed(self: Committer, *arguments: object) -> object:
        start = time.perf_counter()
        result = publish(self, *arguments)  # type: ignore[arg-type]
        times.append(time.perf_counter() - start)
        return result

    elements, tensors = 256, 300
    per_tensor = -(-setting.chunks // tensors)
    random = np.random.default_rng(0)
    words = random.integers(0x3C00, 0x3D00, (tensors, per_tensor * elements), dtype=np.int16)
    weights = {f"t{i:05}": torch.from_numpy(words[i]).view(torch.bfloat16) for i in range(tensors)}
    grid = scanner.CHUNK_ELEMENTS
    Committer._publish = timed  # type: ignore[method-assign,assignment]
    scanner.CHUNK_ELEMENTS = versions.CHUNK_ELEMENTS = elements
    try:
        with DeltaStore.create(setting.work / "bookkeeping") as store:
            for step in range(7):
                words[:, step::elements] += 1
                store.commit(weights, f"step {step}")
    finally:
        Committer._publish = publish  # type: ignore[method-assign]
        scanner.CHUNK_ELEMENTS = versions.CHUNK_ELEMENTS = grid
    must = ("<=", 60.0) if setting.chunks == 6700 else None
    yield Row(f"SQL + documents of a commit with {setting.chunks} chunks", 1e3 * statistics.median(times[1:]), "ms", must)


def log_command(setting: Setting) -> Iterator[Row]:
    """`deltastore log` of the MiniLM store, and whether torch was imported."""
    folder = history_store(setting)
    program = "from deltastore.cli.main import main; main()"
    command = [sys.executable, "-c", program, "-s", str(folder), "log", "main"]
    times = [seconds(lambda: _run(command)) for _ in range(setting.repeats)]
    yield Row("`deltastore log`, whole process", statistics.median(times), "s", ("<=", 0.6))
    imports = _run([command[0], "-X", "importtime", *command[1:]]).stderr
    modules = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in imports.splitlines()}
    yield Row("  torch and alembic imported by it", len(modules & {"torch", "alembic"}), "modules", ("<=", 0))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(setting: Setting) -> Iterator[Row]:
    """Rise of the peak resident memory over its value before a call, each in a fresh process.

    The tensors and the declared baseline are allowed, and a window of 256 MiB.
    """
    if not Path("/proc/self/clear_refs").exists():
        return
    size = setting.memory_bytes / MIB
    cases = (
        ("first-ram", "first commit(), baseline in RAM", size + 256),
        ("next-ram", "next commit(), 1 % changed, baseline in RAM", 256),
        ("first-none", 'first commit(), baseline="none"', 256),
        ("next-background", "commit(wait=False), 1 % changed, baseline in RAM, until it has landed", 256),
        ("next-none", 'next commit(), 1 % changed, baseline="none"', 256),
        ("load", "load() into new memory", size + 256),
        ("load-into", "load_into() an existing model", 256),
    )
    for name, what, must in cases:
        folder = setting.work / ("memory-none" if name.endswith("none") else "memory")
        if name.startswith("first"):
            shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.bench", "--probe", name]
        command += ["--folder", str(folder), "--bytes", str(setting.memory_bytes)]
        rise = float(_run(command).stdout.split()[-1])
        label = f"peak memory of {what}, {setting.memory_bytes / 1e9:.1f} GB"
        yield Row(label, rise / MIB, "MiB", ("<=", math.ceil(must)))


def probe(name: str, folder: Path, size: int) -> int:
    """One memory measurement in this process; returns the rise in bytes."""
    weights = synthetic_model(size, 64)
    baseline = "none" if name.endswith("none") else "ram"
    with DeltaStore.create(folder, exist_ok=True, baseline=baseline) as store:
        if name.startswith("first"):
            return _rise(lambda: store.commit(weights, "first"))
        if name.startswith("next"):
            store.commit(weights, "again")
            advance(weights, 0.01, np.random.Generator(np.random.SFC64(1)))
            if name.endswith("background"):
                return _rise(lambda: store.commit(weights, "next", wait=False).result())
            return _rise(lambda: store.commit(weights, "next"))
        if name == "load-into":
            return _rise(lambda: store.checkout("main").load_into(weights))
        weights.clear()
        return _rise(lambda: store.checkout("main").load())


def _rise(action: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present value
    before = _status("VmRSS")
    kept = action()
    peak = _status("VmHWM")
    del kept
    return peak - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


# -- command ----------------------------------------------------------------------------------------------------------

BENCHES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "payload": payload,
    "history": history,
    "first": first_commit,
    "load": cold_loads,
    "log": log_command,
    "bookkeeping": bookkeeping,
    "commit": commit_speed,
    "background": background,
    "adapters": adapters,
    "imports": imports,
    "memory": memory,
}


def main(arguments: list[str] | None = None) -> int:
    """Run benches and print their rows. The exit code is 0 whatever the figures are."""
    parser = argparse.ArgumentParser(prog="make bench", description="Size and speed of deltastore.")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, about a minute; some bounds don't apply")
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHES), default=list(BENCHES), help="run only these")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder; needs 8 GB)")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.probe:
        print(probe(options.probe, options.folder, options.bytes))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="deltastore-bench-", dir=options.folder) as work:
        setting = Setting.quick(Path(work)) if options.quick else Setting.full(Path(work))
        for name in options.only:
            for row in BENCHES[name](setting):
                print(row.line(), flush=True)
                rows.append(row)
    bounded = [row for row in rows if row.bound is not None]
    print(f"\n{sum(row.ok for row in bounded)} of {len(bounded)} figures are within their bounds.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
