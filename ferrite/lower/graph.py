"""Lower a captured graph to a program: walk its nodes in order, each by its row in the tables.

Order is the meaning, so calls, writes and effects are added as their nodes come. Everything else stays pending until
something needs it in memory: a call, an output, a write to what it reads, or the rule in `materialise`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ferrite.capture import CapturedGraph, size_facts, torch_api, torch_operators
from ferrite.errors import NotLowered
from ferrite.graph import apart_in_memory, fake_value, model_line
from ferrite.ir import Expr
from ferrite.ir.index import ONE, ZERO, Index, Symbol, symbol
from ferrite.ir.program import Bind, Buffer, Constant, Input, Literal, Origin, Output, Program, writes
from ferrite.lower import families
from ferrite.lower.allocate import with_allocations
from ferrite.lower.bodies import Bodies
from ferrite.lower.calls import HalfLowered, flat
from ferrite.lower.conj_and_neg import resolved_later, resolved_now
from ferrite.lower.dead import live_operations
from ferrite.lower.forecasts import OperandLayout, misforecast
from ferrite.lower.materialise import SinceCall, uses_of, worth_keeping
from ferrite.lower.probes import IN_EAGER, correct_forecasts
from ferrite.lower.refusals import refusal
from ferrite.lower.scalars import computed_size, number_input, number_of, read
from ferrite.lower.table import how_lowered, lowering_of
from ferrite.lower.value import Box, Value, own_axes, whole

families.load()
CPU = frozenset({"cpu"})


@dataclass(frozen=True)
class LoweredProgram:
    program: Program
    objects: Mapping[str, Any]


class LoweringFailure(Exception):
    """Lowering one node failed; the cause is the original exception."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(f"lowering {node.format_node()}")
        self.node = node


def lower_graph(graph: CapturedGraph, kernels_on: Container[str] = CPU) -> LoweredProgram:
    """`kernels_on`: types of devices that kernels can be made for; on others every operator is a call."""
    return lower_module(graph.gm, graph.kind.value, graph.donated_inputs, graph.output_strides, kernels_on)


def lower_module(
    gm: torch.fx.GraphModule,
    name: str = "program",
    donated: frozenset[int] = frozenset(),
    output_strides: Sequence[Any] | None = None,
    kernels_on: Container[str] = CPU,
) -> LoweredProgram:
    correct_forecasts(gm)
    walk = Walk(gm, donated, output_strides, kernels_on)
    program = walk.run(name)
    return LoweredProgram(program, walk.objects)


