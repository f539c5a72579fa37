"""A compile record as a table for people."""

from __future__ import annotations

import collections
import io
import shutil

from rich.console import Console
from rich.table import Table

from ferrite.debug.record import CompileRecord, EagerCall

LINES_SHOWN = 3


def render(record: CompileRecord) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=shutil.get_terminal_size((110, 24)).columns, highlight=False)
    for table in (graphs_table(record), stages_table(record), rewrites_table(record), eager_table(record)):
        if table.row_count:
            console.print(table)
    if record.saved is not None:
        kept = record.saved
        values = f"{kept.values} values, {kept.inputs} of them inputs"
        console.print(f"saved for backward: {values}; {kept.bytes:,} bytes beyond the inputs")
    return buffer.getvalue().rstrip()


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column in ("operators", "inputs", "kernels", "eager calls", "ms", "calls", "times")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def graphs_table(record: CompileRecord) -> Table:
    table = new_table("graphs", "graph", "operators", "inputs", "kernels", "eager calls", "from", "note")
    for graph in record.graphs:
        counts = (graph.operators, len(graph.inputs), len(graph.kernels), len(graph.eager_calls))
        table.add_row(graph.kind, *map(str, counts), str(graph.line or ""), graph.failure or "")
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


def eager_table(record: CompileRecord) -> Table:
    """One row per operator and reason, most frequent first."""
    groups: dict[tuple[str, str], list[EagerCall]] = collections.defaultdict(list)
    for call in record.eager_calls:
        groups[call.operator, call.reason].append(call)
    table = new_table("in eager", "operator", "calls", "reason", "from")
    for (operator, reason), calls in sorted(groups.items(), key=lambda item: -len(item[1])):
        places = list(dict.fromkeys(call.line.place for call in calls if call.line is not None))
        more = f" and {len(places) - LINES_SHOWN} more" if len(places) > LINES_SHOWN else ""
        table.add_row(operator, str(len(calls)), f"eager: {reason}", ", ".join(places[:LINES_SHOWN]) + more)
    return table
