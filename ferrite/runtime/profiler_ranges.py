"""Names for profilers: while one runs, every call and every kernel of a host program has a range of its own.

    net.py:12  h = torch.relu(x @ w)          a line of the model, around what it became
      aten::mm                                what torch calls there
      relu_sum_1  (net.py:13  return h.sum())   a kernel, with the first line it came from

`torch.profiler` shows the ranges, and so do NVIDIA's tools under `torch.autograd.profiler.emit_nvtx()`. They cost a
call each, and kernels that otherwise run in one native call run one by one: so the program is loaded a second time,
when a profiler first looks, and only runs while one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ferrite.codegen import RunTable
from ferrite.graph import ModelLine

Run = Callable[..., int]


def text_with_ranges(text: str, lines: Iterable[int]) -> str:
    """The text of a host program, with a range around every line that comes from one of the model."""
    rows = text.split("\n")
    for place in lines:
        row = rows[place]
        indent = row[: len(row) - len(row.lstrip())]
        rows[place] = f"{indent}with line_range({place}):\n{indent}    {row.lstrip()}"
    return "\n".join(rows)


def line_ranges(lines: Mapping[int, ModelLine]) -> Callable[[int], Any]:
    names = {place: str(line) for place, line in lines.items()}
    return lambda place: torch.profiler.record_function(names[place])


def one_by_one(kernels: Sequence[tuple[str, Run]]) -> Run:
    """A run as its kernels, each in a range of its name."""

    def run(*words: Any) -> int:
        for name, kernel in kernels:
            with torch.profiler.record_function(name):
                kernel(*words)
        return 0

    return run


def in_range(name: str, run: Run) -> Run:
    """A whole run in one range: where a device starts it as one."""
    return one_by_one([(name, run)])


def labels_of(tables: Sequence[RunTable], kernels: Sequence[tuple[str, str]], in_order: bool) -> list[list[str]]:
    """For each run of a host program the names of its kernels. `kernels`: names and lines, in the order of a plan;
    unless that is also the order of the runs, kernels have no names."""
    count = sum(len(table.calls) for table in tables)
    known = in_order and len(kernels) == count
    names = [f"{name}  ({line})" if line else name for name, line in kernels] if known else ["kernel"] * count
    left = iter(names)
    return [[next(left) for _ in table.calls] for table in tables]


Ranges = Callable[[], Mapping[str, Run]]  # runs with ranges, by their names in a host program
