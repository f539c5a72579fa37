"""Read a kernel from its text: `parse_kernel(str(kernel)) == kernel`. The form of the text is in `kernel_text`."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import get_args

from ferrite.ir.expr import Expr, Local
from ferrite.ir.index.algebra import axis
from ferrite.ir.kernel.nodes import (
    OWN,
    Access,
    Accumulate,
    Attend,
    Kernel,
    Let,
    Loop,
    LoopKind,
    Pointer,
    Prefetch,
    Scratch,
    State,
    Statement,
    Store,
    Update,
    When,
)
from ferrite.ir.program.attention_text import AttentionReader
from ferrite.ir.program.loop_operations import Mode
from ferrite.ir.program.read import Source
from ferrite.ir.states import STATES

KINDS, MODES, ACCESSES = get_args(LoopKind), get_args(Mode), get_args(Access)
Body = tuple[Statement, ...]


def parse_kernel(text: str) -> Kernel:
    """The kernel that text describes; `BadText` says where it does not."""
    source = Source(text)
    return KernelReader(source).kernel(source.one_function())


class KernelReader(AttentionReader):
    def kernel(self, function: ast.FunctionDef) -> Kernel:
        body, pointers = list(function.body), dict[str, Pointer]()
        names = [item.arg for item in function.args.args]
        warps, resident, problems = 0, 0, list[tuple[int, ...]]()
        while body:
            match body[0]:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="symbol")) as call):
                    self.symbols[name] = self.declared(name, call)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="pointer")) as call):
                    parts = self.bound(call, "dtype access", "once again")
                    access = self.literal(parts["access"], str, f"one of {', '.join(ACCESSES)}")
                    if access not in ACCESSES:
                        raise self.unexpected(parts["access"], f"one of {', '.join(ACCESSES)}")
                    hints = {
                        hint: self.literal(parts[hint], bool, "True or False")
                        for hint in ("once", "again")
                        if hint in parts
                    }
                    pointers[name] = Pointer(name, self.dtype(parts["dtype"]), access, **hints)
                case ast.Assign(targets=[ast.Name(id="warps")], value=ast.Constant() as count):
                    warps = self.literal(count, int, "a number")
                case ast.Assign(targets=[ast.Name(id="resident")], value=ast.Constant() as count):
                    resident = self.literal(count, int, "a number")
                case ast.Assign(targets=[ast.Name(id="problems")], value=ast.List(elts=rows)):
                    problems = [tuple(self.literal(n, int, "a number") for n in self.items(row)) for row in rows]
                case _:
                    break
            del body[0]
        if names != [*pointers, *self.symbols]:
            raise self.wrong(function, f"arguments {', '.join(names)}", ", ".join([*pointers, *self.symbols]))
        memory, sizes = tuple(pointers.values()), tuple(self.symbols.values())
        return Kernel(memory, sizes, self.block(body), warps=warps, problems=tuple(problems), resident=resident)

    def block(self, body: list[ast.stmt]) -> Body:
        """The statements of a block; what they name ends with it."""
        axes, names = dict(self.axes), dict(self.locals)
        found: list[Statement] = []
        for node in body:
            match node:
                case ast.AnnAssign(value=ast.Call(func=ast.Name(id="let"))):
                    found.append(self.let(node))
                case ast.AnnAssign():
                    self.declare(node)
                    continue
                case ast.Pass():
                    continue
                case _:
                    found.append(self.statement(node))
            self.values = {}
        self.axes, self.locals = axes, names
        return tuple(found)

    def let(self, node: ast.AnnAssign) -> Let:
        name = self.name(node.target)
        assert isinstance(node.value, ast.Call)
        value = self.value(self.bound(node.value, "value")["value"])
        if value.dtype != self.dtype(node.annotation):
            raise self.wrong(node, f"{name} has another type than its value")
        self.locals[name] = Local.intern(name, value.dtype)
        return Let(name, value)

    def statement(self, node: ast.stmt) -> Statement:
        match node:
            case ast.For(target=ast.Name(id=name), iter=ast.Call() as call, orelse=[]):
                return self.loop(name, call, node.body)
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="attention")) as call)]):
                return self.attend(call, node.body)
            case ast.With(items=items) if all(isinstance(item.context_expr, ast.Call) for item in items):
                return self.accumulate(items, node.body)
            case ast.If(test=test, orelse=[]):
                condition = self.value(test)
                self.values = {}
                return When(condition, self.block(node.body))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="scratch")) as call):
                parts = self.bound(call, "dtype sizes")
                return Scratch(name, self.dtype(parts["dtype"]), self.indices(self.items(parts["sizes"])))
            case ast.Assign(targets=[ast.Subscript() as place], value=value):
                return Store(*self.element(place), self.value(value))
            case ast.Expr(ast.Call(func=ast.Name(id="prefetch"), args=[ast.Subscript() as place], keywords=[])):
                return Prefetch(*self.element(place))
            case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update"), args=args)):
                return Update(name, tuple(map(self.value, args)))
            case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Subscript() as place, attr=word), args=[value])):
                mode = word.removeprefix("atomic_")
                if mode in MODES:
                    where, coordinates = self.element(place)
                    return Store(where, coordinates, self.value(value), mode, word != mode)  # type: ignore[arg-type]
        raise self.unexpected(node, "a loop, a block of states, a condition, a value, a store, an update or a prefetch")

    def loop(self, name: str, call: ast.Call, body: list[ast.stmt]) -> Loop:
        kind, _, _ = self.call(call, "a kind of loop")
        if kind not in KINDS:
            raise self.wrong(call, f"no loop {kind!r}", f"one of {', '.join(KINDS)}")
        parts = self.bound(call, "extent", "lanes copies")
        counts = [self.literal(parts[word], int, "a number") if word in parts else 1 for word in ("lanes", "copies")]
        found = axis(name, self.index(parts["extent"]))
        self.values = {}
        around = dict(self.axes)
        self.axes[name] = found
        inside = self.block(body)
        self.axes = around
        return Loop(found, kind, inside, *counts)  # type: ignore[arg-type]

    def attend(self, call: ast.Call, body: list[ast.stmt]) -> Attend:
        around = dict(self.axes)
        numbers = {word.arg: word.value for word in call.keywords if word.arg in ("lanes", "copies")}
        lanes, copies = (
            self.literal(numbers[word], int, "a number") if word in numbers else 1 for word in ("lanes", "copies")
        )
        operation = self.attention(call, body)
        self.axes = around
        return Attend(operation, lanes, copies)

    def accumulate(self, items: list[ast.withitem], body: list[ast.stmt]) -> Accumulate:
        states = {state.names[0]: state for state in map(self.state, items)}
        body = list(body)
        while body:
            match body[0]:
                case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="combine")) as call)]):
                    name = self.name(self.bound(call, "state")["state"])
                    if name not in states:
                        raise self.wrong(call, f"no state {name!r} begins here")
                    states[name] = replace(states[name], combine=self.combine(body[0].body))
                case _:
                    break
            del body[0]
        for state in states.values():
            pairs = zip(state.names, state.dtypes, strict=True)
            self.locals.update({name: Local.intern(name, dtype) for name, dtype in pairs})
        return Accumulate(tuple(states.values()), self.block(body))

    def state(self, item: ast.withitem) -> State:
        kind, args, _ = self.call(item.context_expr, "a state, as sum(f32)")
        if kind not in STATES and kind != OWN:
            raise self.wrong(item.context_expr, f"no state {kind!r}", f"one of {', '.join([*STATES, OWN])}")
        match item.optional_vars:
            case ast.Name() as one:
                names = tuple(map(self.name, [one]))
            case ast.Tuple(elts=elements):
                names = tuple(map(self.name, elements))
            case _:
                raise self.wrong(item.context_expr, "a state without a name", f"{kind}(...) as name")
        if len(names) != len(args):
            raise self.wrong(item.context_expr, f"{len(names)} names for {len(args)} types")
        return State(kind, names, tuple(map(self.dtype, args)))

    def combine(self, body: list[ast.stmt]) -> tuple[Expr, ...]:
        """Values, then `results(...)`."""
        *values, last = body
        for statement in values:
            if not isinstance(statement, ast.AnnAssign):
                raise self.unexpected(statement, "a value, as v0: f32 = add(v1, v2)")
            self.declare(statement)
        match last:
            case ast.Expr(value=ast.Call(func=ast.Name(id="results"), args=args)):
                results = tuple(map(self.value, args))
                self.values = {}
                return results
        raise self.unexpected(last, "results(...)")
