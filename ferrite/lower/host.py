"""Lower a captured graph to a host program.

Every node becomes exactly one step, in the order of the graph, which is its meaning: mutation, random numbers and
effects keep their places. Then each value is freed right after its last use.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import CapturedGraph, torch_api
from ferrite.graph import describe_value, fake_value, model_line
from ferrite.ir import (
    Allocate,
    Argument,
    Bind,
    Call,
    Constant,
    Evaluate,
    Free,
    HostProgram,
    Input,
    Literal,
    Ref,
    Restride,
    Step,
    references,
    verify,
)
from ferrite.ir.host import binds, reads
from ferrite.lower.arguments import Constants, argument, literal_text

aten = torch.ops.aten

NOT_YET_LOWERED = "not yet lowered"
NO_NAME = "a Python function without an operator name"

# Questions about a tensor's shape: answered by Python, not by an operator.
QUERIES = {
    aten.sym_size.int: "size",
    aten.sym_stride.int: "stride",
    aten.sym_numel.default: "numel",
    aten.sym_storage_offset.default: "storage_offset",
}


@dataclass(frozen=True)
class Lowered:
    program: HostProgram
    constants: dict[str, Any]


class LoweringFailure(Exception):
    """Lowering one node failed; the cause is the original exception."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(f"lowering {node.format_node()}")
        self.node = node


def lower(graph: CapturedGraph, reason: str = NOT_YET_LOWERED) -> Lowered:
    """One step per node, then frees, then the laws of `ferrite.ir.verify`. `reason`: why operators run one by one."""
    lowering = Lowering(graph, reason)
    for node in graph.gm.graph.nodes:
        try:
            lowering.add(node)
        except Exception as failure:
            raise LoweringFailure(node) from failure
    steps = without_unused(lowering.steps, lowering.outputs)
    program = HostProgram(
        name=graph.kind.value,
        inputs=tuple(lowering.inputs),
        steps=tuple(with_frees(lowering.inputs, steps, lowering.outputs, lowering.numbers)),
        outputs=lowering.outputs,
    )
    return Lowered(verify(program), lowering.constants.by_name)


