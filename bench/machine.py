"""Numbers about a processor, tried out: kernels with other values of the fields of `ferrite.machines.Machine`.

    python -m bench.machine [--only argmax strip] [--rounds 15]

For each field, a function whose kernel the field decides about, at sizes on both sides of the border it draws. The
function is compiled with each value of the field, and runs turn by turn with one thread, whose CPU time is given: in
microseconds with the field's own value, and as a ratio to that with the others. So a field is right where no ratio is
much below 1. Where the code is the same for two values, there is no ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import ferrite
from bench.backends import empty_caches, with_own_code
from bench.kernel_text import generated
from bench.measure import interleaved, ratio
from bench.report import selected
from ferrite.schedule.cpu import CpuScheduling
from ferrite.targets.cpu import CPU

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Trial:
    """`field` of the machine, other values of it, and a function that it decides about, at some sizes."""

    field: str
    others: tuple[int, ...]
    function: Callable[..., Any]
    inputs: Callable[[int], list[torch.Tensor]]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.field


def rows(width: int) -> Callable[[int], list[torch.Tensor]]:
    return lambda count: [torch.randn(count, width)]


def table(width: int) -> Callable[[int], list[torch.Tensor]]:
    """Ids and rows, to be added to a table with a quarter as many rows."""
    return lambda count: [torch.randint(count // 4, (count,)), torch.randn(count, width)]


def added_to_table(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ids.shape[0] // 4, values.shape[1]).index_add(0, ids, values)


def by_column(x: torch.Tensor) -> torch.Tensor:
    """What a column decides alone, for every row: a sine and a cosine of it."""
    column = torch.arange(x.shape[1], dtype=torch.float32)
    return x * torch.sin(column) + torch.cos(column)


def one_addition_by_column(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(x.shape[1], dtype=torch.float32) * 0.5 + 1)


def chain(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """So many additions and products at every point."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x
        for step in range(length):
            y = y * x + step
        return y

    return function


TRIALS = (
    Trial("light_point_additions", (4, 8, 32), chain(8), rows(1024), (64,)),
    Trial("middling_point_additions", (30, 120), chain(24), rows(1024), (64,)),
    Trial("middling_point_additions", (30, 120), chain(48), rows(1024), (64,)),
    Trial("max_rows_without_tile", (16, 32, 128, 256), lambda x: x.sum(0), rows(1024), (32, 64, 128, 256)),
    Trial(
        "min_argmax_values", (128, 256, 1024, 2048), lambda x: x.argmax(1), lambda n: [torch.randn(64, n)], (512, 1024)
    ),
    Trial("min_scan_rows", (2, 1 << 20), lambda x: x.cumsum(1), rows(256), (16, 64, 512)),
    Trial("scan_rows_at_once", (1, 4), lambda x: x.cumsum(1), rows(256), (64, 512)),
    Trial("strip_vectors", (2, 8), by_column, rows(512), (64, 512)),
    Trial("min_strip_additions", (1, 1 << 20), one_addition_by_column, rows(512), (64, 512)),
    Trial("min_strip_additions", (1, 1 << 20), by_column, rows(512), (64, 512)),
    Trial("min_strip_rows", (2, 32), by_column, rows(512), (4, 8, 16)),
    Trial("min_sorted_row_elements", (8, 256), added_to_table, table(32), (4096,)),
    Trial("min_sorted_row_elements", (8, 256), added_to_table, table(64), (4096,)),
    Trial("min_sorted_row_elements", (8, 256), added_to_table, table(128), (4096,)),
    Trial("row_vectors_at_once", (4, 16), added_to_table, table(256), (4096,)),
)


def compiled(trial: Trial, inputs: list[torch.Tensor], value: int) -> tuple[Call, str]:
    """A call of the function as the machine with this value of the field has it, and its kernels."""
    machine = dataclasses.replace(CPU.scheduling.machine, **{trial.field: value})
    scheduling = CpuScheduling(machine, CPU.scheduling.unsupported)
    with generated() as kernels, mock.patch.object(CPU, "scheduling", scheduling):
        torch.compiler.reset()
        function = ferrite.compile(with_own_code(trial.function), dynamic=False)
        function(*inputs)
    return lambda: function(*inputs), "".join(sorted(kernels))


def lines(trials: Sequence[Trial], rounds: int) -> Iterator[str]:
    yield "| field | value | size | time, µs | other value: time to that |"
    yield "|---|--:|--:|--:|---|"
    for trial in trials:
        for size in trial.sizes:
            torch.manual_seed(0)
            inputs = trial.inputs(size)
            own = getattr(CPU.scheduling.machine, trial.field)
            found = {value: compiled(trial, inputs, value) for value in (own, *trial.others)}
            changed = [value for value in trial.others if found[value][1] != found[own][1]]
            calls = {str(value): found[value][0] for value in (own, *changed)}
            seconds = interleaved(calls, rounds, clock=time.thread_time)
            ratios = [(value, *ratio(seconds[str(value)], seconds[str(own)])) for value in changed]
            shown = [f"{value}: {middle:.2f} ({low:.2f} to {high:.2f})" for value, middle, low, high in ratios]
            micros = statistics.median(seconds[str(own)]) * 1e6
            yield f"| {trial.field} | {own} | {size} | {micros:.0f} | {', '.join(shown) or 'the same code'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="fields with one of these in the name")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad(), empty_caches():
        for line in lines(selected(TRIALS, lambda trial: trial.name, chosen.only), chosen.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
