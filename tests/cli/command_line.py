"""Ways to run the command line in tests, and a checkpoint to run it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from deltastore.cli.main import cli

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    @property
    def rows(self) -> list[list[str]]:
        return [line.split("\t") for line in self.out.splitlines()]


Run = Callable[..., Outcome]


def write_checkpoint(folder: Path, step: int = 0) -> Path:
    """A folder with weights that differ in a few elements from step to step, and files."""
    rng = np.random.default_rng(7)
    tensors = {
        "embed.weight": rng.standard_normal((300, 100), np.float32),
        "head.bias": np.arange(10, dtype=np.int64),
        "scale": np.array(3.5, np.float16),
    }
    tensors["embed.weight"].reshape(-1)[: 5 * step] += 1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"step": step}))
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "vocab.txt").write_bytes(b"a\nb\n" * 3000)
    return folder


def run_command(*arguments: object, typed: str | None = None) -> Outcome:
    """Run in this process, without a terminal."""
    result = CliRunner().invoke(cli, [str(each) for each in arguments], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python -m deltastore` as a process of its own; warnings are errors there, too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    environment.pop("COLUMNS", None)  # would count more than the width of a terminal
    line = [sys.executable, "-W", "error", "-m", "deltastore", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env=environment, **{**pipes, **options})


def run_process(*arguments: object, **options: Any) -> Outcome:
    """Run as a process of its own, to its end."""
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=120)
    return Outcome(process.returncode, (out or b"").decode(), (err or b"").decode())
