"""States while values update them.

Every copy and every lane has its own accumulator, in a variable that becomes a register; they begin as nothing and are
combined pair by pair when the block ends. A state without an identity ("own") has one more part: whether it holds
anything.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ferrite.codegen.llvm.byte_dots import dot_added
from ferrite.codegen.llvm.emission import Emission, Value
from ferrite.codegen.llvm.expressions import Expressions
from ferrite.codegen.llvm.function import Code
from ferrite.codegen.llvm.operators import is_float
from ferrite.codegen.llvm.types import REGISTER, vector
from ferrite.ir import DOTS, STATES, Const, Expr, Op, Param, const, nodes_of, op, params, with_parts
from ferrite.ir.kernel import OWN, State, Update


@dataclass(frozen=True)
class StateRule:
    """How a state of some types begins, takes a value, and is combined with another."""

    dtypes: tuple[torch.dtype, ...]
    begin: tuple[Expr, ...]
    lift: tuple[Expr, ...]
    combine: tuple[Expr, ...]


def rule_of(state: State) -> StateRule:
    if state.kind != OWN:
        row, types = STATES[state.kind], state.dtypes
        return StateRule(types, row.begin(types), row.lift(types), row.combine(types))
    types = (*state.dtypes, torch.bool)
    count = len(types)
    left, right = params(types), params(types, count)
    moved: dict[Expr, Expr] = {
        Param.intern(count - 1 + place, dtype): right[place] for place, dtype in enumerate(state.dtypes)
    }
    combined = [_with_params(result, moved) for result in state.combine]
    both = op("logical_and", left[-1], right[-1])
    combined = [
        op("where", both, combined[place], op("where", left[-1], left[place], right[place], dtype=dtype), dtype=dtype)
        for place, dtype in enumerate(state.dtypes)
    ]
    return StateRule(
        types,
        tuple(const(0, dtype) for dtype in types),
        (*params(state.dtypes), const(True, torch.bool)),
        (*combined, op("logical_or", left[-1], right[-1])),
    )


def _with_params(root: Expr, new: dict[Expr, Expr]) -> Expr:
    rewritten: dict[Expr, Expr] = {}
    for item in nodes_of(root):
        rewritten[item] = new.get(item) or with_parts(item, rewritten.__getitem__, lambda index: index)
    return rewritten[root]


@dataclass
class Open:
    """`variables[lanes][copy][outer copy]` holds the names of one accumulator's parts."""

    state: State
    rule: StateRule
    lanes: int
    replicas: int
    begin: Code
    variables: dict[int, list[list[list[str]]]] = field(default_factory=dict)
    read: bool = False  # before its block ends


