"""Threads that run jobs, also while the interpreter is exiting.

The executors of the standard library refuse work as soon as the main thread has ended, which is when the last commit of a
script may still be on its way. Plain non-daemon threads go on, and the interpreter waits for them; so they must end by
themselves: a group of workers lives as long as one piece of work and is then closed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

BACKGROUND_NICENESS = 10  # added to that of the process: the trainer goes first where both want a processor

P = ParamSpec("P")
R = TypeVar("R")


def run_in_thread(function: Callable[[], None], name: str, *, background: bool = False) -> threading.Thread:
    """Start a non-daemon thread.

    Args:
        background: let other threads of the process go first, where the system has a priority per thread (Linux).
    """

    def run() -> None:
        if background:
            step_back()
        function()

    thread = threading.Thread(target=run, name=name, daemon=False)
    thread.start()
    return thread


def step_back() -> None:
    """Lower the priority of the calling thread, for good."""
    if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + BACKGROUND_NICENESS  # this thread may have some already
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class Workers:
    """A few threads that take jobs in the order of `submit`. A context manager; closing waits for what was submitted."""

    def __init__(self, count: int, name: str, *, background: bool = False) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                self._threads.append(run_in_thread(self._work, f"{name}-{number}", background=background))
        except BaseException:  # no more threads, or Ctrl-C: those that have started must not wait for ever
            for _ in range(count):
                self._jobs.put(None)
            raise

    def submit(self, function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> Future[R]:
        """Queue a call; its outcome is that of the future."""
        future: Future[R] = Future()
        self._jobs.put((future, lambda: function(*arguments, **options)))
        return future

    def close(self) -> None:
        """End the threads when all jobs are done. Cancelled futures are skipped."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del job, future, call  # nothing may hold what the job held while the thread waits for the next one
