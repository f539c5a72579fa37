"""Read back what `ferrite.ir.program.spelling` writes: indices, scalar expressions, arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ferrite.errors import UserError, nearest
from ferrite.ir.expr import COMPLAINT, Cast, Const, Data, Expr, IndexValue, Load, Local, Masked, Op, Param, Random
from ferrite.ir.index.algebra import Axis, Index, Symbol, add, maximum, minimum, number, symbol
from ferrite.ir.program import arguments as host
from ferrite.ir.program.nodes import CallArgument, Scalar, Size
from ferrite.ir.program.spelling import one_parser, reads_as_literal
from ferrite.ir.scalar import OPERATORS
from ferrite.ir.types import LONG, bits_of, foldable, is_integer, short


class BadText(UserError):
    """Text that is no program or kernel: which line, what stands there, and what was expected."""

    def __init__(self, line: int, problem: str, expected: str | None = None, text: str | None = None) -> None:
        super().__init__(f"line {line}: {problem}", {"expected": expected, "text": text})
        self.line = line


class Source:
    """The text, and what stands where in it."""

    def __init__(self, text: str) -> None:
        self.lines = text.encode().split(b"\n")
        try:
            with one_parser:
                self.tree = ast.parse(text)
        except SyntaxError as error:
            raise BadText(error.lineno or 1, error.msg, "Python syntax", (error.text or "").strip()) from None
        except ValueError as error:  # a null byte
            raise BadText(1, str(error), "Python syntax") from None

    def segment(self, node: ast.AST) -> str:
        place: Any = node  # only expressions and statements are asked for, and those have a place
        first, last, start, end = place.lineno - 1, place.end_lineno - 1, place.col_offset, place.end_col_offset
        if first == last:
            return str(self.lines[first][start:end], "utf-8")
        parts = [self.lines[first][start:], *self.lines[first + 1 : last], self.lines[last][:end]]
        return str(b"\n".join(parts), "utf-8")

    def wrong(self, node: ast.AST, problem: str, expected: str | None = None) -> BadText:
        line = getattr(node, "lineno", 1)
        return BadText(line, problem, expected, self.lines[line - 1].decode().strip())

    def one_function(self) -> ast.FunctionDef:
        match self.tree.body:
            case [ast.FunctionDef() as function]:
                return function
        where = self.tree.body[-1] if self.tree.body else self.tree
        raise self.wrong(where, f"{len(self.tree.body)} statements", "one function")


class Reader:
    """Reads expressions; knows the names in scope."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.symbols: dict[str, Symbol] = {}
        self.axes: dict[str, Axis] = {}
        self.values: dict[str, Expr] = {}
        self.locals: dict[str, Local] = {}

    def wrong(self, node: ast.AST, problem: str, expected: str | None = None) -> BadText:
        return self.source.wrong(node, problem, expected)

    def unexpected(self, node: ast.AST, expected: str) -> BadText:
        return self.wrong(node, f"unexpected {self.source.segment(node)!r}", expected)

    # --- small things -------------------------------------------------------------------------------------------------

    def name(self, node: ast.AST, expected: str = "a name") -> str:
        if isinstance(node, ast.Name):
            return node.id
        raise self.unexpected(node, expected)

    def literal(self, node: ast.AST, kind: type | tuple[type, ...], expected: str) -> Any:
        """A plain Python constant of this kind."""
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            raise self.unexpected(node, expected) from None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.unexpected(node, expected)
        return value

    def items(self, node: ast.AST, expected: str = "a list") -> list[ast.expr]:
        if isinstance(node, ast.List):
            return node.elts
        raise self.unexpected(node, expected)

    def call(self, node: ast.AST, expected: str) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
        """A call by its function's name, arguments and keywords."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self.unexpected(node, expected)
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(word.arg is None for word in node.keywords):
            raise self.unexpected(node, "arguments without stars")
        return node.func.id, node.args, {word.arg: word.value for word in node.keywords if word.arg is not None}

    def bound(self, node: ast.Call, required: str, optional: str = "") -> dict[str, ast.expr]:
        """The arguments of a call by name: the required in order, the optional as keywords or in order."""
        _, args, keywords = self.call(node, "a call")
        needed, all_names = required.split(), [*required.split(), *optional.split()]
        shape = f"{ast.unparse(node.func)}({', '.join([*needed, *(f'{name}=' for name in optional.split())])})"
        if len(args) > len(all_names):
            raise self.wrong(node, f"{len(args)} arguments", shape)
        found = dict(zip(all_names, args, strict=False))
        for name, value in keywords.items():
            if name not in all_names or name in found:
                raise self.wrong(value, f"argument {name!r} {'twice' if name in found else 'is unknown'}", shape)
            found[name] = value
        missing = [name for name in needed if name not in found]
        if missing:
            raise self.wrong(node, f"no argument {missing[0]!r}", shape)
        return found

    def declared(self, name: str, node: ast.Call) -> Symbol:
        """A symbol, as its declaration says."""
        arguments = self.bound(node, "low high", "likely").values()
        return symbol(name, *(self.literal(item, (int, type(None)), "a number or None") for item in arguments))

    def dtype(self, node: ast.AST) -> torch.dtype:
        name = self.name(node, "an element type, as f32")
        found = LONG.get(name) or getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise self.wrong(node, f"no element type {name!r}", f"one of {', '.join(LONG)}")
        return found

    # --- indices ------------------------------------------------------------------------------------------------------

    def index(self, node: ast.AST) -> Index:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return number(value)
            case ast.Name(id=name):
                return self.atom(node, name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.index(operand)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return add(self.terms(node, 1))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self.index(left) * self.index(right)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return self.index(left) // self.divisor(right)
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                return self.index(left) % self.divisor(right)
            case ast.Call(func=ast.Name(id="min"), args=[_, *_]):
                return minimum(*map(self.index, node.args))
            case ast.Call(func=ast.Name(id="max"), args=[_, *_]):
                return maximum(*map(self.index, node.args))
            case ast.Call(func=ast.Name(id="data")):
                parts = self.bound(node, "value extent", "complaint")
                complaint = COMPLAINT
                if "complaint" in parts:
                    complaint = self.literal(parts["complaint"], str, "an error message")
                return Data.intern(self.value(parts["value"]), self.index(parts["extent"]), complaint)
        raise self.unexpected(node, "an index: numbers, axes and symbols with + - * // %, min, max, data")

    def terms(self, node: ast.AST, sign: int) -> list[tuple[Index, int]]:
        """The terms of a sum, all at once, as they were when it was made."""
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.terms(left, sign) + self.terms(right, sign)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return self.terms(left, sign) + self.terms(right, -sign)
        return [(self.index(node), sign)]

    def divisor(self, node: ast.AST) -> Index:
        found = self.index(node)
        if found.low == 0 == found.high:
            raise self.wrong(node, "division by zero")
        return found

    def atom(self, node: ast.AST, name: str) -> Index:
        found = self.axes.get(name) or self.symbols.get(name)
        if found is None:
            close = nearest(name, [*self.axes, *self.symbols])
            raise self.wrong(node, f"no axis or symbol {name!r}", close and f"perhaps {close}")
        return found

    def indices(self, nodes: Iterable[ast.AST]) -> tuple[Index, ...]:
        return tuple(map(self.index, nodes))

    def element(self, node: ast.AST) -> tuple[str, tuple[Index, ...]]:
        """`x[i0, i1 + 2]`: the buffer and the coordinates."""
        if not isinstance(node, ast.Subscript):
            raise self.unexpected(node, "an element of a buffer, as x[i0, i1]")
        place = node.slice
        coordinates = place.elts if isinstance(place, ast.Tuple) else [place]
        return self.name(node.value, "the name of a buffer"), self.indices(coordinates)

    # --- scalar expressions -------------------------------------------------------------------------------------------

    def value(self, node: ast.AST) -> Expr:
        """An operand: the name of a value, or a constant."""
        match node:
            case ast.Name(id=name):
                found = self.values.get(name) or self.locals.get(name)
                if found is not None:
                    return found
                close = nearest(name, [*self.values, *self.locals])
                raise self.wrong(node, f"no value {name!r}", close and f"perhaps {close}")
            case ast.Call(func=ast.Name(id=name)) if name in LONG:
                return self.constant(node)
        raise self.unexpected(node, "a value, as v0 or f32(1.5)")

    def constant(self, node: ast.Call) -> Const:
        dtype = self.dtype(node.func)
        _, args, keywords = self.call(node, "a constant")
        if not args and list(keywords) == ["bits"]:
            bits = self.literal(keywords["bits"], int, "an integer")
            if bits < 0 or bits >> (8 * dtype.itemsize):
                raise self.wrong(node, f"bits that do not fit {8 * dtype.itemsize}")
            return Const.intern(dtype, bits)
        if len(args) != 1 or keywords:
            raise self.unexpected(node, "one number, or bits=")
        return Const.intern(dtype, bits_of(self.decimal(args[0], dtype), dtype))

    def decimal(self, node: ast.expr, dtype: torch.dtype) -> bool | int | float | complex:
        if not foldable(dtype):
            raise self.wrong(node, f"a decimal number as {short(dtype)}", "bits=")
        if is_integer(dtype):
            whole: int = self.literal(node, bool if dtype is torch.bool else int, "a number of this type")
            return whole
        sign, inner = 1.0, node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, inner = -1.0, node.operand
        if isinstance(inner, ast.Name) and inner.id in ("inf", "nan"):
            return sign * float(inner.id)
        kinds = (int, float, complex) if dtype.is_complex else (int, float)
        found: int | float | complex = self.literal(node, kinds, "a number of this type")
        return found

    def declare(self, node: ast.AnnAssign) -> None:
        """`v0: f32 = x[i0]`."""
        name = self.name(node.target)
        if name in self.values:
            raise self.wrong(node, f"{name} is defined twice")
        if node.value is None:
            raise self.wrong(node, f"{name} has no value", "name: type = value")
        self.values[name] = self.definition(node.value, self.dtype(node.annotation))

    def definition(self, node: ast.expr, dtype: torch.dtype) -> Expr:
        if isinstance(node, ast.Subscript):
            buffer, coordinates = self.element(node)
            return Load.intern(buffer, coordinates, dtype)
        name, args, keywords = self.call(node, "a load, an operator or a cast")
        assert isinstance(node, ast.Call)
        special = self.special().get(name)
        if special is not None:
            parts, make = special
            return make(list(self.bound(node, parts).values()), dtype)
        if name not in OPERATORS:
            close = nearest(name, OPERATORS)
            raise self.wrong(node, f"no operator {name!r}", close and f"perhaps {close}")
        if keywords or len(args) != OPERATORS[name].arity:
            raise self.wrong(node, f"{len(args)} operands", f"{OPERATORS[name].arity} for {name}")
        return Op.intern(name, tuple(map(self.value, args)), dtype)

    def special(self) -> Mapping[str, tuple[str, Callable[[list[ast.expr], torch.dtype], Expr]]]:
        """What stands in a definition and is no operator: its arguments, and the node they make."""
        text, position = "a string", "a position"
        return {
            "index": ("index", lambda parts, dtype: IndexValue.intern(self.index(parts[0]), dtype)),
            "cast": ("value", lambda parts, dtype: Cast.intern(self.value(parts[0]), dtype)),
            "masked": ("mask value other", lambda parts, dtype: Masked.intern(*map(self.value, parts), dtype)),
            "param": ("position", lambda parts, dtype: Param.intern(self.literal(parts[0], int, position), dtype)),
            "random": (
                "kind seed counter stream",
                lambda parts, dtype: Random.intern(
                    self.literal(parts[0], str, text), self.value(parts[1]), *map(self.index, parts[2:]), dtype
                ),
            ),
        }

    # --- arguments of calls -------------------------------------------------------------------------------------------

    def argument(self, node: ast.AST) -> CallArgument:
        match node:
            case ast.Name(id=name):
                return host.Ref(name)
            case ast.List(elts=items):
                return host.Sequence("list", tuple(map(self.argument, items)))  # type: ignore[arg-type]
            case ast.Tuple(elts=items):
                return host.Sequence("tuple", tuple(map(self.argument, items)))  # type: ignore[arg-type]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(map(self.literal_text, keys), map(self.argument, values), strict=True)
                return host.Mapping(tuple(pairs))  # type: ignore[arg-type]
            case ast.Call(func=ast.Name(id="constant")):
                return host.Constant(self.literal(self.bound(node, "name")["name"], str, "a name in quotes"))
            case ast.Call(func=ast.Name(id="size")):
                return Size(self.index(self.bound(node, "index")["index"]))
            case ast.Call(func=ast.Name(id="scalar")):
                return Scalar(self.value(self.bound(node, "value")["value"]))
            case ast.Call(func=ast.Name(id="slice")):
                parts = self.bound(node, "start stop step").values()
                return host.Slice(*map(self.argument, parts))  # type: ignore[arg-type]
        return host.Literal(self.literal_text(node))

    def literal_text(self, node: ast.AST | None) -> str:
        match node:
            case ast.Call(func=ast.Name(id="literal")):
                text: str = self.literal(self.bound(node, "text")["text"], str, "source in quotes")
                return text
            case ast.expr() if reads_as_literal(node):
                return self.source.segment(node)
        raise self.unexpected(node or self.source.tree, "an argument")
