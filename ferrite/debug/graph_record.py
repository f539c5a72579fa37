"""The record of one graph: made of its plan, or of its nodes where it runs in eager; as plain data, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ferrite.cache import Strange, check_passes, decode, encode
from ferrite.capture import CapturedGraph, torch_api
from ferrite.codegen import HostSource
from ferrite.debug.memory import memory_record
from ferrite.debug.record import EagerCall, GraphRecord, KernelRecord
from ferrite.errors import Refusal
from ferrite.graph import ModelLine, PlaceIndex, Places, first_model_line, model_line
from ferrite.ir.program import Constant, call_of
from ferrite.passes import CommunicationRecord
from ferrite.pipeline import PassRecord
from ferrite.schedule import INTERPRETED, Launch, Plan, Run


def plan_record(
    graph: CapturedGraph,
    plan: Plan,
    source: HostSource,
    passes: tuple[PassRecord, ...],
    communication: CommunicationRecord | None = None,
) -> GraphRecord:
    """The record of a graph that became a plan, and its host program."""
    program = plan.program
    calls = [(call, item.origin) for item in program.operations if (call := call_of(item)) is not None]
    eager = [EagerCall(operator_text(call.operator), Refusal(call.reason, at.line)) for call, at in calls]
    for place, refusal in plan.not_compiled.items():
        step = plan.steps[place]
        if refusal.reason == INTERPRETED.reason:
            continue
        assert not isinstance(step, Run)
        eager.append(EagerCall(", ".join(step.origin.nodes) or type(step).__name__.lower(), refusal))
    kernels = tuple(
        KernelRecord(launch.name, nodes_of_launch(launch), lines_of_launch(launch), region)
        for launch, region in zip(plan.launches, plan.regions, strict=True)
    )
    return GraphRecord(
        kind=graph.kind.value,
        line=first_model_line(graph.gm.graph.nodes),
        operators=len(program.operations),
        inputs=tuple(map(str, program.inputs)),
        source=source.commented,
        kernels=kernels,
        eager_calls=tuple(eager),
        passes=passes,
        not_fused=plan.not_fused,
        memory=memory_record(graph.gm, plan),
        not_recorded=source.not_recorded,
        communication=communication,
    )


def nodes_of_launch(launch: Launch) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for operation in launch.operations for node in operation.origin.nodes))


def lines_of_launch(launch: Launch) -> tuple[ModelLine, ...]:
    return tuple(dict.fromkeys(item.origin.line for item in launch.operations if item.origin.line is not None))


def eager_record(
    graph: CapturedGraph | None, gm: torch.fx.GraphModule, refusal: Refusal, failure: str | None = None
) -> GraphRecord:
    """The record of a graph that runs in eager whole. `failure`: what went wrong, if anything did."""
    nodes = (graph.gm if graph is not None else gm).graph.nodes
    calls = tuple(
        EagerCall(target_text(node.target), refusal.at(model_line(node)))
        for node in nodes
        if node.op.startswith("call_")
    )
    return GraphRecord(
        kind=graph.kind.value if graph is not None else "captured",
        line=first_model_line(nodes),
        operators=len(calls),
        inputs=tuple(node.name for node in nodes if node.op == "placeholder"),
        source="",
        kernels=(),
        eager_calls=calls,
        failure=None if failure is None else f"{refusal.reason}: {failure}",
    )


def target_text(target: Any) -> str:
    """How a person would write what a node calls: `aten.add.Tensor`, `operator.gt`, `sum`."""
    name = torch_api.operator_name(target) or str(getattr(target, "__name__", target))
    module = str(getattr(target, "__module__", None) or "").lstrip("_")
    return f"operator.{name}" if module == "operator" else name


def operator_text(operator: str | Constant) -> str:
    return operator.name if isinstance(operator, Constant) else operator


# --- as plain data, and back ------------------------------------------------------------------------------------------


def as_data(record: GraphRecord, index: PlaceIndex) -> Any:
    return encode(GraphRecord, record, index)


def from_data(data: Any, places: Places, kind: str, source: str) -> GraphRecord:
    record = decode(GraphRecord, data, places)
    check_passes(record.passes)
    if record.operators < 0:
        raise Strange("fewer operators than none")
    return replace(record, kind=kind, line=places.first_line(), source=source)
