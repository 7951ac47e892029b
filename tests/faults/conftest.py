from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("store_checks")

from moments import Moments  # noqa: E402
from warm_process import WarmProcess  # noqa: E402


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder for stores, in memory where the system has one: a killed process leaves the same on both."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="deltastore-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    """A process to fork from."""
    with WarmProcess() as process:
        yield process


@pytest.fixture(scope="session")
def warm_above_shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """A process to fork from, with `kill_shim.c` between it and the C library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    library = tmp_path_factory.mktemp("shim") / "kill_shim.so"
    source = Path(__file__).with_name("kill_shim.c")
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source, "-o", library, "-ldl"],
        check=True,
    )
    with WarmProcess({"LD_PRELOAD": str(library)}) as process:
        yield process


@pytest.fixture
def moments() -> Iterator[Moments]:
    """Stores that the test opens can be held, and made to fail, at chosen operations."""
    found = Moments()
    with found.installed():
        yield found
