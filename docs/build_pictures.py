"""Makes the pictures of the documentation with the commands themselves. `make pictures` runs it; it takes a few minutes.

Fine-tunes the real MiniLM for some steps, commits each from the command line, in a pseudo-terminal, and draws what was seen there
(rich renders it as SVG). The plots are those of `deltastore show --plot` and `stats --plot`.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from benchmarks.training import FineTuning, model_folder

IMAGES = Path(__file__).parent / "images"
COLUMNS = 108
STEPS = 12
TYPED = 3  # of the steps; the others are committed unseen, for the plots
KEPT_LINES = 12  # of the output of one command
MAX_BYTES = 200_000
PLOTS = {"version.png": ("show", "main"), "history.png": ("stats",)}


def main() -> int:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder)
        screen = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        type_command(screen, folder, "deltastore init runs")
        os.environ["DELTASTORE_URL"] = str(folder / "runs")
        for step in range(TYPED):
            line = f"deltastore commit step-{step} -m 'step {step}' --meta step={step} --author you"
            type_command(screen, folder, line)
        for line in ("deltastore log", "deltastore diff main~1 main --stat", "deltastore verify --read-data", "deltastore stats"):
            type_command(screen, folder, line)
        write("session.svg", svg(screen).encode())
        for step in range(TYPED, STEPS):
            in_terminal(["deltastore", "commit", f"step-{step}", "-m", f"step {step}", "--meta", f"step={step}"], folder)
        for picture, command in PLOTS.items():
            if "--plot" in in_terminal(["deltastore", command[0], "--help"], folder):
                plot(picture, command)
    return 0


def train(folder: Path) -> None:
    """A checkpoint folder per step, as a trainer would leave them."""
    import torch
    from safetensors.torch import save_file

    training = FineTuning(warmup=5)
    for step in range(STEPS):
        target = folder / f"step-{step}"
        target.mkdir()
        save_file(training.weights(torch.bfloat16), target / "model.safetensors")
        for name in ("config.json", "tokenizer.json"):
            (target / name).write_bytes((model_folder() / name).read_bytes())
        training.step()


def type_command(screen: Console, folder: Path, line: str) -> None:
    """The prompt, the command, and what it prints on a terminal."""
    screen.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
    printed = in_terminal(["bash", "-c", line], folder).splitlines()
    if len(printed) > KEPT_LINES:
        printed = [*printed[: KEPT_LINES - 1], "…"]
    for each in printed:
        screen.print(Text.from_ansi(each), highlight=False)
    screen.print()


def in_terminal(line: Sequence[str], folder: Path) -> str:
    """What a command prints to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, COLUMNS - 1))
    places = (str(Path(sys.executable).parent), os.environ["PATH"])
    environment = {**os.environ, "PATH": os.pathsep.join(places), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TZ": "UTC", "USER": "you"}
    with subprocess.Popen(line, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:  # Linux: nobody has the other end open any more
                break
    os.close(ours)
    text = seen.decode().replace("\r\n", "\n")
    if process.returncode:
        raise SystemExit(f"{line} failed with {process.returncode}:\n{text}")
    return text.replace(str(folder) + "/", "")


def svg(screen: Console) -> str:
    """The screen as SVG. Its font is whatever monospaced one the reader has: nothing is fetched from anywhere."""
    text = screen.export_svg(title="deltastore", theme=MONOKAI, unique_id="session")
    return re.sub(r"@font-face \{.*?\}", "", text, flags=re.DOTALL)


def plot(picture: str, command: tuple[str, ...]) -> None:
    """A picture by `--plot`."""
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / picture
        subprocess.run(
            [sys.executable, "-m", "deltastore", *command, "--plot", str(target)], check=True, stdout=subprocess.DEVNULL
        )
        few_colours = io.BytesIO()
        Image.open(target).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(few_colours, "png", optimize=True)
        write(picture, few_colours.getvalue())


def write(name: str, data: bytes) -> None:
    """A picture into docs/images/, unless it is too large for a page."""
    if len(data) > MAX_BYTES:
        raise SystemExit(f"{name} has {len(data)} bytes, more than {MAX_BYTES}")
    (IMAGES / name).write_bytes(data)
    print(f"{name}: {len(data)} bytes")


if __name__ == "__main__":
    sys.exit(main())