class Walk(Bodies):
    """One graph being lowered: what each node became. `is_body`: another graph runs this one."""

    is_body = False

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        donated: frozenset[int],
        output_strides: Sequence[Any] | None,
        kernels_on: Container[str],
    ) -> None:
        super().__init__()
        self.kernels_on = kernels_on
        self.gm, self.donated, self.output_strides = gm, apart_in_memory(gm.graph, donated), output_strides
        self.values: dict[torch.fx.Node, Any] = {}
        self.inputs: list[Input] = []
        self.outputs: tuple[Output, ...] = ()
        self.uses, self.since_call, self.place = uses_of(gm.graph), SinceCall(gm.graph), 0
        self.bodies = {}
        self.returned: set[str] = set()  # storages that outputs of a body have
        self.node: torch.fx.Node | None = None
        self.sizes.computed = partial(computed_size, self)

    def program_of(self, gm: torch.fx.GraphModule, name: str, strides: Sequence[Any] | None) -> Program:
        inner = Walk(gm, frozenset(), strides, self.kernels_on)
        inner.sizes, inner.objects, inner.bodies, inner.is_body = self.sizes, self.objects, self.bodies, True
        return inner.run(name)

    def expressions_of(self, gm: torch.fx.GraphModule, given: Sequence[Value]) -> list[Value]:
        """What a graph makes of these values, none of it in memory."""
        inner = Walk(gm, frozenset(), None, self.kernels_on)
        inner.sizes, inner.objects, inner.bodies = self.sizes, self.objects, self.bodies
        values = iter(given)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                value = next(values)
                inner.values[node] = Value(value.box, value.sizes, value.coordinates, fake_value(node))
            elif node.op == "call_function":
                inner.node, inner.origin = node, self.origin
                inner.values[node] = inner.lower_node(node)
            elif node.op != "output":
                raise NotLowered("a function that reads tensors besides its arguments")
        results = [inner.values.get(node) for node in flat(gm.graph.output_node().args[0])]
        found = [value for value in results if isinstance(value, Value) and value.box.expr is not None]
        if inner.operations or len(found) < len(results):
            raise NotLowered("a function that is no expression of its arguments")
        return found

    def run(self, name: str) -> Program:
        for place, node in enumerate(list(self.gm.graph.nodes)):
            self.place, self.node, self.origin = place, node, Origin((node.name,), model_line(node))
            self.assumes_sizes = size_facts.assumes_sizes(node)
            try:
                self.take(node)
            except (NotLowered, LoweringFailure):  # for what runs this graph as a part of itself
                raise
            except Exception as failure:
                raise LoweringFailure(node) from failure
        program = Program(name, tuple(self.inputs), tuple(self.buffers.values()), tuple(self.operations), self.outputs)
        return with_allocations(live_operations(program))

    def take(self, node: torch.fx.Node) -> None:
        match node.op:
            case "placeholder":
                self.add_input(node)
            case "get_attr":
                self.values[node] = self.attribute(node)
            case "call_function":
                self.values[node] = self.lower_node(node)
            case "output":
                self.add_outputs(node)
            case _:
                raise ValueError(f"a captured graph has no {node.op} nodes")

    # --- inputs and constants -----------------------------------------------------------------------------------------

    def add_input(self, node: torch.fx.Node) -> None:
        fake = fake_value(node)
        if isinstance(fake, torch.Tensor) and fake.layout is not torch.strided:
            self.values[node] = self.foreign(node.name, fake)
            self.inputs.append(node.name)
        elif isinstance(fake, torch.Tensor):
            kind = "donated" if len(self.inputs) in self.donated else "input"
            self.values[node] = self.tensor_input(node.name, fake, kind)
            self.inputs.append(node.name)
            self.bind_symbols(node.name, fake)
            if fake.is_conj() or fake.is_neg():
                self.values[node] = resolved_now(self, self.values[node], node)
        elif isinstance(fake, (int, torch.SymInt)) and not isinstance(fake, bool):
            index = self.sizes.index(fake)
            held = index if isinstance(index, Symbol) and index not in self.bound else symbol(node.name)
            self.bound.add(held)
            self.inputs.append(held)
            self.values[node] = fake
        elif isinstance(fake, (float, torch.SymFloat, torch.SymBool)):
            self.inputs.append(Constant(node.name))
            self.values[node] = number_input(self, node.name, fake)
        else:
            self.inputs.append(Constant(node.name))
            self.values[node] = Constant(node.name)

    def tensor_input(self, name: str, fake: torch.Tensor, kind: str) -> Value:
        box = Box(self.shape(fake), fake.dtype, fake.device, fake=fake)
        strides = self.sizes.indices(fake.stride())
        self.buffers[name] = Buffer(name, fake.dtype, box.sizes, strides, ZERO, fake.device, kind)  # type: ignore[arg-type]
        box.buffer = name
        return Value(box, box.sizes, whole(box).coordinates, fake)

    def bind_symbols(self, name: str, fake: torch.Tensor) -> None:
        """Symbols that a tensor from outside carries get their values from it."""
        for query, dims in (("size", fake.shape), ("stride", fake.stride())):
            for place, dim in enumerate(dims):
                if torch_api.bare_symbol(dim) is None:
                    continue
                index = self.sizes.index(dim)
                if isinstance(index, Symbol) and index not in self.bound:
                    self.bound.add(index)
                    self.add(Bind(index, name, query, place, self.origin))  # type: ignore[arg-type]

    def attribute(self, node: torch.fx.Node) -> Any:
        value = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(value, torch.Tensor):
            return value
        fake = fake_value(node)
        name = self.name_of_constant(node.name, value)
        self.objects[name] = value
        return self.tensor_input(name, fake if isinstance(fake, torch.Tensor) else value, "constant")

    def name_of_constant(self, name: str, value: torch.Tensor) -> str:
        """The node's name, unless the graph around this one has another constant under it."""
        while self.objects.get(name, value) is not value:
            name += "_"
        return name

    # --- nodes --------------------------------------------------------------------------------------------------------

    def argument_of(self, node: torch.fx.Node) -> Any:
        return self.values[node]

    def lower_node(self, node: torch.fx.Node) -> Any:
        args: Any
        kwargs: Any
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.argument_of)
        out = fake_value(node)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return self.settle(node, args[0][args[1]])
        if not torch_operators.is_operator(node.target) and not torch_operators.is_higher_order(node.target):
            return number_of(self, node.target, args, kwargs, out)
        return self.settle(node, self.apply(node.target, args, kwargs, out))

    def settle(self, node: torch.fx.Node, value: Any) -> Any:
        """Decide whether a node's value goes to memory now. What is returned does, so that what it reads can go."""
        if isinstance(value, Value) and value.box.expr is not None:
            leaves = bool(value.box.expr.loads) and any(user.op == "output" for user in node.users)
            if leaves or worth_keeping(value.box, self.uses[node]):
                self.realise(value.box)
            self.since_call.settled(node, value.box)
        return value

    def before_call(self) -> None:
        for box in self.since_call.to_memory(self.place):
            self.realise(box)

    def apply(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        """Lower one call; where it has no loop form, call it in eager, with the reason."""
        before, self.out, self.operator = (self.out, self.operator), out, target
        mark, names = len(self.operations), set(self.buffers)
        try:
            return self.settled(self.choose(target, args, kwargs, out), out)
        except NotLowered as refused:
            # what was computed so far is dead, and goes; what was written could not be taken back
            changed = {access.buffer for added in self.operations[mark:] for access in writes(added)} & names
            if changed:
                raise HalfLowered(f"{target} had written {changed} when it gave up: {refused}") from refused
            return self.settled(self.eager_call(target, args, kwargs, out, refused.refusal.reason), out)
        finally:
            self.out, self.operator = before

    def choose(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        kind, note = how_lowered(target)
        if kind in ("eager", "template"):
            raise NotLowered(note)
        if (device := self.without_kernels(target, args, kwargs, out)) is not None:
            raise NotLowered(f"no kernels are made on {device}")
        if self.assumes_sizes:
            raise NotLowered("torch assumes a size of its result that data decides")
        if self.node is not None and IN_EAGER in self.node.meta and self.node.target is target:
            raise NotLowered(self.node.meta[IN_EAGER])
        first = next((value for value in args if isinstance(value, Value)), None)
        why_not = self.unsupported(args, kwargs, out) or misforecast(target, self.operands_of(args, kwargs))
        why_not = why_not or refusal(target, None if first is None else first.dtype)
        if why_not:
            raise NotLowered(why_not)
        lower = lowering_of(target)
        if lower is not None:
            return self.call_lowering(lower, target, args, kwargs)
        if kind == "in place":
            return self.in_place(torch_operators.functional_twin(target), args, kwargs, out)
        return self.compose(target, args, kwargs, out)

    def without_kernels(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> str | None:
        """A device of this call that no kernels are made for. Views need none, nor do questions about sizes, nor copies
        from device to device."""
        results = [fake for fake in flat(out) if isinstance(fake, torch.Tensor)]
        computes = bool(results) or bool(torch_operators.written_arguments(target))
        if not computes or torch_operators.is_view(target) or not torch_operators.is_operator(target):
            return None
        operands = [value for value in flat((list(args), dict(kwargs))) if isinstance(value, Value)]
        if is_plain_copy(operands, results):
            return None
        devices = [result.device.type for result in results] + [value.device.type for value in operands]
        return next((device for device in devices if device not in self.kernels_on), None)

    def operands_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[OperandLayout]:
        for value in flat((list(args), dict(kwargs))):
            if isinstance(value, Value) and value.fake is not None and value.fake.layout is torch.strided:
                fake = value.fake
                yield OperandLayout(self.sizes.indices(fake.shape), self.sizes.indices(fake.stride()), fake.dtype)

    def call_lowering(
        self, function: Callable[..., Any], target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if torch_operators.is_operator(target):
            bound = torch_operators.bound_arguments(target, tuple(args), kwargs)
            return function(
                self, **{PYTHON_NAMES.get(name, name): self.readable(value) for name, value in bound.items()}
            )
        return function(self, *args, **kwargs)

    def readable(self, value: Any) -> Any:
        """An argument with symbolic sizes as index expressions."""
        if isinstance(value, torch.SymInt):
            return self.sizes.index(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return read(self, value)
        if isinstance(value, (list, tuple)):
            return [self.readable(item) for item in value]
        return value

    def is_used(self, place: int) -> bool:
        node = self.node
        if node is None or node.target is not self.operator:  # inside something that was taken apart
            return True
        return any(user.target is not operator.getitem or user.args[1] == place for user in node.users)

    def in_place(self, twin: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        target = args[0]
        value = self.apply(twin, args, kwargs, out)
        return self.write(target, value)

    def settled(self, result: Any, out: Any) -> Any:
        """Give fresh values eager's strides, and every value torch's picture of it."""
        if isinstance(out, (tuple, list)) and isinstance(result, (tuple, list)):
            return (
                type(out)(self.settled(item, fake) for item, fake in zip(result, out, strict=True))
                if type(out) in (tuple, list)
                else [self.settled(item, fake) for item, fake in zip(result, out, strict=True)]
            )
        if not isinstance(result, Value) or not isinstance(out, torch.Tensor):
            return result
        box = result.box
        if box.expr is not None and box.strides is None and result.is_whole and self.shape(out) == box.sizes:
            box.strides = self.dense_strides(out)
        if box.fake is None and result.is_whole:
            box.fake = out
        return Value(box, result.sizes, result.coordinates, out)

    # --- outputs ------------------------------------------------------------------------------------------------------

    def add_outputs(self, node: torch.fx.Node) -> None:
        results = flat(node.args[0]) if self.is_body else node.args[0]
        assert isinstance(results, (tuple, list))
        strides = self.output_strides or [None] * len(results)
        outputs: list[Output] = []
        known: dict[Any, Output] = {}
        for result, wanted in zip(results, strides, strict=True):
            if not isinstance(result, torch.fx.Node) or self.is_body:
                outputs.append(self.output(result, wanted))
                continue
            key = (result, None if wanted is None else self.sizes.indices(wanted))
            if key not in known:  # one tensor may be returned twice
                known[key] = self.output(result, wanted)
            outputs.append(known[key])
        self.outputs = tuple(self.tensors_apart(results, outputs))

    def tensors_apart(self, results: Sequence[Any], outputs: Sequence[Output]) -> Iterator[Output]:
        """Two results of eager are two tensors, even where both are the same elements of one memory. The one that was
        computed first owns it: the others are views of it, and autograd tells a view from its base."""
        named = [pair for pair in zip(results, outputs, strict=True) if isinstance(pair[1], str)]
        owner = {output: result for result, output in sorted(named, key=operator.itemgetter(0), reverse=True)}
        windows: dict[Any, str] = {}  # one tensor may be returned twice, as a view of another too
        for result, output in zip(results, outputs, strict=True):
            same = isinstance(output, str) and owner[output] is not result
            if same and (buffer := self.buffers[str(output)]).kind != "foreign":
                if (result, output) not in windows:
                    window = self.window(buffer, buffer.dtype, buffer.sizes, buffer.strides, buffer.offset)
                    windows[result, output] = window
                yield windows[result, output]
            else:
                yield output

    def output(self, result: Any, wanted: Any) -> Output:
        value = self.values[result] if isinstance(result, torch.fx.Node) else result
        if isinstance(value, Value):
            fake = fake_value(result) if isinstance(result, torch.fx.Node) else value.fake
            if isinstance(fake, torch.Tensor) and (fake.is_conj() or fake.is_neg()):
                value = resolved_later(self, value, fake)
            if self.is_body:
                return self.own_output(value, fake, wanted)
            if wanted is not None and isinstance(fake, torch.Tensor):
                return self.output_with(value, fake, self.sizes.indices(wanted))
            return self.buffer_of(value, fake if isinstance(fake, torch.Tensor) else None)
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return self.index(value)
        if isinstance(value, (Index, Constant)):
            return value
        if isinstance(value, Expr):
            return self.argument(value)  # type: ignore[return-value]
        return Literal(repr(value))

    def own_output(self, value: Value, fake: Any, wanted: Any) -> str:
        """What a body returns shares memory with nothing it was given, and nothing else it returns."""
        strides = wanted if wanted is not None else fake.stride()
        storage = self.buffers[self.realise(value.box)].storage
        kept = self.buffers[storage].kind == "owned" and storage not in self.returned
        name = (
            self.output_with(value, fake, self.sizes.indices(strides))
            if kept
            else self.realise(self.copied(value, self.sizes.indices(strides)).box)
        )
        self.returned.add(self.buffers[name].storage)
        return name

    def output_with(self, value: Value, fake: torch.Tensor, strides: tuple[Index, ...]) -> str:
        own = self.sizes.indices(fake.stride())
        if own == strides:
            found = self.buffers[name := self.buffer_of(value, fake)]
            if ZERO not in value.sizes or found.kind == "foreign" or found.strides == strides:
                return name
            return self.window(found, value.dtype, value.sizes, strides, found.offset)
        if ZERO in value.sizes:  # without elements any strides will do, and what shares memory goes on sharing it
            base = self.buffers[self.realise(value.box)]
            return self.window(base, value.dtype, value.sizes, strides, base.offset)
        repeated = [stride is ZERO and size is not ONE for size, stride in zip(value.sizes, strides, strict=True)]
        if not any(repeated) or not all(size.low is not None and size.low > 0 for size in value.sizes):
            return self.realise(self.copied(value, strides).box)
        # eager has one element at many places, and so have we: it is written once
        sizes = [ONE if again else size for size, again in zip(value.sizes, repeated, strict=True)]
        once = self.copied(value.view(sizes, own_axes(sizes)), strides)
        base = self.buffers[self.realise(once.box)]
        return self.window(base, value.dtype, value.sizes, strides, base.offset)


def is_plain_copy(operands: Sequence[Value], results: Sequence[torch.Tensor]) -> bool:
    """Whether elements go from one device to another as they are: an operation of its own, which is no loop."""
    if len(operands) != 1 or len(results) != 1:
        return False
    return operands[0].device != results[0].device and operands[0].dtype == results[0].dtype


# Names of schemas that Python keeps for itself.
PYTHON_NAMES = {"self": "x", "from": "low", "input": "x"}
