"""Work in a child of this process, as after a fork of the user's."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable

PATIENCE = 60  # seconds until a child is taken for hanging, and killed


def in_child(work: Callable[[], str]) -> str:
    """What some work gives in a child of this process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)  # ends the process, whatever it waits for
        try:
            os.write(writing, work().encode())
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        answer = answers.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child hung"
    return answer
