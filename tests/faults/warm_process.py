"""The tests' end of `child.py`: start it, and call functions of its probes in forks of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
LANES = min(4, os.cpu_count() or 1)


class WarmProcess:
    """A child that is warmed up once; a context manager.

    Args:
        environment: variables on top of those of this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="deltastore-warm-")  # socket paths must be short
        self._socket = str(Path(self._folder.name) / "socket")
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__).with_name("child.py")), self._socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **one_thread, **(environment or {})},
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if ready != b"ready\n":
            self.close()
            raise RuntimeError(f"the warm process did not start: {ready!r}; see its standard error")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], timeout: float = 500, **arguments: Any) -> Any:
        """Run a function of its probes in a fresh fork; its exception is an AssertionError with the traceback."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(self._socket)
            request = {"module": function.__module__, "function": function.__name__, "arguments": arguments}
            connection.sendall(json.dumps(request, default=os.fspath).encode() + b"\n")
            with connection.makefile("r") as lines:
                answer = lines.readline()
        if not answer:
            raise AssertionError(f"the process that ran {function.__name__}({arguments}) died")
        content = json.loads(answer)
        if "error" in content:
            raise AssertionError(f"{function.__name__}({arguments}) failed in its process:\n{content['error']}")
        return content["result"]

    def call_all(self, function: Callable[..., Any], calls: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Run a function several times, all at once; results in the order of the calls."""
        calls = list(calls)
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda arguments: self.call(function, **arguments), calls))

    def share(self, function: Callable[..., list[Any]], moments: Sequence[Any], **arguments: Any) -> list[Any]:
        """Run a function of a list `moments` in as many processes as there are processors, each with a share of them."""
        lanes = max(1, min(len(moments), LANES))
        shares = self.call_all(function, [{**arguments, "moments": moments[lane::lanes]} for lane in range(lanes)])
        return [shares[number % lanes][number // lanes] for number in range(len(moments))]
