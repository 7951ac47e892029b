"""A model small enough to be committed hundreds of times, whose every bit follows from one number: the step.

As arrays and as a safetensors file it needs no torch, so processes that use it start and fork fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CYCLE = 97  # one word in so many changes at each step

_random = np.random.default_rng(7)
_WEIGHT = _random.normal(size=4608).astype(np.float16)
_RESIDUE = np.arange(len(_WEIGHT)) % CYCLE + 1
_BIAS = _random.normal(size=16).astype(np.float32)
_FROZEN = _random.normal(size=(40, 16)).astype(np.float16)


def arrays_at(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a step: scattered changes of one unit in the last place, a part that is frozen, a counter."""
    visits = (step + CYCLE - _RESIDUE) // CYCLE
    return {
        "weight": (_WEIGHT.view(np.int16) + visits.astype(np.int16)).view(np.float16).reshape(96, 48),
        "bias": _BIAS + np.float32(step // 3),
        "frozen": _FROZEN,
        "counter": np.array(step, np.int64),
        "empty": np.empty((0, 4), np.uint8),
    }


def write_file(path: Path, step: int) -> Path:
    """The tensors of a step as a safetensors file."""
    save_file(arrays_at(step), path)
    return path


def state_at(step: int) -> dict[str, Any]:
    """The tensors of a step in torch, and a plain value."""
    import torch

    state: dict[str, Any] = {name: torch.from_numpy(array.copy()) for name, array in arrays_at(step).items()}
    return {**state, "frozen": torch.nn.Parameter(state["frozen"], requires_grad=False), "note": f"step {step}"}


def bits_at(step: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of each tensor of a step: what has to be equal."""
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays_at(step).items()}