class Lowering:
    """The state of lowering one graph: names given so far, and the steps."""

    def __init__(self, graph: CapturedGraph, reason: str = NOT_YET_LOWERED) -> None:
        self.graph, self.reason = graph, reason
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.outputs: tuple[Argument, ...] = ()
        self.constants = Constants()
        self.names: dict[torch.fx.Node, Ref | Constant] = {}
        self.taken: set[str] = {node.name for node in graph.gm.graph.nodes}
        self.symbols: dict[str, str] = {}  # symbol -> the name that holds its value
        self.numbers: set[str] = set()  # names that hold plain numbers

    def add(self, node: torch.fx.Node) -> None:
        match node.op:
            case "placeholder":
                self.add_input(node)
            case "get_attr":
                value = operator.attrgetter(str(node.target))(self.graph.gm)
                self.names[node] = self.constants.name_of(value, node.name)
            case "call_function":
                self.add_call(node)
            case "output":
                self.add_outputs(node)
            case _:
                raise ValueError(f"a captured graph has no {node.op} nodes")

    def add_input(self, node: torch.fx.Node) -> None:
        position = len(self.inputs)
        value = fake_value(node)
        symbol = torch_api.bare_symbol(value)
        name = node.name
        if symbol is not None and symbol not in self.symbols:
            # A size reads better under its symbol's name, which the shapes in comments use too.
            name = symbol if symbol not in self.taken and symbol.isidentifier() else name
            self.symbols[symbol] = name
            self.taken.add(name)
        if is_number(value):
            self.numbers.add(name)
        static = position in self.graph.static_inputs
        donated = position in self.graph.donated_inputs
        self.inputs.append(Input(name, describe_value(value), static, donated))
        self.names[node] = Ref(name)

    def add_call(self, node: torch.fx.Node) -> None:
        self.names[node] = Ref(node.name)
        if is_number(fake_value(node)):
            self.numbers.add(node.name)
        if node.target in QUERIES:
            self.steps.append(Evaluate(node.name, QUERIES[node.target], self.arguments(node.args)))
        elif (allocation := self.allocation(node)) is not None:
            self.steps.append(allocation)
        elif (function := python_function(node.target)) is not None and not node.kwargs:
            self.steps.append(Evaluate(node.name, function, self.arguments(node.args)))
        else:
            self.steps.append(self.eager_call(node))

    def eager_call(self, node: torch.fx.Node) -> Call:
        name = torch_api.operator_name(node.target)
        return Call(
            result=node.name if node.users else None,
            operator=name if name is not None else self.constants.name_of(node.target, node.name),
            args=self.arguments(node.args),
            kwargs=tuple((key, self.argument(value)) for key, value in node.kwargs.items()),
            reason=self.reason if name is not None else NO_NAME,
            line=model_line(node),
            about=describe_value(fake_value(node)),
        )

    def allocation(self, node: torch.fx.Node) -> Allocate | None:
        """Memory without contents is the host program's own business; other layouts stay operators."""
        value = fake_value(node)
        if node.target not in (aten.empty.memory_format, aten.empty_strided.default):
            return None
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        unusual = any(node.kwargs.get(key) for key in ("pin_memory", "memory_format"))
        device = node.kwargs.get("device") or torch.device("cpu")
        if not plain or unusual or isinstance(device, torch.fx.Node):
            return None
        sizes, *strides = (self.arguments(dims) for dims in node.args)
        return Allocate(
            result=node.name,
            sizes=sizes,
            strides=strides[0] if strides else None,
            dtype=Literal(str(literal_text(value.dtype))),
            device=Literal(str(literal_text(value.device))),
            line=model_line(node),
        )

    def add_outputs(self, node: torch.fx.Node) -> None:
        results = node.args[0]
        wanted = self.graph.output_strides
        assert isinstance(results, (tuple, list))
        self.outputs = tuple(self.output(result, strides) for result, strides in zip(results, wanted, strict=True))

    def output(self, result: Any, strides: tuple[int | torch.SymInt, ...] | None) -> Argument:
        """The result itself, or a copy where the graph gives it other strides than eager does."""
        argument = self.argument(result)
        value = fake_value(result) if isinstance(result, torch.fx.Node) else None
        if strides is None or not isinstance(value, torch.Tensor) or not isinstance(argument, Ref):
            return argument
        if all(map(torch_api.known_equal, value.stride(), strides)):
            return argument
        symbols = sorted({symbol for stride in strides for symbol in symbols_in(stride)})
        for symbol in symbols:
            self.bind(symbol)
        restride = Restride(
            result=self.fresh(f"{argument.name}_restrided"),
            source=argument.name,
            strides=tuple(self.expression(stride) for stride in strides),
            symbols=tuple(self.symbols[symbol] for symbol in symbols),
        )
        self.steps.append(restride)
        return Ref(restride.result)

    def bind(self, symbol: str) -> None:
        """Make sure that a name holds the symbol's value: read it from the first input that carries it."""
        if symbol in self.symbols:
            return
        for node, held in self.names.items():
            value = fake_value(node)
            if node.op != "placeholder" or not isinstance(value, torch.Tensor) or not isinstance(held, Ref):
                continue
            for query, dims in (("size", value.shape), ("stride", value.stride())):
                for axis, dim in enumerate(dims):
                    if torch_api.bare_symbol(dim) == symbol:
                        self.symbols[symbol] = self.fresh(symbol)
                        self.numbers.add(self.symbols[symbol])
                        self.steps.append(Bind(self.symbols[symbol], held.name, query, axis))  # type: ignore[arg-type]
                        return
        raise ValueError(f"no input carries the symbol {symbol}")

    def expression(self, value: int | torch.SymInt) -> str:
        return str(value) if isinstance(value, int) else torch_api.python_expression(value, self.symbols)

    def fresh(self, name: str) -> str:
        count = 0
        while (candidate := f"{name}_{count}" if count else name) in self.taken:
            count += 1
        self.taken.add(candidate)
        return candidate

    def argument(self, value: Any) -> Argument:
        return argument(value, self.names.__getitem__, self.constants)

    def arguments(self, values: Any) -> tuple[Argument, ...]:
        return tuple(map(self.argument, values))


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool))


def symbols_in(value: int | torch.SymInt) -> Iterator[str]:
    return iter(()) if isinstance(value, int) else torch_api.free_symbols(value)


def python_function(target: object) -> str | None:
    """The importable name of a function on plain numbers and tuples: `operator.mul`, `math.ceil`, `torch.sym_max`."""
    name = getattr(target, "__name__", "")
    for prefix, module in (("operator", operator), ("math", math), ("torch", torch)):
        if getattr(module, name, None) is target and (module is not torch or name.startswith("sym_")):
            return f"{prefix}.{name}"
    return None


def without_unused(steps: list[Step], outputs: tuple[Argument, ...]) -> list[Step]:
    """Leave out what nobody reads and whose making has no effect: sizes, tuple items, empty memory."""
    wanted = set(references(*outputs))
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, (Evaluate, Allocate, Bind)) and binds(step) not in wanted:
            continue
        wanted.update(reads(step))
        kept.append(step)
    return kept[::-1]


def with_frees(
    inputs: list[Input], steps: list[Step], outputs: tuple[Argument, ...], numbers: set[str]
) -> Iterator[Step]:
    """The steps with a Free after each last use. Numbers hold no memory and are left to Python."""
    kept = numbers.union(references(*outputs))
    last_use: dict[str, int] = {item.name: -1 for item in inputs}
    for position, step in enumerate(steps):
        result = binds(step)
        for name in (*reads(step), *((result,) if result else ())):
            last_use[name] = position
    dying: dict[int, list[str]] = {}
    for name, position in last_use.items():
        if name not in kept:
            dying.setdefault(position, []).append(name)
    if -1 in dying:
        yield Free(tuple(dying[-1]))
    for position, step in enumerate(steps):
        yield step
        if position in dying:
            yield Free(tuple(dying[position]))
