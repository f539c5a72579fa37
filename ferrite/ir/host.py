"""The host program: what runs in Python around the kernels, as plain data.

    program  = HostProgram(name, inputs, steps, outputs)
    step     = Bind(symbol, tensor, query, axis)            s0 = x.size(1)
             | Evaluate(result, function, args)             mul = s0 * 2           numbers and tuples, no tensor work
             | Allocate(result, sizes, strides, ...)        buf = empty((s0, 4))
             | Call(result, operator, args, kwargs, ...)    add = aten_add(x, y)   one eager operator
             | Restride(result, source, strides)            out = copy of x with eager's strides
             | Free(names)                                  del x, y
    argument = Ref(name) | Constant(name) | Literal(text) | Sequence(kind, items) | Mapping(items) | Slice(...)

Meaning: the inputs arrive in one list, which is emptied at once, so that the program alone decides how long they live.
Steps run in order. A name is bound once. Literals are Python source, so that programs compare and hash by text
whatever the value (NaN, -0.0). Objects that have no source form (tensor constants, sub-graphs) are named here and
supplied when the program is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal as OneOf

from ferrite.graph import ModelLine

NameList = tuple[str, ...]


@dataclass(frozen=True)
class Ref:
    """A value that an input or an earlier step bound."""

    name: str


@dataclass(frozen=True)
class Constant:
    """An object without a source form, supplied when the program is loaded."""

    name: str


@dataclass(frozen=True)
class Literal:
    """Python source of a value: `2`, `float('nan')`, `torch.float32`."""

    text: str


@dataclass(frozen=True)
class Sequence:
    kind: OneOf["list", "tuple"]
    items: tuple[Argument, ...]


@dataclass(frozen=True)
class Mapping:
    items: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True)
class Slice:
    start: Argument
    stop: Argument
    step: Argument


Argument = Ref | Constant | Literal | Sequence | Mapping | Slice


@dataclass(frozen=True)
class Input:
    """One argument: `about` describes it to a reader; static: same address on every call; donated: ours to reuse."""

    name: str
    about: str
    static: bool = False
    donated: bool = False


@dataclass(frozen=True)
class Bind:
    """Read a symbol from a tensor that carries it."""

    symbol: str
    tensor: str
    query: OneOf["size", "stride"]
    axis: int


@dataclass(frozen=True)
class Evaluate:
    """Python arithmetic on numbers, or taking a tuple apart. `function` is a key of `codegen.host.SPELLINGS`
    or the importable name of a function."""

    result: str
    function: str
    args: tuple[Argument, ...]


@dataclass(frozen=True)
class Allocate:
    """Memory with undefined contents. `strides` None means contiguous."""

    result: str
    sizes: tuple[Argument, ...]
    strides: tuple[Argument, ...] | None
    dtype: Literal
    device: Literal
    line: ModelLine | None


@dataclass(frozen=True)
class Call:
    """One operator, in eager, and why it is not compiled. `operator` is a path under torch.ops, or a Constant;
    `result` is None where nobody reads it."""

    result: str | None
    operator: str | Constant
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    reason: str
    line: ModelLine | None
    about: str = ""


@dataclass(frozen=True)
class Restride:
    """Copy a value into the strides that eager gives it; each stride is a Python expression over bound symbols."""

    result: str
    source: str
    strides: tuple[str, ...]
    symbols: NameList = ()


@dataclass(frozen=True)
class Free:
    """Forget these values: their last use is behind."""

    names: NameList


Step = Bind | Evaluate | Allocate | Call | Restride | Free


@dataclass(frozen=True)
class HostProgram:
    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Argument, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(step for step in self.steps if isinstance(step, Call))


def references(*arguments: Argument) -> Iterator[str]:
    """The names that arguments read, in order, constants left out."""
    for argument in arguments:
        match argument:
            case Ref(name):
                yield name
            case Sequence(_, items):
                yield from references(*items)
            case Mapping(items):
                yield from references(*(value for _, value in items))
            case Slice(start, stop, step):
                yield from references(start, stop, step)
            case _:
                pass


def reads(step: Step) -> Iterator[str]:
    """The names that a step reads."""
    match step:
        case Bind(_, tensor):
            yield tensor
        case Evaluate(_, _, args):
            yield from references(*args)
        case Allocate(_, sizes, strides):
            yield from references(*sizes, *(strides or ()))
        case Call(_, _, args, kwargs):
            yield from references(*args, *(value for _, value in kwargs))
        case Restride(_, source, _, symbols):
            yield source
            yield from symbols
        case Free(names):
            yield from names


def binds(step: Step) -> str | None:
    """The name that a step binds."""
    match step:
        case Bind(symbol):
            return symbol
        case Free():
            return None
        case _:
            return step.result
