"""The record of one graph: made of its plan, or of its nodes where it runs in eager; as plain data, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ferrite.capture import CapturedGraph, torch_api
from ferrite.debug.memory import memory_record
from ferrite.debug.record import EagerCall, GraphRecord, Kernel, Memory
from ferrite.errors import Refusal
from ferrite.graph import Index, ModelLine, Places, first_model_line, model_line
from ferrite.ir.program import Constant, call_of
from ferrite.pipeline import PassRecord
from ferrite.schedule import INTERPRETED, FusionRefusal, Launch, Plan, Run


def plan_record(graph: CapturedGraph, plan: Plan, source: str, passes: tuple[PassRecord, ...]) -> GraphRecord:
    """The record of a graph that became a plan, with the text of its host program."""
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
        Kernel(launch.name, nodes_of_launch(launch), lines_of_launch(launch), region)
        for launch, region in zip(plan.launches, plan.regions, strict=True)
    )
    return GraphRecord(
        kind=graph.kind.value,
        line=first_model_line(graph.gm.graph.nodes),
        operators=len(program.operations),
        inputs=tuple(map(str, program.inputs)),
        source=source,
        kernels=kernels,
        eager_calls=tuple(eager),
        passes=passes,
        not_fused=plan.not_fused,
        memory=memory_record(graph.gm, plan),
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


def as_data(record: GraphRecord, index: Index) -> dict[str, Any]:
    def numbers(lines: Iterable[ModelLine | None]) -> list[int | None]:
        return [index.place_of_line(line) for line in lines]

    return {
        "operators": record.operators,
        "inputs": record.inputs,
        "kernels": [(each.name, each.operators, numbers(each.lines), each.region) for each in record.kernels],
        "eager": [(each.operator, each.reason, *numbers([each.line])) for each in record.eager_calls],
        "memory": None if record.memory is None else (record.memory.peak, record.memory.eager),
        "not fused": [
            (each.nodes, each.group, each.refusal.reason, *numbers([each.refusal.line])) for each in record.not_fused
        ],
        "passes": [
            (each.name, dict(each.rewrites), each.nodes_before, each.nodes_after, each.note, dict(each.facts))
            for each in record.passes
        ],
    }


def from_data(data: Mapping[str, Any], places: Places, kind: str, source: str) -> GraphRecord:
    def lines(numbers: Iterable[int | None]) -> tuple[ModelLine | None, ...]:
        return tuple(None if number is None else places.line(number) for number in numbers)

    def some(numbers: Iterable[int | None]) -> tuple[ModelLine, ...]:
        return tuple(line for line in lines(numbers) if line is not None)

    return GraphRecord(
        kind=kind,
        line=places.first_line(),
        operators=data["operators"],
        inputs=tuple(data["inputs"]),
        source=source,
        kernels=tuple(Kernel(name, tuple(nodes), some(at), region) for name, nodes, at, region in data["kernels"]),
        eager_calls=tuple(EagerCall(operator, Refusal(reason, *lines([at]))) for operator, reason, at in data["eager"]),
        passes=tuple(PassRecord(name, 0.0, *rest) for name, *rest in data["passes"]),
        not_fused=tuple(
            FusionRefusal(tuple(nodes), tuple(group), Refusal(reason, *lines([at])))
            for nodes, group, reason, at in data["not fused"]
        ),
        memory=None if data["memory"] is None else Memory(*data["memory"]),
    )
