"""`python -m ferrite tune MODULE:CALLABLE`: measure the matrix products of a model, and keep what was found."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ferrite.cli import specs
from ferrite.cli.compile import backward, find, parse_option
from ferrite.errors import Refusal, UserError
from ferrite.targets import TuningWatcher, reason_against_measuring, watched_by, where
from ferrite.tune import Found, Problem, Record, add_to, merged_files, read_record, write

EXPLAIN = """
The record is a text: it can be read, committed, and used without measuring anything:

    torch.compile(model, backend="ferrite", options={"tuning": "record.txt"})

What the record has is not measured again, so a second run goes on where one was stopped (Ctrl-C, or --seconds). Several
processes may add to one record. The exit status is 0 if all products were measured, 1 if there was no time for some,
130 if it was stopped.

"""
STOPPED = 130  # the exit status of a process that Ctrl-C ended


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure the matrix products of a model on this GPU, and write a record",
        description="Compile MODULE:CALLABLE for the given arguments with max-autotune, and add what was measured to a "
        "record. CALLABLE may be a function, a module, or a class of modules that takes no arguments. Modules and "
        "arguments are moved to the GPU.",
        epilog=EXPLAIN + (specs.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="MODULE:CALLABLE", nargs="?", help="package.module:name, or file.py:name")
    parser.add_argument("arguments", metavar="ARG", nargs="*", help="bf16[8,16], i64[4]<100, 3, None, ...")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the record to write, or to add to")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so many seconds")
    parser.add_argument("--train", action="store_true", help="also the products of the backward graph")
    parser.add_argument("--device", default="cuda", help="where modules and arguments are moved to (default: cuda)")
    parser.add_argument("--dtype", choices=[*specs.DTYPES], help="what a module is converted to, such as bf16")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any option of a compile")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RECORD", help="write one record of several instead")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.output is None:
        raise UserError("there is no file to write to", {"expected": "--output record.txt"})
    if (chosen.merge is None) == (chosen.target is None):
        raise UserError("cannot tell what to do", {"expected": "either MODULE:CALLABLE and arguments, or --merge A B"})
    return merge(chosen) if chosen.merge is not None else tune(chosen)


def merge(chosen: argparse.Namespace) -> int:
    merged = merged_files(chosen.merge)
    if isinstance(merged, Refusal):
        raise UserError("these records cannot be one", {"because": merged.reason})
    write(chosen.output, str(merged))
    print(f"{chosen.output}: {counted(len(merged.products))} of {len(chosen.merge)} records")
    return 0


def tune(chosen: argparse.Namespace) -> int:
    if (refusal := reason_against_measuring()) is not None:
        raise UserError("nothing can be measured here", {"because": refusal.reason})
    examine(chosen.output)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    watcher = TuningProgress(progress, time.monotonic() + chosen.seconds)
    stopped = False
    with progress, watched_by(watcher):
        try:
            compile_and_run(chosen)
        except KeyboardInterrupt:
            stopped = True
    report(watcher, chosen.output, stopped)
    return STOPPED if stopped else 1 if watcher.not_measured else 0


def examine(path: Path) -> None:
    """A record that nothing could be added to is told of before hours of measuring."""
    before = read_record(path) if path.exists() else Record(where())
    refusal = before if isinstance(before, Refusal) else before.reason_against(where())
    if refusal is None:
        saved = add_to(path, Record(where()))
        refusal = saved if isinstance(saved, Refusal) else None
    if refusal is not None:
        facts = {"file": str(path), "because": refusal.reason, "what to do": "name another file with --output"}
        raise UserError("nothing can be added to this record", facts)


def compile_and_run(chosen: argparse.Namespace) -> None:
    """As a user would, but for what was compiled before: a graph that is found in a cache is not measured."""
    import ferrite

    function = find(chosen.target)
    settings = dict(parse_option(text) for text in chosen.option)
    if isinstance(function, torch.nn.Module):
        function = function.to(chosen.device, specs.DTYPES.get(chosen.dtype))
    given = [specs.parse_argument(text) for text in chosen.arguments]
    given = [each.to(chosen.device) if isinstance(each, torch.Tensor) else each for each in given]
    for each in given:
        if chosen.train and isinstance(each, torch.Tensor) and each.is_floating_point():
            each.requires_grad_()
    compiled = ferrite.compile(
        function, mode="max-autotune-no-cudagraphs", tuning=chosen.output, **{"cache": False, **settings}
    )
    with torch.set_grad_enabled(chosen.train):
        outputs = compiled(*given)
        if chosen.train:
            backward(outputs)


class TuningProgress(TuningWatcher):
    """A line that shows what is measured, and what was found so far."""

    def __init__(self, progress: Progress, until: float) -> None:
        self.progress, self.until = progress, until
        self.found: dict[Problem, Found] = {}
        self.before: dict[Problem, Found] = {}
        self.refused: set[Problem] = set()
        self.not_measured: set[Problem] = set()
        self.task = progress.add_task("compiling", total=None)

    def has_time(self) -> bool:
        return time.monotonic() < self.until

    def begins(self, problem: Problem, ways: int) -> None:
        self.progress.reset(self.task, description=str(problem), total=ways)

    def tried(self) -> None:
        self.progress.advance(self.task)

    def finished(self, problem: Problem, found: Found | None) -> None:
        if found is None:
            self.refused.add(problem)
        else:
            self.found[problem] = found
        self.progress.reset(self.task, description=f"{counted(len(self.found))} measured", total=None)

    def known(self, problem: Problem, found: Found) -> None:
        if problem not in self.found:
            self.before[problem] = found

    def left(self, problem: Problem) -> None:
        self.not_measured.add(problem)


def report(watcher: TuningProgress, path: Path, stopped: bool) -> None:
    console = Console()
    if watcher.found:
        table = Table("product", "torch, us", "ours, us", "configuration of ours")
        for problem, found in sorted(watcher.found.items(), key=str):
            table.add_row(str(problem), f"{found.torch:.1f}", f"{found.ours:.1f}", found.how)
        console.print(table)
    print(f"{path}: {counted(len(watcher.found))} measured, {len(watcher.before)} known before")
    if watcher.refused:
        print(f"{counted(len(watcher.refused))} could not be measured: too large, or no kernel of ours is right")
    if watcher.not_measured:
        print(f"{counted(len(watcher.not_measured))} left, for want of time: the same command goes on with them")
    if stopped:
        print("stopped: what was measured is in the record, and the same command goes on from there")


def counted(number: int) -> str:
    return f"{number} product{'' if number == 1 else 's'}"
