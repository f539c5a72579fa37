"""Run a pipeline over a graph.

A pass that fails is taken back, reported and skipped. FX graphs have no undo, and copying the graph before every pass
would cost more than the passes: so the graph, with the graphs nested in it, is copied once at the start, and after a
failure the passes that worked are run again on that copy. Passes are deterministic, so they do the same again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ferrite.capture import outside_of_modes
from ferrite.graph import (
    MetadataUpdater,
    Snapshot,
    body_of,
    fake_value,
    has_collectives,
    leaves,
    produces_value,
    stable_topological_sort,
    verify_graph,
)
from ferrite.pipeline.context import PassContext, PassRecord
from ferrite.pipeline.passes import GraphPass, Pipeline
from ferrite.pipeline.undo import Checkpoint

Report = Callable[[str, Exception], None]
Observe = Callable[[PassRecord, torch.fx.GraphModule], None]


class PassFailure(Exception):
    """A pass failed, or left an invalid graph; the cause says how."""

    def __init__(self, name: str, node: torch.fx.Node | None = None) -> None:
        super().__init__(f"pass {name!r} failed")
        self.name = name
        self.node = node


def run_pipeline(
    pipeline: Pipeline,
    gm: torch.fx.GraphModule,
    context: PassContext,
    report: Report | None = None,
    observe: Observe | None = None,
) -> list[PassRecord]:
    """Run every pass that applies, in order, in place; `observe` sees the graph after each.

    Graphs inside (branches, loop bodies) come first, each once. With `options.strict` a failing pass raises
    PassFailure. Otherwise it is taken back and skipped, and `report` is told.
    """
    inner = [
        replace(record, name=f"{name}/{record.name}")
        for name, body in inner_graphs(gm).items()
        for record in run_pipeline(pipeline, body, context, report)
        if record.changed
    ]
    return inner + run_outer(pipeline, gm, context, report, observe)


def inner_graphs(gm: torch.fx.GraphModule) -> dict[str, torch.fx.GraphModule]:
    """The graphs that this one calls, by name, each once; those without metadata are left as they are."""
    found: dict[str, torch.fx.GraphModule] = {}
    for node in gm.graph.nodes:
        body = body_of(node)
        known = body is not None and all(fake_value(n) is not None for n in body.graph.nodes if produces_value(n))
        if body is not None and known and body not in found.values():
            found[str(node.target)] = body
    return found


def run_outer(
    pipeline: Pipeline,
    gm: torch.fx.GraphModule,
    context: PassContext,
    report: Report | None,
    observe: Observe | None,
) -> list[PassRecord]:
    original = Checkpoint(gm)
    # Inner graphs have had their share of these.
    fuel, rewrites, facts = context.fuel.level, context.rewrites.copy(), context.facts.copy()
    failed: dict[str, str] = {}
    while True:
        try:
            with outside_of_modes():  # as where they are run alone: a pass may compute with the constants of a module
                return run_once(pipeline, gm, context, failed, observe)
        except PassFailure as failure:
            step = next(step for step in pipeline.passes if step.name == failure.name)
            original.restore()
            if context.options.strict or step.required or step.name in failed:
                raise
            cause = failure.__cause__
            failed[step.name] = f"failed: {type(cause).__name__}: {cause}"
            context.rewrites, context.facts = rewrites.copy(), facts.copy()
            context.fuel.refill(fuel)
            if report is not None and isinstance(cause, Exception):
                report(step.name, cause)


def run_once(
    pipeline: Pipeline,
    gm: torch.fx.GraphModule,
    context: PassContext,
    failed: dict[str, str],
    observe: Observe | None,
) -> list[PassRecord]:
    records = []
    edited = False
    # Every pass is held to the graph the stage was given, so one look at that is enough.
    start = Snapshot.of(gm)
    updater = MetadataUpdater(gm.graph)
    rounds = {each.name: each.times for each in context.options.rounds}
    for step, again in in_order(pipeline, context.options.extra):
        note = reason_to_skip(step, gm.graph, context, failed, again)
        before = len(gm.graph.nodes)
        if note:
            records.append(PassRecord(step.name, 0.0, {}, before, before, note))
            continue
        context.code_waits = is_own(step)
        if edited and not context.code_waits:
            gm.recompile()
        for _ in range(rounds.get(step.name, 1)):
            record, changed = run_pass(step, gm, context, updater, start)
            records.append(record)
            edited |= changed
            if observe is not None:
                observe(records[-1], gm)
            if not records[-1].changed:
                break  # passes are deterministic: it would find nothing again
    context.code_waits = False
    if edited:
        gm.recompile()
    return records


def is_own(step: GraphPass) -> bool:
    """Whether a pass is ferrite's. Those of users may run the graph."""
    return str(getattr(step.original, "__module__", "")).startswith("ferrite.")


def in_order(pipeline: Pipeline, extra: tuple[str, ...]) -> Iterator[tuple[GraphPass, bool]]:
    """Every pass, and whether it is there because the user wants it once more."""
    repeatable = pipeline.repeatable
    yield from ((step, False) for step in pipeline.passes[: len(repeatable)])
    yield from ((step, True) for step in repeatable if step.name in extra)
    yield from ((step, False) for step in pipeline.passes[len(repeatable) :])


def reason_to_skip(
    step: GraphPass, graph: torch.fx.Graph, context: PassContext, failed: dict[str, str], again: bool
) -> str:
    if step.name in failed:
        return failed[step.name]
    if step.name in context.options.skip and not step.required and not again:
        return "skipped by option"
    if not step.applies(context.is_inference):
        return f"{step.scope} only"
    if step.device and step.device not in devices_in(graph):
        return f"nothing on {step.device}"
    if step.with_collectives and not has_collectives(graph):
        return "no collectives"
    if not context.fuel.left and not step.required:
        return "out of fuel"
    return ""


def devices_in(graph: torch.fx.Graph) -> set[str]:
    """The types of the devices that any value of the graph is on, inner ones too."""
    values = (leaf for node in graph.nodes for leaf in leaves(fake_value(node)))
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def run_pass(
    step: GraphPass,
    gm: torch.fx.GraphModule,
    context: PassContext,
    updater: MetadataUpdater,
    snapshot: Snapshot,
) -> tuple[PassRecord, bool]:
    """One pass: run, repair order and metadata if it may have changed anything, verify. A broken graph is a failure.
    Also whether it may have changed anything."""
    start = time.perf_counter()
    nodes = len(gm.graph.nodes)
    before, facts = dict(context.rewrites), context.facts.copy()
    try:
        count = step.function(gm, context)
        rewrites = {name: n - before.get(name, 0) for name, n in context.rewrites.items() if n > before.get(name, 0)}
        if count and step.keeps_values:  # another spelling is no rewrite
            context.facts["edits"] += count
        elif count and not rewrites:
            context.fuel.spend()
            context.rewrites[step.name] += count
            rewrites = {step.name: count}
        edited = bool(count or count is None or rewrites or len(gm.graph.nodes) != nodes) or not is_own(step)
        if edited:
            stable_topological_sort(gm.graph)
            updater.trust() if step.keeps_values else updater.update()
            verify_graph(gm, snapshot)
    except Exception as problem:
        raise PassFailure(step.name, getattr(problem, "node", None)) from problem
    seconds, found = time.perf_counter() - start, dict(context.facts - facts)
    return PassRecord(step.name, seconds, rewrites, nodes, len(gm.graph.nodes), facts=found), edited
