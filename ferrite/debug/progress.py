"""What a compile is doing, for those who wait for it: a line in a terminal, callbacks, and the logger "ferrite".

    ferrite: codegen, 31 of 64 kernels, 4.2 s  (net.py:12  x = self.block(x))

The line is there from the third second on, and is wiped away at the end. Where nobody looks (no terminal, no callback,
no logging) nothing is done. `TORCH_LOGS="+ferrite"` shows the log as it shows torch's own; so does Python's `logging`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ferrite.errors import ModelLine
from ferrite.options import Options

log = logging.getLogger("ferrite")
PATIENCE_SECONDS = 2.0  # that nobody wonders about
PERIOD_SECONDS = 0.2  # between two looks at the line
MAX_LINE_CHARACTERS = 118


@dataclass(frozen=True)
class Progress:
    """Where a compile is: its stage; in `codegen` so many kernels `done` of all that have to be made; seconds since it
    began; the first line of the model that its graph covers. The stage of the last one is "done"."""

    stage: str
    seconds: float
    done: int = 0
    kernels: int = 0
    line: ModelLine | None = None

    def __str__(self) -> str:
        made = f", {self.done} of {self.kernels} kernels" if self.kernels else ""
        return f"{self.stage}{made}, {self.seconds:.1f} s" + (f"  ({self.line})" if self.line is not None else "")


class CompilationProgress:
    """One compilation, watched from outside. What it is at is two words, written by whoever compiles."""

    def __init__(self, options: Options, line: ModelLine | None) -> None:
        self.callbacks, self.mode, self.line = options.progress_callback, options.progress, line
        self.depth, self.stage, self.made = 0, "capture", (0, 0)
        self.began = 0.0

    def now(self) -> Progress:
        return Progress(self.stage, time.perf_counter() - self.began, *self.made, self.line)

    def at(self, stage: str) -> None:
        self.stage, self.made = stage, (0, 0)
        if self.callbacks:
            self.tell()

    def back_in(self, stage: str) -> None:
        """A stage inside another one is over: no news for callbacks."""
        self.stage, self.made = stage, (0, 0)

    def kernels(self, done: int, of: int) -> None:
        self.made = done, of
        if self.callbacks:
            self.tell()

    def tell(self) -> None:
        for callback in self.callbacks:
            callback(self.now())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While something is compiled. A backward graph is compiled later than the rest, and is watched anew."""
        if self.depth:
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
            return
        self.depth, self.began = 1, time.perf_counter()
        line = TerminalLine(self) if self.mode == "on" or (self.mode == "auto" and is_terminal()) else None
        try:
            yield
        finally:
            self.depth = 0
            self.at("done")
            if line is not None:
                line.stop()


class TerminalLine:
    """A thread that writes where a compile is, once it takes long. It ends with the compile."""

    def __init__(self, watch: CompilationProgress) -> None:
        self.watch, self.over, self.width = watch, threading.Event(), 0
        self.thread = threading.Thread(target=self.run, name="ferrite progress", daemon=True)
        self.thread.start()

    def run(self) -> None:
        if self.over.wait(PATIENCE_SECONDS):
            return
        while not self.over.wait(PERIOD_SECONDS):
            self.write(f"ferrite: {self.watch.now()}"[:MAX_LINE_CHARACTERS])
        self.write("")

    def write(self, text: str) -> None:
        """Over what was there; a terminal that is gone is no reason to fail."""
        try:
            sys.stderr.write(f"\r{text:<{self.width}}" + ("" if text else "\r"))
            sys.stderr.flush()
        except (OSError, ValueError):
            self.over.set()
        self.width = len(text)

    def stop(self) -> None:
        self.over.set()
        self.thread.join()


def is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
