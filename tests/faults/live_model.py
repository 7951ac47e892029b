"""A small torch model with every kind of tensor, whose bits can be changed in place and taken by torch alone."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from deltastore import DeltaStore

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Bits = dict[str, tuple[str, tuple[int, ...], bytes]]


class LiveModel:
    """Tensors to commit as `state`: several dtypes, a frozen parameter, an embedding, a tied pair, two chunks, none, a scalar."""

    def __init__(self, seed: int, *, large: bool = False) -> None:
        self._chance = np.random.default_rng(seed)
        self._changes = 0
        torch.manual_seed(seed)
        embedding = torch.nn.Embedding(50, 8)
        self.state: dict[str, Any] = {
            "weight": torch.randn(40, 25).bfloat16(),
            "bias": torch.randn(300),
            "double": torch.randn(7, dtype=torch.float64),
            "codes": torch.randint(-128, 127, (500,), dtype=torch.int8),
            "embedding": embedding.weight,
            "head": embedding.weight,  # tied
            "frozen": torch.nn.Parameter(torch.randn(600).half(), requires_grad=False),
            "step": torch.tensor(0),
            "empty": torch.empty(0, 3),
        }
        if large:
            self.state["large"] = torch.zeros((1 << 20) + 100, dtype=torch.int8)  # two chunks

    def change(self) -> None:
        """Change some bits of some tensors in place."""
        self._changes += 1
        for number, (name, tensor) in enumerate(self.state.items()):
            if name in ("head", "empty") or (name == "frozen" and self._changes % 5) or (number + self._changes) % 3 == 0:
                continue
            words = tensor.detach().view(INTEGERS[tensor.itemsize]).numpy().reshape(-1)
            words[self._chance.integers(0, len(words), 1 + min(len(words) // 50, 20))] ^= 1 << (self._changes % 7)

    def bits(self) -> Bits:
        """dtype, shape and a hash of the bytes of each tensor."""
        return {name: _described(str(tensor.dtype), tensor.shape, raw(tensor)) for name, tensor in self.state.items()}


def raw(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.itemsize]).numpy().tobytes()


def stored_bits(store: DeltaStore, revision: str) -> Bits:
    """As `LiveModel.bits`, of a version, from its lazy tensors."""
    found = store.checkout(revision)
    return {name: _described(f"torch.{lazy.dtype_name}", lazy.shape, lazy.tobytes()) for name, lazy in found.items()}


def _described(dtype: str, shape: Any, data: bytes) -> tuple[str, tuple[int, ...], bytes]:
    return dtype, tuple(shape), hashlib.blake2b(data, digest_size=16).digest()
