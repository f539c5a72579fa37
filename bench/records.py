"""What ferrite's own records say of the compilations since some moment."""

from __future__ import annotations

import collections
from typing import Any

import ferrite


def mark() -> list[Any]:
    """This moment, for `since`."""
    return ferrite.recent_compiles()


def since(marked: list[Any]) -> dict[str, Any]:
    """Seconds per stage, counts, and failures of the graphs compiled since then.

    Options are the default ones, so that a stage that fails is not raised: its graph runs in eager, and must not be
    timed as if it were compiled.
    """
    records = [record for record in ferrite.recent_compiles() if not any(record is old for old in marked)]
    stages: collections.Counter[str] = collections.Counter()
    for record in records:
        stages.update(record.stages)
    graphs = [graph for record in records for graph in record.graphs]
    return {
        "stages": dict(stages),
        "graphs": len(graphs),
        "operators": sum(graph.operators for graph in graphs),
        "kernels": sum(len(graph.kernels) for graph in graphs),
        "eager_calls": sum(len(graph.eager_calls) for graph in graphs),
        "failures": [graph.failure for graph in graphs if graph.failure is not None],
    }
