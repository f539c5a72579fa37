"""A compile record as a table for people."""

from __future__ import annotations

import collections
import io
import shutil
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ferrite.debug.record import CompileRecord, EagerCall, SavedValue

LINES_SHOWN = 3
NUMBERS = ["operators", "inputs", "kernels", "eager calls", "ms", "calls", "times", "values", "bytes", "in eager"]


def render(record: CompileRecord) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=shutil.get_terminal_size((110, 24)).columns, highlight=False)
    for table in (make(record) for make in TABLES):
        if table.row_count:
            console.print(table)
    if (saved := record.saved) is not None:
        values = f"{saved.values} values, {saved.inputs} of them inputs"
        console.print(f"saved for backward: {values}; {saved.bytes:,} bytes beyond the inputs")
        again = f"{len(saved.recomputed)} values; keeping them would take {saved.recomputed_bytes:,} bytes"
        console.print(f"recomputed in backward: {again}")
    return buffer.getvalue().rstrip()


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    return table


def graphs_table(record: CompileRecord) -> Table:
    """With the most bytes that each holds beyond its inputs, as planned, and as eager would."""
    columns = ("operators", "inputs", "kernels", "eager calls", "bytes", "in eager", "from", "note")
    table = new_table("graphs", "graph", *columns)
    for graph in record.graphs:
        counts = (graph.operators, len(graph.inputs), len(graph.kernels), len(graph.eager_calls))
        held = (None, None) if graph.memory is None else (graph.memory.peak, graph.memory.eager)
        row = (*map(str, counts), *map(bytes_text, held))
        table.add_row(graph.kind, *row, str(graph.line or ""), graph.failure or "")
    return table


def stages_table(record: CompileRecord) -> Table:
    table = new_table("stages", "stage", "ms")
    for stage, seconds in record.stages.items():
        table.add_row(stage, f"{seconds * 1e3:.1f}")
    return table


def rewrites_table(record: CompileRecord) -> Table:
    table = new_table("rewrites", "rule", "times")
    for rule, count in sorted(record.rewrites.items(), key=lambda item: -item[1]):
        table.add_row(rule, str(count))
    return table


def cache_table(record: CompileRecord) -> Table:
    """How often the cache had what was asked for: `ferrite.explain_cache()` says why not."""
    table = new_table("cache", "what", "result", "times")
    asked = [(each.what, each.result) for each in record.asked if each.result != "off"]
    for (what, result), times in collections.Counter(asked).items():
        table.add_row(what, result, str(times))
    return table


def bytes_text(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def partition_table(record: CompileRecord) -> Table:
    """What is kept for the backward graph and what that computes again: one row per operator, most bytes first."""
    table = new_table("for backward", "how", "operator", "values", "bytes", "from")
    saved = record.saved
    for how, values in (("saved", saved.kept), ("recomputed", saved.recomputed)) if saved is not None else ():
        groups: dict[str, list[SavedValue]] = collections.defaultdict(list)
        for value in values:
            groups[value.operator].append(value)
        for operator, members in sorted(groups.items(), key=lambda item: -sum(value.bytes for value in item[1])):
            size = sum(value.bytes for value in members)
            table.add_row(how, operator, str(len(members)), f"{size:,}", places(members))
    return table


def eager_table(record: CompileRecord) -> Table:
    """One row per operator and reason, most frequent first."""
    groups: dict[tuple[str, str], list[EagerCall]] = collections.defaultdict(list)
    for call in record.eager_calls:
        groups[call.operator, call.reason].append(call)
    table = new_table("in eager", "operator", "calls", "reason", "from")
    for (operator, reason), calls in sorted(groups.items(), key=lambda item: -len(item[1])):
        table.add_row(operator, str(len(calls)), f"eager: {reason}", places(calls))
    return table


def places(members: Sequence[EagerCall] | Sequence[SavedValue]) -> str:
    """The first lines of the model that some calls or values came from."""
    found = list(dict.fromkeys(member.line.place for member in members if member.line is not None))
    more = f" and {len(found) - LINES_SHOWN} more" if len(found) > LINES_SHOWN else ""
    return ", ".join(found[:LINES_SHOWN]) + more


TABLES = (graphs_table, stages_table, rewrites_table, cache_table, eager_table, partition_table)
