"""A background thread that does jobs in order, so that training does not wait for the disk."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
from collections.abc import Callable


def say(text: str) -> None:
    """One line on stderr."""
    print(f"rollsift capture: {text}", file=sys.stderr, flush=True)


class Background:
    """At most `most` jobs wait; `waited` is for how many seconds callers did, because of that.
    `failed` counts what could not be done: it is told in a line and goes no further."""

    def __init__(self, most: int = 2) -> None:
        self.done = self.failed = 0
        self.waited = 0.0
        self._jobs: queue.Queue[tuple[str, Callable[[], object]]] = queue.Queue(most)
        self._thread: threading.Thread | None = None

    def submit(self, what: str, job: Callable[[], object]) -> None:
        """Let a job be done; where the queue is full, wait, and tell for how long."""
        if self._thread is None:
            # A daemon, so that a training process that fails ends; what waits is written first.
            atexit.register(self.flush)
            self._thread = threading.Thread(target=self._run, name="rollsift-capture", daemon=True)
            self._thread.start()
        began = time.perf_counter()
        full = self._jobs.full()
        self._jobs.put((what, job))
        if full:
            seconds = time.perf_counter() - began
            self.waited += seconds
            say(f"{what}: waited {seconds:.1f} s for earlier steps to be written")

    def flush(self) -> None:
        """Wait until all is done. A child of a fork has no thread to wait for."""
        if self._thread is not None and self._thread.is_alive():
            self._jobs.join()

    def fail(self, what: str, error: BaseException) -> None:
        """Count and tell what was not captured."""
        self.failed += 1
        say(f"{what}: not captured: {type(error).__name__}: {error}".replace("\n", r"\n"))

    def _run(self) -> None:
        while True:
            what, job = self._jobs.get()
            try:
                job()
                self.done += 1
            except BaseException as error:  # an error here must not end the thread
                self.fail(what, error)
            finally:
                self._jobs.task_done()
