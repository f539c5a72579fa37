"""Graphs inside a graph: the bodies of conditionals, loops and shared regions, as programs of their own.

A body is lowered once, however often it is called, in a scope of its own: everything it uses is an input. Symbols that
its graph takes from around it are inputs too, behind those it has. What it returns is memory of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import Expr, symbols_in
from ferrite.ir.index import ZERO, Index, Symbol, number, symbol
from ferrite.ir.program import CallArgument, Program, Ref, changed_inputs, defines, symbols
from ferrite.lower.assertions import bind_sizes
from ferrite.lower.calls import Calls, flat
from ferrite.lower.value import Value

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Body:
    """A lowered body: the symbols it asks for behind its own inputs, and the places of the inputs it writes to."""

    program: Program
    symbols: tuple[Symbol, ...]
    written: frozenset[int]

    def asking_for(self, symbols: Sequence[Symbol]) -> Program:
        """The program with these symbols as further inputs, under other names where it has no use for them."""
        if not symbols:
            return self.program
        more = (item if item in self.symbols else symbol(f"{item.name}_unused") for item in symbols)
        return replace(self.program, inputs=(*self.program.inputs, *more))

    @functools.cached_property
    def closed(self) -> Program:
        """The program with the symbols that it asks for itself as inputs."""
        return self.asking_for(self.symbols)


class Bodies(Calls):
    bodies: dict[tuple[Any, ...], Body]

    def program_of(self, gm: torch.fx.GraphModule, name: str, strides: Sequence[Any] | None) -> Program:
        raise NotImplementedError

    def expressions_of(self, gm: torch.fx.GraphModule, given: Sequence[Value]) -> list[Value]:
        raise NotImplementedError

    def body(self, gm: Any, name: str, out: Sequence[Any] | None = None) -> Body:
        """A graph as a program. `out`: torch's picture of what it returns, whose strides it then keeps to."""
        if not isinstance(gm, torch.fx.GraphModule):
            raise NotLowered("a body that is no graph")
        strides = None if out is None else [self.known_strides(fake) for fake in out]
        key = (gm, None if strides is None else tuple(map(str, strides)))
        if key not in self.bodies:
            program = self.program_of(gm, name, strides)
            places = {item: place for place, item in enumerate(program.inputs)}
            written = frozenset(places[changed] for changed in changed_inputs(program))
            self.bodies[key] = Body(program, tuple(free_symbols(program)), written)
        return self.bodies[key]

    def known_strides(self, fake: Any) -> Any:
        """The strides a result must have, where they are numbers: others follow from sizes that the body decides."""
        if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
            return None
        return tuple(fake.stride()) if all(isinstance(stride, int) for stride in fake.stride()) else None

    # --- operands -----------------------------------------------------------------------------------------------------

    def operands(self, values: Sequence[Any], bodies: Sequence[Body]) -> tuple[CallArgument, ...]:
        """What bodies are given: those they write to as they lie in memory, read by pending values first."""
        written = {place for body in bodies for place in body.written if place < len(values)}
        self.check_sharing(values, written)
        given = [self.operand(value, place in written) for place, value in enumerate(values)]
        for place in written:
            self.before_write(self.buffers[values[place].box.buffer].storage)
        return tuple(given)

    def operand(self, value: Any, is_written: bool) -> CallArgument:
        if isinstance(value, bool):
            return self.argument(number(int(value)))
        argument = self.argument(value)
        if not is_written:
            return argument
        assert isinstance(value, Value)
        assert isinstance(argument, Ref)
        if self.buffers[argument.name].storage != self.buffers[self.realise(value.box)].storage:
            raise NotLowered("a body that writes to an operand without strides")
        return argument

    def check_sharing(self, values: Sequence[Any], written: set[int]) -> None:
        """Inside a body inputs are memory of their own: what it writes must not be seen through another operand."""
        boxes = [value.box if isinstance(value, Value) else None for value in values]
        storages = [None if box is None else self.buffers[self.realise(box)].storage for box in boxes]
        if any(storages.count(storages[place]) > 1 for place in written):
            raise NotLowered("a body that writes to an operand which shares memory with another")

    def predicate(self, value: Any) -> str | Index:
        """A condition as a buffer without dimensions, or a number."""
        if isinstance(value, Value):
            return self.buffer_of(value.view((), [ZERO] * value.rank))
        if isinstance(value, Expr):
            return self.realise(self.lazy((), value, CPU).box)
        return self.index(int(value) if isinstance(value, bool) else value)

    # --- results ------------------------------------------------------------------------------------------------------

    def outcomes(self, out: Any) -> tuple[list[Any], tuple[str | Symbol | None, ...]]:
        """Values for what bodies return, and the buffers and symbols they become. Numbers known already stay so."""
        values: list[Any] = []
        names: list[str | Symbol | None] = []
        for fake in flat(out):
            if isinstance(fake, torch.Tensor):
                value = self.result(fake, None)
                values.append(value)
                names.append(value.box.buffer)
                continue
            index = self.sizes.index(fake) if isinstance(fake, torch.SymInt) else None
            is_new = isinstance(index, Symbol) and index not in self.bound
            values.append(fake)
            names.append(index if is_new and isinstance(index, Symbol) else None)
            if is_new and isinstance(index, Symbol):
                self.bound.add(index)
        return values, tuple(names)

    def bind_results(self, out: Any, names: Sequence[str | Symbol | None]) -> None:
        for name, fake in zip(names, flat(out), strict=True):
            if isinstance(name, str):
                bind_sizes(self, name, fake, "a graph", trusted=True)


def free_symbols(program: Program) -> list[Symbol]:
    """The symbols that a program uses and neither is given nor defines, in a stable order."""
    known = {item for item in program.inputs if isinstance(item, Symbol)}
    used: dict[Symbol, None] = {}
    for operation in program.operations:
        used.update(dict.fromkeys(sorted(symbols(operation), key=str)))
        known.update(defines(operation))
    indices = [index for item in program.buffers for index in (*item.sizes, *item.strides, item.offset)]
    indices += [item for item in program.outputs if isinstance(item, Index)]
    for index in indices:
        used.update(dict.fromkeys(sorted(symbols_in(index), key=str)))
    return [item for item in used if item not in known]
