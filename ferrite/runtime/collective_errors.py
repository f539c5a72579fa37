"""What failed between processes says which collective it was, and which line of the model it is from.

A collective that another process never answers fails where somebody waits for it, with the process group's own words,
which say nothing of the program.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrite.errors import layout
from ferrite.graph import ModelLine

NAMESPACES = ("_c10d_functional.", "symm_mem.")
STARTED = re.compile(r"\bop_(?:_c10d_functional|symm_mem)_(?!wait_tensor)(\w+)\(")


def is_collective(path: str) -> bool:
    """Whether an operator exchanges data with other processes, by its path."""
    return any(namespace in path for namespace in NAMESPACES)


def with_place(
    call: Callable[..., Any],
    rows: Sequence[str],
    lines: Mapping[int, ModelLine],
    namespace: Mapping[str, Any],
    noted: Callable[[int, float, float], None],
) -> Callable[..., Any]:
    """The same call, for a host program of such rows; where it fails, its row says what failed. `lines`: of the model,
    by row; `namespace`: by which the program's own frames are known; `noted`: told of each call that returns, its row
    and when it began and was over."""

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            result = call(*args, **kwargs)
            end = time.perf_counter()
            frame = sys._getframe(1)
            if frame.f_globals is namespace:
                noted(frame.f_lineno - 1, begin, end)
            return result
        except RuntimeError as problem:
            frame = sys._getframe(1)
            if frame.f_globals is not namespace:  # a program with ranges for a profiler has other rows
                raise
            place = frame.f_lineno - 1
            facts = {"collective": collective_at(rows, place), "model line": str(lines.get(place, "not known"))}
            problem.args = (layout(str(problem), facts), *problem.args[1:])
            raise

    return run


def collective_at(rows: Sequence[str], place: int) -> str:
    """The operator of the one that begins in a row, or that it waits for."""
    start = start_of(rows, place)
    return operator_in(rows[start]) if start is not None else "not known"


def operator_in(row: str) -> str:
    """What begins a collective in a row; nothing where none begins."""
    found = STARTED.search(row)
    return found[1] if found is not None else ""


def start_of(rows: Sequence[str], place: int) -> int | None:
    """The row in which the collective of a row begins, which may be that one: the last before it that has the same
    tensor."""
    waited = re.search(r"\((\w+)", rows[place])
    tensor = re.compile(rf"\b{waited[1] if waited is not None else ''}\b")
    for row in range(place, -1, -1):
        if STARTED.search(rows[row]) is not None and (row == place or tensor.search(rows[row])):
            return row
    return None
