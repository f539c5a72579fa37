"""Python's garbage collector waits while ferrite compiles.

A compiler makes many objects that live, and each time their number has grown by a quarter the collector goes through
all there are in the process: with torch loaded that takes a fifth of a second, for nothing. It goes on after.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_compiling = 0
_was_on = False


@contextlib.contextmanager
def garbage_waits() -> Iterator[None]:
    """For several threads at once, and inside itself; a collector that is off stays off."""
    global _compiling, _was_on
    with _lock:
        if _compiling == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _compiling += 1
    try:
        yield
    finally:
        with _lock:
            _compiling -= 1
            if _compiling == 0 and _was_on:
                gc.enable()


def _in_child() -> None:
    """Threads that were compiling are not in the child."""
    global _compiling, _lock
    _lock = threading.Lock()
    if _compiling and _was_on:
        gc.enable()
    _compiling = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
