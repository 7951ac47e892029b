"""The demo: fine-tune a real model, commit every optimizer step, get any of them back bit for bit.

Run it with `make demo`, or `python -m benchmarks.demo --steps 64 --folder PLACE`. Prints one row per commit and draws
cumulative bytes against full copies into docs/images/demo.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import torch

from benchmarks.store_files import index_bytes, object_bytes
from benchmarks.training import FineTuning, Weights, model_folder
from deltastore import DeltaStore

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = ROOT / ".cache" / "demo"
PICTURE = ROOT / "docs" / "images" / "demo.png"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
MB = 1e6


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit code is 1 when a version comes back different."""
    parser = argparse.ArgumentParser(prog="make demo", description="Fine-tune MiniLM and commit every step.")
    parser.add_argument("--steps", type=int, default=64, help="optimizer steps to commit (default 64)")
    parser.add_argument("--lr", type=float, default=3e-6, help="learning rate (default 3e-6)")
    parser.add_argument("--folder", type=Path, help="where the store goes; must be new (default .cache/demo, replaced)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the picture goes")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    if options.folder is None:
        shutil.rmtree(DEFAULT_FOLDER, ignore_errors=True)
        options.folder = DEFAULT_FOLDER
    elif options.folder.exists():
        parser.error(f"{options.folder} exists; name a new folder")

    started = time.perf_counter()
    print("Loading MiniLM (22.7 million parameters) and warming up AdamW on fp32 masters ...", flush=True)
    training = FineTuning(lr=options.lr)
    sizes, kept = commit_steps(training, options.folder, options.steps)
    exact = prove(options.folder, kept)
    draw(options.picture, sizes, full_copy_bytes(kept))
    print_closing(options, sizes, full_copy_bytes(kept), time.perf_counter() - started)
    return 0 if exact else 1


def commit_steps(training: FineTuning, folder: Path, steps: int) -> tuple[list[int], dict[int, Weights]]:
    """Train and commit. Returns the stored bytes after each commit, and private copies of some versions by step."""
    files = {name: model_folder() / name for name in TOKENIZER_FILES}
    kept: dict[int, Weights] = {}
    sizes: list[int] = []
    before: Weights | None = None
    loss = 0.0
    print(f"\n{'step':>5} {'loss':>7} {'changed':>9} {'bytes stored':>13} {'of a full copy':>15} {'seconds':>8}")
    with DeltaStore.create(folder) as store:
        for step in range(steps + 1):
            if step:
                loss = training.step()
            version = training.weights(torch.bfloat16)  # only to check against: commit() does its own cast
            start = time.perf_counter()
            store.commit(
                training.model,
                f"step {step}",
                metadata={"step": step, "loss": loss},
                cast={"*": torch.bfloat16},
                files=files,
            )
            seconds = time.perf_counter() - start
            sizes.append(object_bytes(folder))
            added = sizes[-1] - (sizes[-2] if step else 0)
            full = sum(value.nbytes for value in version.values())
            changed = f"{100 * changed_share(before, version):.2f} %" if before is not None else "all"
            shown = f"{loss:7.3f}" if step else f"{'':>7}"
            print(f"{step:5} {shown} {changed:>9} {added:13,} {100 * added / full:13.2f} % {seconds:8.3f}", flush=True)
            if step in (0, steps // 2, steps):
                kept[step] = version
            before = version
    return sizes, kept


def full_copy_bytes(kept: dict[int, Weights]) -> int:
    """Bytes of one version, written whole."""
    return sum(value.nbytes for value in kept[0].values())


def changed_share(before: Weights, after: Weights) -> float:
    """The share of values whose bits differ."""
    changed = sum(int((before[name].view(torch.int16) != after[name].view(torch.int16)).sum()) for name in after)
    return float(changed / sum(value.numel() for value in after.values()))


def prove(folder: Path, kept: dict[int, Weights]) -> bool:
    """Open the store anew and compare versions with the private copies, as integers."""
    print("\nOpening the store anew:")
    exact = True
    with DeltaStore(folder, trust="none") as store:
        for step, expected in kept.items():
            start = time.perf_counter()
            found = store.checkout(f"main@{{step={step}}}").load()
            seconds = time.perf_counter() - start
            same = found.keys() == expected.keys() and all(
                found[name].dtype == value.dtype and torch.equal(found[name].view(torch.int16), value.view(torch.int16))
                for name, value in expected.items()
            )
            exact = exact and same
            print(f"  step {step:3}: {'bit-exact' if same else 'DIFFERENT'}, loaded in {seconds:.2f} s")
    return exact


def draw(path: Path, sizes: list[int], full: int) -> None:
    """Cumulative bytes of the store and of full copies, over the commits."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = list(range(len(sizes)))
    copies = [full * (step + 1) / MB for step in steps]
    stored = [size / MB for size in sizes]
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=144, layout="constrained")
    for values, color, label in ((copies, "#8a8f98", "full copies"), (stored, "#1f6feb", "deltastore")):
        axes.plot(steps, values, color=color, linewidth=2.2)
        axes.annotate(
            f"{label}\n{values[-1]:,.0f} MB",
            (steps[-1], values[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            color=color,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_yscale("log")
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(bottom=min(stored[0], copies[0]) / 2, top=copies[-1] * 2)
    axes.set_xlabel("committed optimizer steps")
    axes.set_ylabel("cumulative MB (log scale)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(
        f"{steps[-1]} steps of fine-tuning MiniLM in bf16: {copies[-1] / stored[-1]:.0f} times smaller, bit for bit",
        loc="left",
        fontsize=11,
    )
    axes.grid(True, which="major", axis="y", color="#e5e7eb")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def print_closing(options: argparse.Namespace, sizes: list[int], full: int, seconds: float) -> None:
    """Totals and what to try next."""
    copies = full * len(sizes)
    steps = (sizes[-1] - sizes[0]) / (len(sizes) - 1)
    print(
        f"\n{len(sizes)} versions: {sizes[-1] / MB:,.1f} MB stored, {copies / MB:,.0f} MB as full copies "
        f"({copies / sizes[-1]:.0f} times smaller)."
        f"\nThe first took {sizes[0] / full:.1%} of a full copy, each further one {steps / full:.2%} on average."
        f"\nBeside them lies the SQL index with {index_bytes(options.folder) / MB:.1f} MB."
        f"\nAll took {seconds:.0f} s, most of it training."
    )
    store = _shown(options.folder)
    tool = _shown(Path(sys.executable).parent / "deltastore")
    print(f"\nstore    {store}\npicture  {_shown(options.picture)}")
    print(f"try      {tool} -s {store} log main\n         {tool} -s {store} diff main~1 main")


def _shown(path: Path) -> str:
    """A path relative to where the user is, if it lies there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


if __name__ == "__main__":
    raise SystemExit(main())
