"""A disk that can be held back, be slow or be full beneath the thread that saves; for use in a forked child."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any


class Disk:
    """Stands before every write that another thread than the main one makes.

    `reached` is set when the first comes; it waits until `go` is set (as it is with `held=False`), then `delay` seconds,
    and fails where `full` is true.
    """

    def __init__(self, *, held: bool = False, delay: float = 0.0) -> None:
        self.reached, self.go, self.delay, self.full = threading.Event(), threading.Event(), delay, False
        self.writes = 0
        if not held:
            self.go.set()
        self._write, os.writev = os.writev, self._writev

    def hold(self) -> None:
        """Hold back what comes from now on."""
        self.reached.clear()
        self.go.clear()

    def _writev(self, file: int, buffers: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            self.writes += 1
            self.reached.set()
            assert self.go.wait(200)
            time.sleep(self.delay)
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(file, buffers)
