"""What a report shows and the record does not keep: every graph after every pass, the program, the plan, the code.

Kept only where a report was asked for. Programs, plans and kernels never change: they are kept as they are, and become
text when the report is written. Graphs do change, so their lines are written down at once: a line that a pass left as
it was is known by its parts, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ferrite.capture import torch_api
from ferrite.codegen import Executable
from ferrite.errors import Refusal
from ferrite.graph import ModelLine, describe_value, fake_value, model_line
from ferrite.ir import Expr
from ferrite.ir.kernel import Kernel, Row
from ferrite.ir.program import Program
from ferrite.passes import flops_of_call
from ferrite.pipeline import PassRecord
from ferrite.runtime import StepTimes
from ferrite.schedule import Plan

MAX_LINE_CHARACTERS = 400
MAX_REFUSALS = 4000  # of rules, in one graph


@dataclass(frozen=True)
class GraphRow:
    """One node of a graph as a line, the line of the model that it comes from, and the nodes that it reads."""

    text: str
    name: str
    line: ModelLine | None
    reads: tuple[str, ...] = ()
    is_input: bool = False


@dataclass(frozen=True)
class GraphStep:
    """A graph, as numbers of rows, after a pass of a stage; without a pass, as it came."""

    stage: str
    record: PassRecord | None
    rows: tuple[int, ...] | None  # None: as before


@dataclass(frozen=True)
class RuleRefusal:
    """A rule that had a candidate and did not fire there."""

    rule: str
    node: str
    reason: str
    line: ModelLine | None


class KernelCode(Protocol):
    """What a page asks of a target."""

    @property
    def language(self) -> str: ...

    def source_rows(self, kernel: Kernel, name: str) -> list[Row]: ...


@dataclass(frozen=True)
class Compiled:
    """What a graph became. `hints`: likely values of its symbols; `flops`: of calls, by their nodes, as far as torch
    counts them."""

    program: Program
    plan: Plan
    executable: Executable
    targets: Mapping[str, KernelCode]
    hints: Mapping[str, int]
    flops: Mapping[str, int]


@dataclass
class GraphDetails:
    """Of one graph: `kind` is "torch", "joint", or a direction."""

    kind: str
    rows: list[GraphRow] = field(default_factory=list)
    steps: list[GraphStep] = field(default_factory=list)
    refusals: dict[tuple[str, str], RuleRefusal] = field(default_factory=dict)  # the last word of each rule at a node
    computed: Sequence[tuple[str, Expr]] = ()  # values as they were lowered, by the node that they are of
    compiled: Compiled | None = None
    times: StepTimes | None = None  # of kernels and calls, where they are measured
    _numbers: dict[GraphRow, int] = field(default_factory=dict, repr=False)
    _known: dict[torch.fx.Node, tuple[Any, ...]] = field(default_factory=dict, repr=False)

    def graph(self, stage: str, gm: torch.fx.GraphModule) -> None:
        self.steps.append(GraphStep(stage, None, tuple(self.numbers(gm))))

    def after_pass(self, stage: str, record: PassRecord, gm: torch.fx.GraphModule) -> None:
        rows = tuple(self.numbers(gm)) if record.changed or not self.steps else None
        self.steps.append(GraphStep(stage, record, rows))

    def refused(self, rule: str, node: torch.fx.Node, refusal: Refusal) -> None:
        if len(self.refusals) < MAX_REFUSALS:
            self.refusals[rule, node.name] = RuleRefusal(rule, node.name, refusal.reason, model_line(node))

    def finished(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self._known.clear()  # nodes hold the graph, and the graph may hold parameters

    def numbers(self, gm: torch.fx.GraphModule) -> Iterator[int]:
        """A number for each node as it is now."""
        for node in gm.graph.nodes:
            parts = (node.target, node.args, node.kwargs, node.meta.get("val"))
            known = self._known.get(node)
            if known is not None and all(new is old for new, old in zip(parts, known, strict=False)):
                yield known[-1]
                continue
            reads = tuple(each.name for each in node.all_input_nodes)
            row = GraphRow(node_text(node), node.name, model_line(node), reads, node.op == "placeholder")
            number = self._numbers.setdefault(row, len(self.rows))
            if number == len(self.rows):
                self.rows.append(row)
            self._known[node] = (*parts, number)
            yield number


def node_text(node: torch.fx.Node) -> str:
    """A node in a line: `add: f32[8, 16] = aten.add.Tensor(x, 1)`."""
    value = fake_value(node)
    if node.op == "output":
        return shortened(f"return {argument_text(node.args[0])}")
    about = node.name if value is None else f"{node.name}: {described(value)}"
    if node.op == "placeholder":
        return shortened(f"{about} = input")
    if node.op == "get_attr":
        return shortened(f"{about} = self.{node.target}")
    target = node.target
    name = torch_api.operator_name(target) or (target if isinstance(target, str) else getattr(target, "__name__", None))
    given = [*map(argument_text, node.args), *(f"{key}={argument_text(each)}" for key, each in node.kwargs.items())]
    return shortened(f"{about} = {name or target}({', '.join(given)})")


def described(value: Any) -> str:
    try:
        return describe_value(value)
    except Exception:  # of a tensor that is no usual one
        return type(value).__name__


def argument_text(value: Any) -> str:
    match value:
        case torch.fx.Node():
            return value.name
        case list():
            return f"[{', '.join(map(argument_text, value))}]"
        case tuple():
            return f"({', '.join(map(argument_text, value))}{',' if len(value) == 1 else ''})"
        case dict():
            return "{" + ", ".join(f"{key}: {argument_text(each)}" for key, each in value.items()) + "}"
        case slice():
            return f"{argument_text(value.start)}:{argument_text(value.stop)}:{argument_text(value.step)}"
        case str():
            return repr(value)
        case torch.fx.GraphModule():
            return "graph"
    return str(value)


def shortened(text: str) -> str:
    text = " ".join(text.splitlines())
    return text if len(text) <= MAX_LINE_CHARACTERS else f"{text[: MAX_LINE_CHARACTERS - 1]}…"


def flops_in(gm: torch.fx.GraphModule) -> dict[str, int]:
    """Of the calls that torch counts, by their nodes."""
    counted = ((node.name, flops_of_call(node)) for node in gm.graph.nodes)
    return {name: count for name, count in counted if count is not None}
