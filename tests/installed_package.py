"""Uses an installed deltastore from the outside, as its first user would: by its command and without torch.

    python -I tests/installed_package.py [--kernel native|numpy] [--without-torch] [--checkpoint FOLDER]

Makes a store, commits two versions of a checkpoint, looks at everything there is to look at, and gets both versions back byte
for byte. `-I` keeps the checkout out of the way. Run by tests/test_package.py, by .ci/run, and by cibuildwheel on every wheel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

COMMAND = Path(sysconfig.get_path("scripts")) / "deltastore"


def main() -> int:
    """Run all; the first thing that is not as it should be ends it with an AssertionError."""
    parser = argparse.ArgumentParser(description="Check an installed deltastore.")
    parser.add_argument("--kernel", choices=("native", "numpy"), help="the kernel that must be in use")
    parser.add_argument("--without-torch", action="store_true", help="fail when torch is installed")
    parser.add_argument("--checkpoint", type=Path, help="the folder to commit (default: a small one is made)")
    options = parser.parse_args()

    import deltastore
    from deltastore.codecs.kernel import NAME

    check(options.kernel in (None, NAME), f"the kernel is {NAME}, expected {options.kernel}")
    if options.without_torch:
        check(importlib.util.find_spec("torch") is None, "torch is installed")
    package = Path(deltastore.__file__).resolve().parent
    check(package.is_relative_to(Path(sysconfig.get_path("platlib")).resolve()), f"{package} is no installed package")
    for part in ("_migrations/versions/0001_initial.py", "_schemas/v1/commit.schema.json", "py.typed"):
        check((package / part).is_file(), f"{part} is missing from {package}")
    with tempfile.TemporaryDirectory() as folder:
        use(Path(folder), options.checkpoint)
        if options.without_torch:
            ask_for_tensors(Path(folder) / "store")
    print(f"deltastore {deltastore.__version__} with the {NAME} kernel works")
    return 0


def use(folder: Path, checkpoint: Path | None) -> None:
    """Every command that a checkpoint needs, in a new folder."""
    first = load_file(checkpoint / "model.safetensors") if checkpoint else small_model()
    second = {name: value.copy() for name, value in first.items()}
    changed = next(value for value in second.values() if value.dtype == np.float32)
    changed.reshape(-1)[::97] += 1
    store = folder / "store"
    run(store, "init", store)
    for step, tensors in enumerate((first, second)):
        source = folder / f"step-{step}"
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps({"step": step}))
        run(store, "commit", source, "-m", f"step {step}", "--meta", f"step={step}")
    commits = run(store, "log")
    check([commit["message"] for commit in commits] == ["step 1", "step 0"], f"unexpected log: {commits}")
    run(store, "show", "main")
    run(store, "tag", "create", "first", "main~1")
    check(len(run(store, "diff", "first", "main")["tensors"]) == 1, "one tensor differs")
    check(run(store, "verify", "--read-data")["ok"], "the store is damaged")
    check(run(store, "stats")["commits"] == 2, "two commits expected")
    run(store, "index", "status")
    upgraded = run(store, "index", "upgrade")
    check(upgraded["from"] == upgraded["to"], f"the index of a new store is current: {upgraded}")
    check(run(store, "doctor")["ok"], "the doctor found something")
    for step, tensors in enumerate((first, second)):
        target = folder / f"again-{step}"
        run(store, "checkout", f"main@{{step={step}}}", target)
        check(json.loads((target / "config.json").read_text()) == {"step": step}, "config.json came back different")
        found = load_file(target / "model.safetensors")
        check(found.keys() == tensors.keys(), "other tensors came back")
        same = all(found[name].tobytes() == value.tobytes() for name, value in tensors.items())
        check(same, f"step {step} came back different")


def ask_for_tensors(store: Path) -> None:
    """What needs torch says how to get it."""
    import deltastore

    with deltastore.DeltaStore(store, read_only=True) as opened:
        snapshot = opened.checkout("main")
        check(len(next(iter(snapshot.values())).tobytes()) > 0, "raw bytes need no torch")
        try:
            snapshot.load()
        except deltastore.DeltaStoreError as error:
            check("pip install 'deltastore[torch]'" in str(error), f"no way out in: {error}")
        else:
            raise AssertionError("tensors without torch")


def small_model() -> dict[str, np.ndarray]:
    """A few tensors of several dtypes and of more than one chunk."""
    rng = np.random.default_rng(1)
    return {
        "embed": rng.standard_normal((1200, 1000)).astype(np.float32),
        "half": rng.standard_normal(100).astype(np.float16),
        "steps": np.arange(10),
    }


def run(store: Path, *arguments: object) -> Any:
    """What a command prints as JSON."""
    line = [COMMAND, *arguments, "--json"] + (["--store", store] if arguments[0] != "init" else [])
    result = subprocess.run(list(map(str, line)), cwd=store.parent, capture_output=True, text=True, check=False)
    check(result.returncode == 0, f"{arguments[0]} exits with {result.returncode}: {result.stderr}")
    return json.loads(result.stdout)


def check(condition: object, message: str) -> None:
    """An assertion that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)


if __name__ == "__main__":
    sys.exit(main())
