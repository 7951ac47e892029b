"""A warm process that forks a fresh one for each call: an interpreter with deltastore in no time.

    python child.py SOCKET      listens there; one connection is one call: a JSON line in, a JSON line back

A call is {"module": one of PROBES, "function": its name there, "arguments": {...}}; the answer is {"result": value} or
{"error": traceback}, and none at all when the process of the call died. The warm process has no threads, so a fork lacks
nothing. It ends when its standard input does, hence with whoever started it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from store_checks import assert_all_exact
from tiny_store import prepare

from deltastore import DeltaStore
from deltastore.options import LADDER_BASE

PROBES = ("tiny_store", "kill_probes", "process_probes", "disk_probes")


def main(path: str) -> None:
    """Serve calls until standard input ends."""
    probes = {name: importlib.import_module(name) for name in PROBES}
    _warm_up()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages
    threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 1
    assert threads == 1, f"{threads} threads are alive, which a fork would lose"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _answer(connection, probes)
                return
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _warm_up() -> None:
    """Do everything once, so that no fork has to import or compile it."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder, LADDER_BASE + 2)
        with DeltaStore(folder) as store:
            assert_all_exact(store)


def _answer(connection: socket.socket, probes: Mapping[str, ModuleType]) -> None:
    with connection, connection.makefile("r") as lines:
        call = json.loads(lines.readline())
        answer: dict[str, object]
        try:  # SystemExit passes: a fork that a probe makes may end that way
            answer = {"result": getattr(probes[call["module"]], call["function"])(**call["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
