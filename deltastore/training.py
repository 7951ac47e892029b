"""What a training loop keeps beside its model: random number generators, the trained part of a model, tensor subclasses.

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": gather_rng(), "step": step}
    store.commit(state)
    ...
    store.checkout().load_into(state)
    restore_rng(state["rng"])

Nothing here is pickled: generators are tensors and plain values.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from deltastore.errors import IncompatibleStateError, InvalidInputError
from deltastore.subclasses import register_subclass
from deltastore.torch_import import import_torch

__all__ = ["gather_rng", "register_subclass", "restore_rng", "trainable_state"]

_MERSENNE_WORDS = 624


def trainable_state(module: Any) -> dict[str, Any]:
    """{name: parameter} of the parameters with `requires_grad`: what an adapter adds to a frozen model. Tied ones come once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def gather_rng() -> dict[str, Any]:
    """The states of the random number generators of this process, as a part of a state.

    Returns:
        "python" (`random`), "numpy" (its global generator), "torch" (CPU), and under "cuda" one tensor per device number when
        CUDA is in use. A training loop with several processes commits one per rank: `{rank: gather_rng()}`.

    Raises:
        IncompatibleStateError: NumPy's global generator was replaced by something else than a Mersenne Twister.
    """
    torch = import_torch()
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise IncompatibleStateError(
            f"NumPy's global generator is a {numpy_state['bit_generator']}, expected MT19937; commit the state of your own "
            "generator as a part of the state"
        )
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = dict(enumerate(torch.cuda.get_rng_state_all()))
    return state


def restore_rng(state: Mapping[Any, Any] | None, *, rank: Any = None, strict: bool = False) -> None:
    """Set the random number generators of this process to what `gather_rng` gave.

    Args:
        state: what `gather_rng` gave; with `rank` a mapping from ranks to that.
        rank: which of several to take. One that is not there, as after a change of the number of processes, is missing.
        strict: raise for what is missing or has no place here, instead of a warning; nothing was set then.

    Raises:
        IncompatibleStateError: something is malformed; with `strict`, something is missing or left over. Names it.
    """
    torch = import_torch()
    prefix = ""
    if rank is not None:
        state, prefix = (state or {}).get(rank), f"rank {rank!r}: "
    state = state or {}
    if not isinstance(state, Mapping):
        raise InvalidInputError(f"{prefix}the state is a {type(state).__name__}; expected what gather_rng() gave")
    saved_devices = state.get("cuda") or {}
    used = torch.cuda.is_available() and (torch.cuda.is_initialized() or bool(saved_devices))
    devices = torch.cuda.device_count() if used else 0
    expected = ["python", "numpy", "torch", *(f"cuda:{number}" for number in range(devices))]
    found = [name for name in ("python", "numpy", "torch") if name in state] + [f"cuda:{number}" for number in saved_devices]
    missing = [name for name in expected if name not in found]
    surplus = [name for name in found if name not in expected]
    problems = [f"not in the saved state: {', '.join(missing)}"] * bool(missing)
    problems += [f"saved, but not here: {', '.join(surplus)}"] * bool(surplus)
    text = f"random number generators: {prefix}{'; '.join(problems)}"
    if problems and strict:
        raise IncompatibleStateError(f"{text}. Nothing was set. Seed them yourself, or use strict=False.")
    setters = _checked(state, saved_devices, devices, prefix)
    if problems:
        warnings.warn(f"{text}; these go on as they are", stacklevel=2)
    for set_generator in setters:
        set_generator()


def _checked(state: Mapping[Any, Any], saved_devices: Any, devices: int, prefix: str) -> list[Any]:
    """What sets each generator; everything has been looked at when this returns."""
    torch = import_torch()
    setters: list[Any] = []
    name = ""
    try:
        if "python" in state:
            name = "python"
            words = tuple(state[name]["words"].tolist())
            python = (int(state[name]["version"]), words, state[name]["gauss"])
            random.Random().setstate(python)
            setters.append(lambda: random.setstate(python))
        if "numpy" in state:
            name = "numpy"
            part = state[name]
            key = part["key"].cpu().numpy()
            if key.shape != (_MERSENNE_WORDS,) or (key != key.astype(np.uint32)).any():
                raise ValueError(f"its key is no {_MERSENNE_WORDS} words")
            numpy = ("MT19937", key.astype(np.uint32), int(part["position"]), int(part["has_gauss"]), float(part["gauss"]))
            np.random.RandomState().set_state(numpy)
            setters.append(lambda: np.random.set_state(numpy))
        if "torch" in state:
            name = "torch"
            cpu = state[name].cpu()
            torch.Generator().set_state(cpu)
            setters.append(lambda: torch.set_rng_state(cpu))
        for number in range(devices):
            if number in saved_devices:
                name = f"cuda:{number}"
                device = saved_devices[number].cpu()
                torch.Generator(f"cuda:{number}").set_state(device)
                setters.append(lambda number=number, device=device: torch.cuda.set_rng_state(device, number))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise IncompatibleStateError(
            f"random number generators: {prefix}the saved state of {name} can't be used: {error}; nothing was set. "
            "Expected what gather_rng() gave."
        ) from error
    return setters
