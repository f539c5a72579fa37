"""Run a kernel, one element after the other: the oracle that generated code is held against.

Where the order is free, it may be asked to take another one: `order` shuffles independent loops and spreads the updates
of a state over several. A kernel that is right gives the same numbers, up to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.ir.expr import (
    Cast,
    Const,
    Data,
    Expr,
    IndexValue,
    Load,
    Local,
    Masked,
    Op,
    Param,
    Random,
    rewrite_indices,
)
from ferrite.ir.expr_interpret import Points, out_of_bounds
from ferrite.ir.index.algebra import ONE, Atom, Axis, Index, axis
from ferrite.ir.index.substitution import evaluate, substitute
from ferrite.ir.kernel.nodes import (
    INDEPENDENT,
    OWN,
    Accumulate,
    Attend,
    Kernel,
    Let,
    Loop,
    Prefetch,
    Scratch,
    State,
    Statement,
    Store,
    Update,
    When,
)
from ferrite.ir.program.attention_interpret import attention_results
from ferrite.ir.program.loop_operations import Destination
from ferrite.ir.random import random_numbers
from ferrite.ir.scalar import OPERATORS
from ferrite.ir.states import STATES
from ferrite.ir.types import tensor_of

Values = Sequence[torch.Tensor]
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "amax": torch.maximum,
    "amin": torch.minimum,
}
PARTS = 3  # how many states of its own a spread accumulation has


def run_kernel(
    kernel: Kernel, memory: Sequence[torch.Tensor], sizes: Sequence[int] = (), order: random.Random | None = None
) -> None:
    """Run on this memory, in place: one flat tensor per argument."""
    problems, width = list(enumerate(kernel.problems or [tuple(sizes)])), len(kernel.pointers)
    if order is not None:
        order.shuffle(problems)
    if len(memory) != len(kernel.arguments) or (kernel.problems and sizes):
        raise ValueError(f"{len(memory)} tensors and {len(sizes)} sizes are not what the kernel takes")
    for place, numbers in problems:
        pairs = zip(kernel.pointers, memory[place * width : (place + 1) * width], strict=True)
        values: dict[Atom, int] = dict(zip(kernel.sizes, numbers, strict=True))
        _Run({pointer.name: tensor for pointer, tensor in pairs}, values, order).block(kernel.body)


@dataclass
class _Partial:
    """A state while values update it: one part, or several that are combined at the end."""

    state: State
    parts: list[list[torch.Tensor] | None]
    depth: int  # how many loops with a free order stood around the block

    def combined(self, left: list[torch.Tensor] | None, right: list[torch.Tensor]) -> list[torch.Tensor]:
        if left is None:
            return right
        combine = self.state.combine or STATES[self.state.kind].combine(self.state.dtypes)
        return [_Scalars(params=[*left, *right]).value(result) for result in combine]

    def whole(self) -> list[torch.Tensor]:
        total = None
        for part in self.parts:
            if part is not None:
                total = self.combined(total, part)
        if total is None:
            raise ValueError(f"{self.state.names[0]} is read, but nothing has updated it")
        return total


@dataclass
class _Scalars:
    """Evaluates expressions: one tensor without dimensions each."""

    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    atoms: dict[Atom, int] = field(default_factory=dict)
    names: dict[str, torch.Tensor] = field(default_factory=dict)
    params: Values = ()

    def index(self, index: Index) -> int:
        return int(evaluate(index, self.atom))

    def atom(self, atom: Atom) -> Any:
        if not isinstance(atom, Data):
            return self.atoms[atom]
        found, extent = int(self.value(atom.value)), self.index(atom.extent)
        if not 0 <= found < extent:
            raise out_of_bounds(atom.complaint, found, extent)
        return found

    def place(self, buffer: str, coordinates: Sequence[Index]) -> tuple[torch.Tensor, tuple[int, ...]]:
        tensor, place = self.memory[buffer], tuple(map(self.index, coordinates))
        if not all(0 <= at < size for at, size in zip(place, tensor.shape, strict=True)):
            raise IndexError(f"{buffer}{list(place)} lies outside {list(tensor.shape)}")
        return tensor, place

    def value(self, root: Expr) -> torch.Tensor:
        computed: dict[Expr, torch.Tensor] = {}

        def of(expr: Expr) -> torch.Tensor:
            if expr not in computed:
                computed[expr] = compute(expr)
            return computed[expr]

        def compute(expr: Expr) -> torch.Tensor:
            match expr:
                case Const():
                    return tensor_of(expr.bits, expr.dtype)
                case Local():
                    return self.names[expr.name]
                case Param():
                    return self.params[expr.position]
                case IndexValue():
                    return torch.tensor(self.index(expr.index)).to(expr.dtype)
                case Load():
                    tensor, place = self.place(expr.buffer, expr.coordinates)
                    return tensor[place].clone()
                case Op(name="bitcast"):
                    return of(expr.operands[0]).view(expr.dtype)
                case Op():
                    return OPERATORS[expr.name].meaning(*map(of, expr.operands))
                case Cast():
                    return of(expr.arg).to(expr.dtype)
                case Masked():
                    return of(expr.value) if bool(of(expr.mask)) else of(expr.other)
                case Random():
                    counter, stream = (torch.tensor(self.index(each)) for each in (expr.counter, expr.stream))
                    return random_numbers(expr.kind, of(expr.seed), counter, stream, expr.dtype)
            raise TypeError(f"no meaning for {type(expr).__name__}")

        return of(root)


class _Run(_Scalars):
    def __init__(self, memory: dict[str, torch.Tensor], sizes: dict[Atom, int], order: random.Random | None) -> None:
        super().__init__(memory, sizes)
        self.order = order
        self.partials: dict[str, _Partial] = {}
        self.depth = 0  # loops with a free order around

    def block(self, body: Sequence[Statement]) -> None:
        for statement in body:
            self.run(statement)

    def run(self, statement: Statement) -> None:
        match statement:
            case Loop():
                self.loop(statement)
            case Scratch(name=name):
                # Filled with what no value should be: a tile that is read before it is written shows.
                tile = torch.empty([self.index(size) for size in statement.sizes], dtype=statement.dtype)
                self.memory[name] = tile.fill_(float("nan") if tile.is_floating_point() else 1)
            case Let(name=name, value=value):
                self.names[name] = self.value(value)
            case Accumulate():
                self.accumulate(statement)
            case Update():
                self.update(statement)
            case Store():
                self.store(statement)
            case Prefetch():
                pass
            case Attend():
                self.attend(statement)
            case When(condition=condition):
                if bool(self.value(condition)):
                    self.block(statement.body)

    def loop(self, loop: Loop) -> None:
        places = list(range(self.index(loop.axis.extent)))
        if loop.kind == "sort":
            self.sort(loop, places)
            return
        free = loop.kind in INDEPENDENT
        if free and self.order is not None:
            self.order.shuffle(places)
        self.depth += free or loop.kind == "unrolled"
        for place in places:
            self.atoms[loop.axis] = place
            self.block(loop.body)
        self.depth -= free or loop.kind == "unrolled"

    def sort(self, loop: Loop, places: Sequence[int]) -> None:
        """All updates come first; then every place reads what comes there in order."""
        updates: dict[str, list[torch.Tensor]] = {}
        for place in places:
            self.atoms[loop.axis] = place
            for statement in loop.body:
                if isinstance(statement, Let | Update):
                    self.run(statement)
                if isinstance(statement, Update):
                    updates.setdefault(statement.state, []).extend(map(self.value, statement.values))
        in_order = {name: torch.stack(values).sort().values for name, values in updates.items()}
        for place in places:
            self.atoms[loop.axis] = place
            self.names.update({name: values[place] for name, values in in_order.items()})
            self.block([statement for statement in loop.body if not isinstance(statement, Update)])

    def accumulate(self, statement: Accumulate) -> None:
        for state in statement.states:
            begin = None if state.kind == OWN else [self.value(part) for part in STATES[state.kind].begin(state.dtypes)]
            self.partials[state.names[0]] = _Partial(state, [begin, *[None] * (PARTS - 1)], self.depth)
            if begin is not None:
                self.names.update(zip(state.names, begin, strict=True))
        self.block(statement.body)
        for state in statement.states:
            partial = self.partials.pop(state.names[0])
            self.names.update(zip(state.names, partial.whole(), strict=True))

    def update(self, statement: Update) -> None:
        partial = self.partials[statement.state]
        state, values = partial.state, [self.value(value) for value in statement.values]
        if state.kind != OWN and len(values) != len(state.names):
            lift = STATES[state.kind].lift(state.dtypes)
            values = [_Scalars(params=values).value(part) for part in lift]
        spread = self.order is not None and self.depth > partial.depth
        part = self.order.randrange(PARTS) if spread and self.order is not None else 0
        partial.parts[part] = combined = partial.combined(partial.parts[part], values)
        if self.depth == partial.depth:
            self.names.update(zip(state.names, combined, strict=True))

    def attend(self, statement: Attend) -> None:
        """As in a program, with axes around that have one place: the one at hand."""
        here = {each: axis(each.name, ONE) for each in statement.outer}
        places: dict[Atom, Index] = {each: one + self.atoms[each] for each, one in here.items()}
        operation = statement.operation.rebuilt(
            lambda old: rewrite_indices(old, places),
            lambda old: here.get(old, old),
            lambda old: Destination(old.buffer, tuple(substitute(at, places) for at in old.coordinates)),
        )
        sizes = {atom: value for atom, value in self.atoms.items() if not isinstance(atom, Axis)}
        found = attention_results(
            operation, lambda axes, params: Points(axes, sizes, self.memory.__getitem__, params=params)
        )
        for number, (target, result) in enumerate(zip(operation.destinations, found, strict=True)):
            if target is not None and result is not None:
                points = Points(operation.result_axes(number), sizes, self.memory.__getitem__)
                tensor = self.memory[target.buffer]
                points.store(tensor, target.coordinates, result.to(tensor.dtype), "set")

    def store(self, store: Store) -> None:
        value = self.value(store.value)
        tensor, place = self.place(store.buffer, store.coordinates)
        tensor[place] = value if store.mode == "set" else COMBINE[store.mode](tensor[place], value)
