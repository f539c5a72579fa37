"""How the parts of programs and kernels are written: constants, indices, scalar expressions, arguments.

Everything is Python source, so that `ast` reads it. `Values` writes an expression one node per line, each node once:

    v0: f32 = x[i0, i1]
    v1: f32 = mul(v0, f32(2.0))

A constant stands where it is used: by its decimal text where that gives back the same bits, else by its bits.
"""

from __future__ import annotations

import ast
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

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
    complaint_text,
    nodes_of,
)
from ferrite.ir.index.algebra import TEXT, Atom, Index
from ferrite.ir.program import arguments as host
from ferrite.ir.program.nodes import CallArgument, Scalar, Size
from ferrite.ir.types import bits_of, foldable, short, value_of

LITERAL_CALLS = ("float", "complex")  # functions that literals may call, beside those of torch


# --- constants --------------------------------------------------------------------------------------------------------


def constant_text(const: Const) -> str:
    """`f32(0.1)`, `b8(True)`, `f32(bits=0x7fc00001)`."""
    return _constant_text(const.dtype, const.bits)


@functools.lru_cache(maxsize=4096)
def _constant_text(dtype: torch.dtype, bits: int) -> str:
    for text, value in _decimals(value_of(bits, dtype)) if foldable(dtype) else ():
        if bits_of(value, dtype) == bits:
            return f"{short(dtype)}({text})"
    return f"{short(dtype)}(bits={bits:#x})"


def _decimals(value: bool | int | float | complex) -> Iterable[tuple[str, bool | int | float | complex]]:
    """Texts of a number, the shortest first, each with the number that reading it gives."""
    if isinstance(value, float):
        for digits in (3, 6, 9, 17):
            rounded = float(f"{value:.{digits}g}")
            yield repr(rounded), rounded
    elif isinstance(value, complex):
        text = repr(value).strip("()")
        if "n" not in text:  # neither nan nor inf, which have no literal
            yield text, ast.literal_eval(text)
    else:
        yield repr(value), value


# --- indices and expressions ------------------------------------------------------------------------------------------


def index_text(index: Index, data: Callable[[Data], str] | None = None) -> str:
    """An index as Python source; `data` writes the values that it reads from memory."""
    if data is None or not any(isinstance(atom, Data) for atom in index.atoms):
        return index.text

    def show(item: Index) -> str:
        if isinstance(item, Data):
            return data(item)
        return item.text if isinstance(item, Atom) else item.spell(show)

    return show(index)


def element_text(buffer: str, coordinates: Sequence[Index], index: Callable[[Index], str] = TEXT) -> str:
    """`x[i0, i1 + 2]`; `x[()]` where there is no dimension."""
    return f"{buffer}[{', '.join(map(index, coordinates)) or '()'}]"


def node_text(item: Expr, value: Callable[[Expr], str], index: Callable[[Index], str]) -> str:
    """One node, its operands and indices as the functions say. The type of the result is not part of it."""
    match item:
        case Const():
            return constant_text(item)
        case IndexValue():
            return f"index({index(item.index)})"
        case Load():
            return element_text(item.buffer, item.coordinates, index)
        case Op():
            return f"{item.name}({', '.join(map(value, item.operands))})"
        case Cast():
            return f"cast({value(item.arg)})"
        case Masked():
            return f"masked({', '.join(map(value, item.args))})"
        case Random():
            return f"random({item.kind!r}, {value(item.seed)}, {index(item.counter)}, {index(item.stream)})"
        case Param():
            return f"param({item.position})"
        case Local():
            return item.name
    raise TypeError(f"no text for {type(item).__name__}")


class Values:
    """Writes expressions as lines, and answers with the name of each."""

    def __init__(self, prefix: str = "v", count: Iterator[int] | None = None) -> None:
        self.prefix, self.count = prefix, itertools.count() if count is None else count
        self.names: dict[Expr, str] = {}
        self.lines: list[str] = []
        self.note: Callable[[Expr], str] = lambda value: ""  # behind the line that computes a value

    def declare(self, *roots: Expr) -> None:
        """Write the lines of these expressions and of all they need."""
        for item in nodes_of(*roots, leaving_out=self.names):
            if not isinstance(item, Const | Local):
                text = node_text(item, self.value, self.index)
                self.names[item] = name = f"{self.prefix}{next(self.count)}"
                self.lines.append(f"{name}: {short(item.dtype)} = {text}{self.note(item)}")

    def value(self, item: Expr) -> str:
        if isinstance(item, Const | Local):
            return node_text(item, self.value, self.index)
        if item not in self.names:
            self.declare(item)
        return self.names[item]

    def index(self, index: Index) -> str:
        return index_text(index, self.data)

    def data(self, atom: Data) -> str:
        return f"data({self.value(atom.value)}, {self.index(atom.extent)}{complaint_text(atom.complaint)})"

    def element(self, buffer: str, coordinates: Sequence[Index]) -> str:
        return element_text(buffer, coordinates, self.index)

    def take(self) -> list[str]:
        """The lines written since the last time."""
        lines, self.lines = self.lines, []
        return lines


def prefix_beside(names: Iterable[str]) -> str:
    """What names of values begin with, so that none is one of these."""
    taken = [name for name in names if name.startswith("v")]
    prefix = "v"
    while any(name[len(prefix) :].isdigit() and name.startswith(prefix) for name in taken):
        prefix += "_"
    return prefix


# --- arguments of calls -----------------------------------------------------------------------------------------------


def argument_text(argument: CallArgument, values: Values) -> str:
    def inner(item: CallArgument) -> str:
        return argument_text(item, values)

    match argument:
        case host.Ref(name):
            return name
        case host.Constant(name):
            return f"constant({name!r})"
        case host.Literal(text):
            return literal_text(text)
        case Size(index):
            return f"size({values.index(index)})"
        case Scalar(value):
            return f"scalar({values.value(value)})"
        case host.Sequence("list", items):
            return f"[{', '.join(map(inner, items))}]"
        case host.Sequence(_, items):
            return f"({inner(items[0])},)" if len(items) == 1 else f"({', '.join(map(inner, items))})"
        case host.Mapping(items):
            return f"{{{', '.join(f'{literal_text(key)}: {inner(value)}' for key, value in items)}}}"
        case host.Slice(start, stop, step):
            return f"slice({inner(start)}, {inner(stop)}, {inner(step)})"
    raise TypeError(f"no text for {argument!r}")


def literal_text(text: str) -> str:
    """A literal as it stands where that cannot be taken for something else."""
    return text if is_plain_literal(text) else f"literal({text!r})"


# Python 3.11 counts the depth of all trees that are being built in one number: two threads at once may raise an error.
one_parser = threading.Lock()


@functools.lru_cache(maxsize=4096)
def is_plain_literal(text: str) -> bool:
    try:
        with one_parser:
            node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    whole = node.col_offset == 0 and node.end_lineno == 1 and node.end_col_offset == len(text.encode())
    return whole and "\n" not in text and reads_as_literal(node)


def reads_as_literal(node: ast.expr) -> bool:
    """Whether source is taken for a literal: a constant, a name under torch, a call of one or of float and complex."""
    match node:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in LITERAL_CALLS
        case ast.Call(func=function):
            return reads_as_literal(function)
        case ast.Attribute(value=inner):
            return (isinstance(inner, ast.Name) and inner.id == "torch") or reads_as_literal(inner)
    return False
