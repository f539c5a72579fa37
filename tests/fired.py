"""What the record of a compile says has changed a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ferrite.passes import PIPELINES
from ferrite.pipeline import PassRecord

IN_ORDER = [(pipeline.name, step.name) for pipeline in PIPELINES for step in pipeline.passes]


def fired(record: Any) -> set[str]:
    """Rules by their names, passes as `stage/name`."""
    found = set(record.rewrites)
    for stage, steps in record.passes.items():
        found |= {f"{stage}/{step.name}" for step in steps if did_something(step)}
    for graph in record.graphs:
        found |= set(passes_of_graph(graph.passes))
    return found


def did_something(step: PassRecord) -> bool:
    return step.changed or bool(step.facts)


def passes_of_graph(steps: tuple[PassRecord, ...]) -> Iterator[str]:
    """A graph lists the passes of all its stages one after the other, and two stages may have one of a name."""
    place = 0
    for step in steps:
        name = step.name.rpartition("/")[2]
        later = next((at for at in range(place, len(IN_ORDER)) if IN_ORDER[at][1] == name), None)
        if later is None:
            continue
        if "/" not in step.name:  # those of graphs inside come first
            place = later
        if did_something(step):
            yield "/".join(IN_ORDER[later])
