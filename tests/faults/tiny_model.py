"""A model small enough to be committed hundreds of times, whose every bit follows from one number: the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

CYCLE = 97  # one word in so many changes at each step

_random = np.random.default_rng(7)
_WORDS = torch.from_numpy(_random.normal(size=4608).astype(np.float32)).bfloat16().view(torch.int16).numpy()
_RESIDUE = np.arange(len(_WORDS)) % CYCLE + 1
_BIAS = _random.normal(size=16).astype(np.float32)
_FROZEN = torch.from_numpy(_random.normal(size=640).astype(np.float32)).bfloat16()


def state_at(step: int) -> dict[str, Any]:
    """The state of a step: scattered changes of one unit in the last place, a frozen part, a counter, a plain value."""
    visits = (step + CYCLE - _RESIDUE) // CYCLE
    words = torch.from_numpy(_WORDS + visits.astype(np.int16))
    return {
        "weight": words.view(torch.bfloat16).reshape(96, 48),
        "bias": torch.from_numpy(_BIAS + np.float32(step // 3)),
        "frozen": torch.nn.Parameter(_FROZEN.reshape(40, 16), requires_grad=False),
        "counter": torch.tensor(step),
        "empty": torch.empty(0, 4),
        "note": f"step {step}",
    }


def bits_of(state: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal for two states to be the same, bit for bit."""
    return {
        name: (str(value.dtype), tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }
