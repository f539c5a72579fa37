"""Read a program from its text: `parse(str(program)) == program`. `ferrite.ir.program.text` has the form of it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from ferrite.ir.expr import Expr
from ferrite.ir.index.algebra import ZERO, Axis, Index, Symbol, axis
from ferrite.ir.program import arguments as host
from ferrite.ir.program.attention_text import AttentionReader
from ferrite.ir.program.loop_operations import Combine, Compute, Destination, Mode, Reduce, Scan, Sort, Store
from ferrite.ir.program.nodes import (
    ASSERTED,
    Allocate,
    Assert,
    Bind,
    Buffer,
    CallArgument,
    Collective,
    DeviceCopy,
    If,
    Input,
    Invoke,
    Item,
    Kind,
    Operation,
    Output,
    Program,
    RandomState,
    Seeds,
    Template,
    UserKernel,
    Wait,
    While,
)
from ferrite.ir.program.parse_calls import CallReader
from ferrite.ir.program.read import BadText as BadText
from ferrite.ir.program.read import Source
from ferrite.ir.program.spelling import reads_as_literal

KINDS, MODES = get_args(Kind), get_args(Mode)


def parse(text: str) -> Program:
    """The program that text describes; `BadText` says where it does not."""
    source = Source(text)
    return ProgramReader(source).program(source.one_function())


class ProgramReader(CallReader, AttentionReader):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.opaque: set[str] = set()
        self.buffers: list[Buffer] = []
        self.operations: list[Operation] = []
        self.programs: dict[str, Program] = {}

    def program(self, function: ast.FunctionDef) -> Program:
        *body, last = function.body
        if not isinstance(last, ast.Return):
            raise self.unexpected(last, "return, as the last statement")
        for statement in body:
            self.statement(statement)
        outputs = tuple(map(self.output, outputs_of(last)))
        inputs = tuple(self.input(item.arg) for item in function.args.args)
        return Program(self.program_name(function), inputs, tuple(self.buffers), tuple(self.operations), outputs)

    def program_name(self, function: ast.FunctionDef) -> str:
        match function.decorator_list:
            case []:
                return function.name
            case [ast.Call(func=ast.Name(id="named"), args=[ast.Constant(value=str(name))])]:
                return name
        raise self.unexpected(function.decorator_list[0], "@named('name')")

    def input(self, name: str) -> Input:
        return host.Constant(name) if name in self.opaque else self.symbols.get(name, name)

    def output(self, node: ast.expr) -> Output:
        match node:
            case ast.Name(id=name):
                return self.symbols.get(name, name)
            case ast.Call(func=ast.Name(id="ref")):
                return host.Ref(self.name(self.bound(node, "name")["name"]))
            case ast.Call(func=ast.Name(id="size")):
                return self.index(self.bound(node, "index")["index"])
            case ast.Call(func=ast.Name(id="min" | "max")) | ast.BinOp() | ast.UnaryOp() if not reads_as_literal(node):
                return self.index(node)
        return self.argument(node)  # type: ignore[return-value]

    # --- statements ---------------------------------------------------------------------------------------------------

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                self.named(node, name, call)
            case ast.AnnAssign():
                self.declare(node)
            case ast.FunctionDef():
                self.programs[node.name] = ProgramReader(self.source).program(node)
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=None)]):
                self.done(self.block(call, node.body))
            case ast.Assert(test=test, msg=message) if message is not None:
                self.done(self.assertion(test, message))
            case ast.Expr(value=ast.Call() as call):
                self.done(self.one_line(call))
            case _:
                raise self.unexpected(node, "a buffer, a value or an operation")

    def assertion(self, test: ast.expr, message: ast.expr) -> Assert:
        """`assert n < 3, "too many"`, a RuntimeError; another is named: `assert n < 3, IndexError("too many")`."""
        error: type[Exception] = RuntimeError
        if isinstance(message, ast.Call):
            word, arguments, _ = self.call(message, "an error")
            named = {each.__name__: each for each in ASSERTED}
            if word not in named or len(arguments) != 1:
                raise self.unexpected(message, f"one of {', '.join(named)}, with a message")
            error, message = named[word], arguments[0]
        return Assert(self.value(test), self.literal(message, str, "a message in quotes"), error=error)

    def done(self, operation: Operation) -> None:
        """One operation ends: its axes and values are out of scope."""
        self.operations.append(operation)
        self.values, self.axes = {}, {}

    def named(self, node: ast.Assign, name: str, call: ast.Call) -> None:
        word, _, _ = self.call(call, "a buffer, a symbol, or what binds one")
        if word == "symbol":
            self.symbols[name] = self.declared(name, call)
        elif word == "opaque":
            self.bound(call, "")
            self.opaque.add(name)
        elif word in KINDS:
            self.buffers.append(self.buffer(name, word, call))
        elif word == "item":
            self.done(Item(self.symbol(node, name), self.name(self.bound(call, "source")["source"])))
        elif word == "bind":
            parts = self.bound(call, "buffer query axis")
            query = self.choice(parts["query"], ("size", "stride", "offset"))
            place = self.literal(parts["axis"], int, "a dimension")
            self.done(Bind(self.symbol(node, name), self.name(parts["buffer"]), query, place))
        else:
            raise self.wrong(node, f"no {word!r} here", f"one of symbol, opaque, item, bind, {', '.join(KINDS)}")

    def symbol(self, node: ast.AST, name: str) -> Symbol:
        if name not in self.symbols:
            raise self.wrong(node, f"no symbol {name!r}", f"{name} = symbol(low, high) before")
        return self.symbols[name]

    def choice(self, node: ast.expr, choices: Sequence[str]) -> Any:
        found = self.literal(node, str, f"one of {', '.join(choices)}")
        if found not in choices:
            raise self.unexpected(node, f"one of {', '.join(choices)}")
        return found

    def buffer(self, name: str, kind: Any, call: ast.Call) -> Buffer:
        parts = self.bound(call, "dtype sizes", "strides offset device base")
        if "strides" not in parts:
            raise self.wrong(call, "no strides", "strides=[...]")
        where = self.device(parts["device"]) if "device" in parts else torch.device("cpu")
        return Buffer(
            name,
            self.dtype(parts["dtype"]),
            self.indices(self.items(parts["sizes"])),
            self.indices(self.items(parts["strides"])),
            self.index(parts["offset"]) if "offset" in parts else ZERO,
            where,
            kind,
            self.name(parts["base"]) if "base" in parts else None,
        )

    def device(self, node: ast.expr) -> torch.device:
        try:
            return torch.device(self.literal(node, str, "a device in quotes"))
        except RuntimeError as error:
            raise self.wrong(node, str(error).splitlines()[0], "a device") from None

    # --- operations with a block --------------------------------------------------------------------------------------

    def block(self, call: ast.Call, body: list[ast.stmt]) -> Operation:
        word, args, keywords = self.call(call, "an operation")
        match word, args:
            case "attention", _:
                return self.attention(call, body)
            case "compute", []:
                axes = self.open(keywords)
                return Compute(axes, tuple(self.stores(body)))
            case "reduce", [kind, outer, over]:
                axes, reduced = self.loops(outer, "axes"), self.loops(over, "over")
                values, destinations = self.results(body, "reduced")
                return Reduce(axes, reduced, self.literal(kind, str, "a kind in quotes"), values, destinations)
            case "scan", [name, outer, along]:
                combine = self.combine(name, body)
                axes, (one,) = self.loops(outer, "axes"), self.loops(along, "along", 1)
                values, destinations = self.results(body, "scanned")
                return Scan(axes, one, combine, values, destinations)
            case "sort", [outer, along]:
                axes, (one,) = self.loops(outer, "axes"), self.loops(along, "along", 1)
                flags = {name: self.literal(value, bool, "True or False") for name, value in keywords.items()}
                if not flags.keys() <= {"descending", "stable"}:
                    raise self.wrong(call, f"unknown argument among {', '.join(flags)}", "descending=, stable=")
                values, destinations = self.results(body, "sorted")
                return Sort(axes, one, values, destinations, **flags)
        forms = "compute(i0=8), reduce(kind, axes(), over()), scan(name, axes(), along()), sort(axes(), along())"
        forms += ", attention(...)"
        raise self.unexpected(call, forms)

    def open(self, extents: dict[str, ast.expr]) -> tuple[Axis, ...]:
        """Axes from `name=extent`, in scope from here."""
        axes = tuple(axis(name, self.index(extent)) for name, extent in extents.items())
        self.axes.update({item.name: item for item in axes})
        return axes

    def loops(self, node: ast.expr, word: str, count: int | None = None) -> tuple[Axis, ...]:
        """`axes(i0=8, i1=s0)`."""
        name, args, extents = self.call(node, f"{word}(name=extent)")
        if name != word or args or (count is not None and len(extents) != count):
            raise self.unexpected(node, f"{word}(name=extent)")
        return self.open(extents)

    def combine(self, name: ast.expr, body: list[ast.stmt]) -> Combine:
        """The name of a scan's function, and its results where the block begins with them."""
        word = self.literal(name, str, "a name in quotes")
        match body[0]:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="combine")))], body=inner):
                body.pop(0)
                call = self.last_call(inner, "results")
                results = tuple(map(self.value, call.args))
                self.values = {}
                return Combine(word, results)
        return Combine(word)

    def last_call(self, body: list[ast.stmt], word: str) -> ast.Call:
        """Values, then `word(...)`."""
        *values, last = body
        self.declarations(values)
        match last:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name == word:
                return call
        raise self.unexpected(last, f"{word}(...), as the last statement")

    def declarations(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if not isinstance(statement, ast.AnnAssign):
                raise self.unexpected(statement, "a value, as v0: f32 = x[i0]")
            self.declare(statement)

    def results(self, body: list[ast.stmt], word: str) -> tuple[tuple[Expr, ...], tuple[Destination | None, ...]]:
        """Values, then `destination, _ = word(value)`."""
        *values, last = body
        match last:
            case ast.Assign(targets=[left], value=ast.Call(func=ast.Name(id=name)) as call) if name == word:
                self.declarations(values)
                places = left.elts if isinstance(left, ast.Tuple) else [left]
                return tuple(map(self.value, call.args)), tuple(map(self.destination, places))
        return tuple(map(self.value, self.last_call(body, word).args)), ()

    def destination(self, node: ast.expr) -> Destination | None:
        return None if isinstance(node, ast.Name) and node.id == "_" else Destination(*self.element(node))

    def stores(self, body: list[ast.stmt]) -> list[Store]:
        found: list[Store] = []
        for statement in body:
            match statement:
                case ast.AnnAssign():
                    self.declare(statement)
                case ast.Assign(targets=[ast.Subscript() as place], value=value):
                    found.append(Store(*self.element(place), self.value(value)))
                case ast.Expr(ast.Call(func=ast.Attribute(value=place, attr=mode), args=[value])) if mode in MODES:
                    found.append(Store(*self.element(place), self.value(value), mode))  # type: ignore[arg-type]
                case ast.Pass():
                    pass
                case _:
                    raise self.unexpected(statement, f"a value, x[i0] = v0, or x[i0].{{{', '.join(MODES[1:])}}}(v0)")
        return found

    # --- operations in one line ---------------------------------------------------------------------------------------

    def one_line(self, node: ast.Call) -> Operation:
        word, _, _ = self.call(node, "an operation")
        forms: dict[str, Callable[[ast.Call], Operation]] = {
            "call": self.operator_call,
            "collective": lambda node: Collective(self.operator_call(self.bound(node, "call")["call"])),
            "user_kernel": lambda node: UserKernel(self.operator_call(self.bound(node, "call")["call"])),
            "template": self.template,
            "wait": self.wait,
            "copy": self.copy,
            "allocate": lambda node: Allocate(self.name(self.bound(node, "target")["target"])),
            "seeds": lambda node: Seeds(self.name(self.bound(node, "target")["target"])),
            "random_state": self.random_state,
            "branch": self.branch,
            "loop": self.loop,
            "invoke": self.invoke,
        }
        if word not in forms:
            raise self.wrong(node, f"no operation {word!r}", f"one of {', '.join(forms)}")
        return forms[word](node)

    def template(self, node: ast.Call) -> Template:
        parts = self.bound(node, "kind", "call")
        kind: Any = self.choice(parts["kind"], ("matmul", "convolution", "attention"))
        return Template(kind, self.operator_call(parts["call"]))

    def wait(self, node: ast.Call) -> Wait:
        parts = self.bound(node, "call", "holds")
        return Wait(self.operator_call(parts["call"]), self.names(parts.get("holds")))

    def copy(self, node: ast.Call) -> DeviceCopy:
        parts = self.bound(node, "source target", "blocking")
        blocking = self.literal(parts["blocking"], bool, "True or False") if "blocking" in parts else True
        return DeviceCopy(self.name(parts["source"]), self.name(parts["target"]), blocking)

    def random_state(self, node: ast.Call) -> RandomState:
        parts = self.bound(node, "device seed draws", "aligned multiples")
        draws = []
        for item in self.items(parts["draws"]):
            match item:
                case ast.Tuple(elts=[ast.Name(id=name), blocks]):
                    draws.append((self.symbol(item, name), self.index(blocks)))
                case _:
                    raise self.unexpected(item, "(symbol, blocks)")
        seed = self.symbol(node, self.name(parts["seed"]))
        multiples = []
        for item in self.items(parts["multiples"]) if "multiples" in parts else ():
            match item:
                case ast.Tuple(elts=[index, divisor]):
                    multiples.append((self.index(index), self.literal(divisor, int, "a number")))
                case _:
                    raise self.unexpected(item, "(number, divisor)")
        aligned = self.names(parts.get("aligned"))
        return RandomState(self.device(parts["device"]), seed, tuple(draws), aligned, tuple(multiples))

    # --- control flow -------------------------------------------------------------------------------------------------

    def sub_program(self, node: ast.expr) -> Program:
        name = self.name(node, "the name of a function")
        if name not in self.programs:
            raise self.wrong(node, f"no function {name!r}", "a function defined before")
        return self.programs[name]

    def arguments(self, node: ast.expr) -> tuple[CallArgument, ...]:
        return tuple(map(self.argument, self.items(node)))

    def branch(self, node: ast.Call) -> If:
        parts = self.bound(node, "predicate then otherwise operands", "results")
        said = parts["predicate"]
        is_buffer = isinstance(said, ast.Name) and said.id not in self.symbols
        predicate: str | Index = self.name(said) if is_buffer else self.index(said)
        return If(
            predicate,
            self.sub_program(parts["then"]),
            self.sub_program(parts["otherwise"]),
            self.arguments(parts["operands"]),
            self.result_names(parts.get("results")),
        )

    def loop(self, node: ast.Call) -> While:
        parts = self.bound(node, "condition body carried constants", "results stacked")
        return While(
            self.sub_program(parts["condition"]),
            self.sub_program(parts["body"]),
            self.arguments(parts["carried"]),
            self.arguments(parts["constants"]),
            self.result_names(parts.get("results")),
            self.literal(parts["stacked"], bool, "True or False") if "stacked" in parts else False,
        )

    def invoke(self, node: ast.Call) -> Invoke:
        parts = self.bound(node, "body operands", "results")
        body = self.sub_program(parts["body"])
        return Invoke(body, self.arguments(parts["operands"]), self.result_names(parts.get("results")))


def outputs_of(node: ast.Return) -> list[ast.expr]:
    if node.value is None:
        return []
    return node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
