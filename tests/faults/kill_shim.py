"""The Python end of `kill_shim.c`, for a process that was started with it."""

from __future__ import annotations

import ctypes
import os

MODES = {"count": 0, "kill": 1, "torn": 2, "full": 3, "broken": 4}


def arm(folder: str, number: int, mode: str) -> None:
    """Count calls below a folder from now on, and act at one of them: one of MODES, see `kill_shim.c`."""
    ctypes.CDLL(None).kill_shim_arm(os.fsencode(os.path.realpath(folder)), ctypes.c_long(number), MODES[mode])


def kinds() -> str:
    """A letter for each call that was counted."""
    function = ctypes.CDLL(None).kill_shim_kinds
    function.restype = ctypes.c_char_p
    found: bytes = function()
    return found.decode()