class Accumulators:
    def __init__(self, emission: Emission, expressions: Expressions) -> None:
        self.e, self.expressions = emission, expressions
        self.open: dict[str, Open] = {}  # by the first name of the state

    def begin(self, state: State) -> None:
        begin: Code = []
        self.e.function.scope.code.append(begin)
        opened = Open(state, rule_of(state), self.e.lanes, self.e.replicas, begin)
        self.open[state.names[0]] = opened
        for place, name in enumerate(state.names):
            self.expressions.open[name] = functools.partial(self.part_so_far, opened, place)

    def part_so_far(self, opened: Open, place: int) -> Value:
        """What a state is until now; only loops in order stand between, so it is in one place."""
        opened.read = True
        self.refuse_if_spread(opened)
        return self.current(opened, opened.lanes, 1)[place]

    def refuse_if_spread(self, opened: Open) -> None:
        """A state that is read while it grows has one accumulator, or the reader would miss what others hold."""
        spread = any(lanes != opened.lanes or len(rows) > 1 for lanes, rows in opened.variables.items())
        if opened.read and spread:
            raise ValueError(
                f"{opened.state.names[0]} is read in its block, but updated by lanes or copies of their own"
            )

    def update(self, statement: Update) -> None:
        e, opened = self.e, self.open[statement.state]
        copies = e.replicas // opened.replicas
        old = self.current(opened, e.lanes, copies)
        self.refuse_if_spread(opened)
        new = self.combined(opened, old, statement.values)
        repeated = e.live if opened.lanes < e.lanes else None  # lanes with a state each repeat that too
        for mask in (e.mask, repeated):
            if mask is not None:
                new = [self.expressions.chosen(mask, one, other) for one, other in zip(new, old, strict=True)]
        for place, value in enumerate(new):
            for replica in range(e.replicas):
                part = e.part(value, replica, e.replicas, e.lanes)
                names = opened.variables[e.lanes][replica % copies][replica // copies]
                e.function.line(f"store {vector(value.element, e.lanes)} {part}, ptr {names[place]}")

    def combined(self, opened: Open, old: list[Value], values: Sequence[Expr]) -> list[Value]:
        rule = opened.rule
        if opened.state.kind == "sum" and _is_product(values[0]):
            self.expressions.begin()
            factors = [self.expressions.value(item) for item in values[0].args]
            fused = op("fma", *params((values[0].dtype,) * 3))
            return self.expressions.with_params([fused], [*factors, *old])
        if opened.state.kind == "sum" and isinstance(dot := values[0], Op) and dot.name in DOTS:
            factors = self.expressions.values(*dot.operands)
            return [self.e.map("i32", [*old, *factors], functools.partial(self.dot_added, dot.name))]
        made = self.expressions.values(*values)
        if len(made) != len(rule.dtypes):
            made = self.expressions.with_params(rule.lift, made)
        return self.expressions.with_params(rule.combine, [*old, *made])

    def dot_added(self, name: str, lanes: int, total: str, left: str, right: str) -> str:
        return dot_added(self.e, name, lanes, total, left, right)

    def current(self, opened: Open, lanes: int, copies: int) -> list[Value]:
        """What the accumulators hold now, for every copy."""
        rows = opened.variables.setdefault(lanes, [])
        while len(rows) < copies:
            rows.append([self.variables(opened, lanes) for _ in range(opened.replicas)])
        order = [rows[replica % copies][replica // copies] for replica in range(opened.replicas * copies)]
        found = []
        for place, dtype in enumerate(opened.rule.dtypes):
            type_ = vector(REGISTER[dtype], lanes)
            parts = tuple(self.e.function.define(f"load {type_}, ptr {names[place]}") for names in order)
            found.append(Value(parts, REGISTER[dtype], lanes))
        return found

    def variables(self, opened: Open, lanes: int) -> list[str]:
        names = []
        for dtype, first in zip(opened.rule.dtypes, opened.rule.begin, strict=True):
            assert isinstance(first, Const)
            element = REGISTER[dtype]
            type_ = vector(element, lanes)
            names.append(self.e.function.variable(type_))
            value = self.e.splat(self.expressions.made(first).parts[0], element, lanes)
            opened.begin.append(f"  store {type_} {value}, ptr {names[-1]}")
        return names

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, state: State) -> None:
        opened = self.open.pop(state.names[0])
        wholes = []
        for lanes in sorted(opened.variables or {opened.lanes: []}, reverse=True):
            copies = max(len(opened.variables.get(lanes, [])), 1)
            every = self.current(opened, lanes, copies)
            rows = [[self.copy(value, row, copies) for value in every] for row in range(copies)]
            whole = self.pairwise(opened, rows)
            wholes.append(self.across(opened, whole, lanes) if lanes > opened.lanes else whole)
        for name, value in zip(state.names, self.pairwise(opened, wholes), strict=False):
            del self.expressions.open[name]
            self.e.names[name] = value

    def copy(self, value: Value, row: int, copies: int) -> Value:
        return Value(value.parts[row::copies], value.element, value.lanes)

    def pairwise(self, opened: Open, rows: list[list[Value]]) -> list[Value]:
        """All states as one, as a tree."""
        while len(rows) > 1:
            pairs = [rows[place : place + 2] for place in range(0, len(rows), 2)]
            rows = [
                self.expressions.with_params(opened.rule.combine, [*pair[0], *pair[1]]) if len(pair) == 2 else pair[0]
                for pair in pairs
            ]
        return rows[0]

    def across(self, opened: Open, state: list[Value], lanes: int) -> list[Value]:
        """The lanes of a state as one: halves, as long as there are halves."""
        while lanes % 2 == 0:
            halves = [[self.half(value, place) for value in state] for place in (0, 1)]
            state, lanes = self.pairwise(opened, halves), lanes // 2
        if lanes == 1:
            return state
        return self.pairwise(opened, [[self.lane(value, place) for value in state] for place in range(lanes)])

    def half(self, value: Value, place: int) -> Value:
        lanes = value.lanes // 2
        if lanes == 1:
            return self.lane(value, place)
        chosen = ", ".join(f"i32 {place * lanes + lane}" for lane in range(lanes))
        text = f"shufflevector {value.type} {{0}}, {value.type} poison, <{lanes} x i32> <{chosen}>"
        parts = tuple(self.e.op(text.format(part), part) for part in value.parts)
        return Value(parts, value.element, lanes)

    def lane(self, value: Value, place: int) -> Value:
        parts = tuple(self.e.lane(part, value.element, value.lanes, place) for part in value.parts)
        return Value(parts, value.element)


def _is_product(value: Expr) -> bool:
    """A product that may be added without rounding it first."""
    return isinstance(value, Op) and value.name == "mul" and is_float(value.dtype)
