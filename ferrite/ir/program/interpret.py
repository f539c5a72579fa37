"""Run a program, slowly and obviously: the oracle that schedules and generated code are held against."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite.ir.expr_interpret import Points
from ferrite.ir.index.algebra import Atom, Axis, Index, Symbol
from ferrite.ir.index.substitution import evaluate
from ferrite.ir.program import arguments as host
from ferrite.ir.program.attention_interpret import attention_results
from ferrite.ir.program.lifetimes import Frees, frees
from ferrite.ir.program.loop_operations import Attention, Compute, Destination, Reduce, Scan, Sort
from ferrite.ir.program.nodes import (
    Allocate,
    Assert,
    Bind,
    Buffer,
    Call,
    CallArgument,
    Collective,
    DeviceCopy,
    If,
    Invoke,
    Item,
    Operation,
    Program,
    RandomState,
    Scalar,
    Seeds,
    Size,
    Template,
    UserKernel,
    Wait,
    While,
)
from ferrite.ir.program.scans import scan_values
from ferrite.ir.random import advance_generator
from ferrite.ir.reductions import REDUCTIONS

Objects = Mapping[str, Any]


def interpret(program: Program, inputs: list[Any], objects: Objects, last_uses: Frees | None = None) -> list[Any]:
    """The outputs of a program. `objects` are the constants it names: tensors, operators, whatever calls need.

    The list of inputs is emptied, and every tensor is let go after its last use. `dying`: `frees(program)`, for who
    runs a program often.
    """
    return Interpreter(program, objects).run(inputs, frees(program) if last_uses is None else last_uses)


class Interpreter:
    """One run: the tensors behind buffers, and the values of symbols."""

    def __init__(self, program: Program, objects: Objects) -> None:
        self.program, self.objects = program, objects
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.tensors: dict[str, Any] = {}
        self.symbols: dict[Atom, int] = {}

    def run(self, inputs: list[Any], last_uses: Frees) -> list[Any]:
        self.take(inputs)
        for operation, unused in zip((None, *self.program.operations), last_uses, strict=True):
            if operation is not None:
                self.step(operation)
            for name in unused:
                self.tensors.pop(name, None)
        return [self.output(item) for item in self.program.outputs]

    def take(self, inputs: list[Any]) -> None:
        """Bind the inputs and empty the list: from here on, a tensor lives as long as the program needs it."""
        for item, value in zip(self.program.inputs, inputs, strict=True):
            match item:
                case Symbol():
                    self.symbols[item] = int(value)
                case host.Constant(name) | str(name):
                    self.tensors[name] = value
        inputs.clear()

    def output(self, item: Any) -> Any:
        match item:
            case str():
                return self.tensor(item)
            case Index():
                return self.number(item)
        return self.argument(item)

    # --- memory and numbers -------------------------------------------------------------------------------------------

    def number(self, index: Index) -> int:
        return int(evaluate(index, self.symbols))

    def numbers(self, sizes: Sequence[Index]) -> tuple[int, ...]:
        return tuple(map(self.number, sizes))

    def tensor(self, name: str) -> Any:
        if name not in self.tensors:
            self.tensors[name] = self.made(self.buffers[name])
        return self.tensors[name]

    def made(self, buffer: Buffer) -> torch.Tensor:
        sizes, strides = self.numbers(buffer.sizes), self.numbers(buffer.strides)
        match buffer.kind:
            case "constant":
                constant: torch.Tensor = self.objects[buffer.name]
                return constant
            case "view":
                base = self.tensor(buffer.storage)
                start = base.storage_offset() * base.dtype.itemsize // buffer.dtype.itemsize
                view = torch.empty(0, dtype=buffer.dtype, device=base.device)
                return view.set_(base.untyped_storage(), start + self.number(buffer.offset), sizes, strides)
            case "owned":
                return torch.empty_strided(sizes, strides, dtype=buffer.dtype, device=buffer.device)
        raise ValueError(f"{buffer.name} is {buffer.kind}, and was not given")

    def argument(self, argument: CallArgument) -> Any:
        match argument:
            case host.Ref(name):
                return self.tensor(name)
            case host.Constant(name):
                return self.tensors[name] if name in self.tensors else self.objects[name]
            case host.Literal(text):
                return eval(text, {"torch": torch})
            case Size(index):
                return self.number(index)
            case Scalar(value):
                return self.points(())(value).item()
            case host.Sequence("list", items):
                return [self.argument(item) for item in items]
            case host.Sequence(_, items):
                return tuple(self.argument(item) for item in items)
            case host.Mapping(items):
                return {eval(key, {"torch": torch}): self.argument(value) for key, value in items}
            case host.Slice(start, stop, step):
                return slice(self.argument(start), self.argument(stop), self.argument(step))
        raise TypeError(f"no argument: {argument!r}")

    # --- operations ---------------------------------------------------------------------------------------------------

    def step(self, operation: Operation) -> None:
        match operation:
            case Compute():
                self.compute(operation)
            case Reduce():
                self.reduce(operation)
            case Scan():
                self.scan(operation)
            case Sort():
                self.sort(operation)
            case Attention():
                self.attention(operation)
            case Call():
                self.call(operation)
            case Template() | Collective() | Wait() | UserKernel():
                self.call(operation.call)
            case If():
                self.branch(operation)
            case While():
                self.loop(operation)
            case Invoke():
                self.give(operation.results, self.inner(operation.body, operation.operands))
            case DeviceCopy():
                self.tensor(operation.target).copy_(self.tensor(operation.source), non_blocking=not operation.blocking)
            case Allocate():
                self.tensor(operation.target)
            case Seeds():
                target = self.tensor(operation.target)
                target.copy_(torch.randint(2**32, target.shape, dtype=torch.int64, device=target.device))
            case RandomState():
                self.random_state(operation)
            case Item():
                self.symbols[operation.symbol] = int(self.tensor(operation.source).item())
            case Bind():
                self.symbols[operation.symbol] = self.query(operation)
            case Assert():
                if not bool(self.points(())(operation.condition)):
                    raise operation.error(operation.message)

    def random_state(self, operation: RandomState) -> None:
        blocks = [int(evaluate(each, self.symbols)) for _symbol, each in operation.draws]
        self.symbols[operation.seed], place = advance_generator(operation.device.index or 0, sum(blocks))
        for (symbol, _), count in zip(operation.draws, blocks, strict=True):
            self.symbols[symbol] = place
            place += count

    def query(self, operation: Bind) -> int:
        tensor = self.tensor(operation.buffer)
        if operation.query == "offset":
            return int(tensor.storage_offset())
        return int(tensor.size(operation.axis) if operation.query == "size" else tensor.stride(operation.axis))

    def points(self, axes: Sequence[Axis], device: torch.device | str = "cpu") -> Points:
        return Points(axes, self.symbols, self.tensor, device)

    def device(self, destinations: Sequence[Any]) -> torch.device:
        return self.buffers[next(destination.buffer for destination in destinations if destination is not None)].device

    def compute(self, operation: Compute) -> None:
        """Every value first, then every store: an operation that reads what it writes reads the old elements."""
        points = self.points(operation.axes, self.device(operation.stores))
        values = [points(store.value).clone() for store in operation.stores]
        for store, value in zip(operation.stores, values, strict=True):
            points.store(self.tensor(store.buffer), store.coordinates, value, store.mode)

    def reduce(self, operation: Reduce) -> None:
        points = self.points((*operation.axes, *operation.reduced), self.device(operation.destinations))
        outer = points.shape[: len(operation.axes)]
        count = 1
        for extent in points.shape[len(operation.axes) :]:
            count *= extent
        values = [points.full(points(value)).reshape(*outer, count) for value in operation.values]
        self.write(operation.axes, operation.destinations, REDUCTIONS[operation.kind].meaning(*values))

    def scan(self, operation: Scan) -> None:
        points = self.points(operation.axes, self.device(operation.destinations))
        values = [points.full(points(value)) for value in operation.values]
        along = operation.axes.index(operation.along)
        self.write(operation.axes, operation.destinations, scan_values(operation.combine, values, along))

    def sort(self, operation: Sort) -> None:
        points = self.points(operation.axes, self.device(operation.destinations))
        first, *others = [points.full(points(key)) for key in operation.keys]
        along = operation.axes.index(operation.along)
        keys, order = torch.sort(first, dim=along, descending=operation.descending, stable=operation.stable)
        moved = [other.gather(along, order) for other in others]
        self.write(operation.axes, operation.destinations, (keys, *moved, order))

    def attention(self, operation: Attention) -> None:
        device = self.device(operation.destinations)
        found = attention_results(
            operation, lambda axes, params: Points(axes, self.symbols, self.tensor, device, params)
        )
        for number, (destination, result) in enumerate(zip(operation.destinations, found, strict=True)):
            if result is not None:
                self.write(operation.result_axes(number), [destination], [result])

    def write(
        self, axes: Sequence[Axis], destinations: Sequence[Destination | None], results: Sequence[torch.Tensor]
    ) -> None:
        points = self.points(axes, self.device(destinations))
        for destination, result in zip(destinations, results, strict=True):
            if destination is not None:
                tensor = self.tensor(destination.buffer)
                points.store(tensor, destination.coordinates, result.to(tensor.dtype), "set")

    def call(self, call: Call) -> None:
        target = (
            self.argument(call.operator) if isinstance(call.operator, host.Constant) else operator_at(call.operator)
        )
        args = [self.argument(argument) for argument in call.args]
        kwargs = {name: self.argument(value) for name, value in call.kwargs}
        result = target(*args, **kwargs)
        for name, value in zip(call.results, leaves(result) if call.packed else [result], strict=False):
            if isinstance(name, Symbol):
                self.symbols[name] = int(value)
            elif name is not None:
                self.tensors[name] = value

    # --- control flow -------------------------------------------------------------------------------------------------

    def inner(self, body: Program, operands: Sequence[CallArgument]) -> list[Any]:
        return interpret(body, [self.argument(operand) for operand in operands], self.objects)

    def give(self, results: Sequence[str | Symbol | None], values: Sequence[Any]) -> None:
        for name, value in zip(results, values, strict=True):
            if isinstance(name, Symbol):
                self.symbols[name] = int(value)
            elif name is not None:
                self.tensors[name] = value

    def branch(self, operation: If) -> None:
        said = operation.predicate
        chosen = bool(self.tensor(said)) if isinstance(said, str) else bool(self.number(said))
        body = operation.then if chosen else operation.otherwise
        self.give(operation.results, self.inner(body, operation.operands))

    def loop(self, operation: While) -> None:
        carried = [self.argument(operand) for operand in operation.carried]
        carried = [value.clone() if isinstance(value, torch.Tensor) else value for value in carried]
        constants = [self.argument(operand) for operand in operation.constants]
        history: list[list[Any]] = []
        while bool(interpret(operation.condition, [*carried, *constants], self.objects)[0]):
            carried = interpret(operation.body, [*carried, *constants], self.objects)
            history.append(carried)
        if operation.stacked:
            history = history or [carried]  # without an iteration, what came in
            carried = [stacked(column) for column in zip(*history, strict=True)]
        self.give(operation.results, carried)


def stacked(values: Sequence[Any]) -> Any:
    """What every iteration of a loop carried: tensors in a new first dimension, of numbers the last."""
    return torch.stack(list(values)) if isinstance(values[0], torch.Tensor) else values[-1]


def operator_at(path: str) -> Callable[..., Any]:
    found: Callable[..., Any] = operator.attrgetter(path)(torch.ops)
    return found


def leaves(value: Any) -> list[Any]:
    """The results of an operator, flattened."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
