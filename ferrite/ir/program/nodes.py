"""The program: what a graph computes, before anything is decided about how.

    program   = Program(name, inputs, buffers, operations, outputs)
    buffer    = Buffer(name, dtype, sizes, strides, offset, device, kind, base)
    operation = Compute(axes, stores)                          every store, at every point of the axes
              | Reduce(axes, reduced, kind, values, destinations)    combine over `reduced`, at every point of the axes
              | Scan(axes, along, combine, values, destinations)     inclusive prefixes along one of the axes
              | Sort(axes, along, keys, destinations, descending, stable)
              | Attention(axes, group, rows, keys, ...)        softmax of scores, times values; or gradients of that
              | Call(operator, args, kwargs, results, ...)     one operator of torch, and why it is not compiled
              | Template(kind, call)                           matrix products, convolutions, attention
              | Collective(call) | Wait(call)                  a collective operation begins; its result may be used
              | UserKernel(call)                               a kernel the user wrote
              | If(predicate, then, otherwise, operands, results)
              | While(condition, body, carried, constants, results)
              | Invoke(body, operands, results)                a sub-program that several places share
              | Allocate(target)                               memory whose contents do not matter
              | DeviceCopy(source, target) | Seeds(target)     bytes to another device; fresh random seeds
              | RandomState(device, seed, draws)               what random numbers are counted from; the generator moves
              | Item(symbol, source) | Bind(symbol, buffer, query, axis)    numbers that data decides
              | Assert(condition, message, error)
    store     = Store(buffer, coordinates, value, mode)        mode: set, or how to combine with what is there

Meaning: operations run in order; that order is the meaning, and nothing but the dependences that `reads` and `writes`
answer may be used to change it. A buffer is a strided view of a storage: its own (`owned`), one that the caller holds
(`input`), one that came in and is ours now (`donated`), a `constant`, or, with `base`, that of another buffer (`view`;
the base is never a view). What only calls understand (a sparse tensor, an object) is `foreign`. Sizes are index
expressions; a number is the special case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal as OneOf

import torch

from ferrite.ir.expr import Expr
from ferrite.ir.index.algebra import Index, Symbol
from ferrite.ir.program.arguments import Argument, Constant, Mapping, Ref, Sequence, Slice
from ferrite.ir.program.loop_operations import NOWHERE, LoopOperation, Origin, Sizes

Kind = OneOf["owned", "input", "donated", "constant", "view", "foreign"]


@dataclass(frozen=True)
class Buffer:
    """Strides and offset are in elements. `base` names the buffer whose storage a view looks at."""

    name: str
    dtype: torch.dtype
    sizes: Sizes
    strides: Sizes
    offset: Index
    device: torch.device
    kind: Kind = "owned"
    base: str | None = None

    @property
    def storage(self) -> str:
        return self.base or self.name


@dataclass(frozen=True)
class Size:
    """An index expression as an argument of a call."""

    index: Index


@dataclass(frozen=True)
class Scalar:
    """A number that is no index, as an argument of a call: an expression without axes."""

    value: Expr


CallArgument = Argument | Size | Scalar


@dataclass(frozen=True)
class Call:
    """One operator, in eager. `results` are buffers in the order of the operator's (flattened) results, None where a
    result is not used or no tensor; `packed`: the operator returns a tuple or list. `writes`: buffers it changes.
    `aliases`: (result, buffer whose memory it shares). `effect`: calls with the same effect keep their order and are
    never dropped."""

    operator: str | Constant
    args: tuple[CallArgument, ...]
    kwargs: tuple[tuple[str, CallArgument], ...]
    results: tuple[str | Symbol | None, ...]
    packed: bool = False
    writes: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    effect: str | None = None
    reason: str = ""
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Template:
    """A call of a kind that a scheduler may do in another way than torch does."""

    kind: OneOf["matmul", "convolution", "attention"]
    call: Call

    @property
    def origin(self) -> Origin:
        return self.call.origin


@dataclass(frozen=True)
class Collective:
    call: Call

    @property
    def origin(self) -> Origin:
        return self.call.origin


@dataclass(frozen=True)
class Wait:
    """`holds`: what the collective reads and writes until now."""

    call: Call
    holds: tuple[str, ...] = ()

    @property
    def origin(self) -> Origin:
        return self.call.origin


@dataclass(frozen=True)
class UserKernel:
    call: Call

    @property
    def origin(self) -> Origin:
        return self.call.origin


@dataclass(frozen=True)
class If:
    """`predicate`: a buffer without dimensions, or an index that is not zero for yes."""

    predicate: str | Index
    then: Program
    otherwise: Program
    operands: tuple[CallArgument, ...]
    results: tuple[str | Symbol | None, ...]
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class While:
    """Run `body` on the carried values while `condition` says yes. `stacked`: results hold every iteration's."""

    condition: Program
    body: Program
    carried: tuple[CallArgument, ...]
    constants: tuple[CallArgument, ...]
    results: tuple[str | Symbol | None, ...]
    stacked: bool = False
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Invoke:
    body: Program
    operands: tuple[CallArgument, ...]
    results: tuple[str | Symbol | None, ...]
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class DeviceCopy:
    source: str
    target: str
    blocking: bool = True
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Allocate:
    """From here on a buffer may be read though nothing was written (`torch.empty`). Other memory needs no such step."""

    target: str
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Seeds:
    """One fresh random integer of 32 bits per element, drawn from the device's own generator. It moves that generator,
    so it is never dropped, and keeps its place among the calls that draw from it."""

    target: str
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class RandomState:
    """Where a GPU's default generator is, for `Random` of the kind `curand_uniform`: its seed becomes a symbol, and for
    each of several draws the block of four words that it begins with. `draws`: these symbols, each with how many
    blocks a stream takes. It moves the generator past them all, so it is never dropped, and keeps its place. `aligned`:
    inputs that lie at multiples of 16 bytes, or else eager would draw other numbers than the program does. `multiples`:
    so with numbers over the sizes that the program is given, each with what it is a multiple of."""

    device: torch.device
    seed: Symbol
    draws: tuple[tuple[Symbol, Index], ...]
    aligned: tuple[str, ...] = ()
    multiples: tuple[tuple[Index, int], ...] = ()
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Item:
    """The one element of a buffer becomes a symbol."""

    symbol: Symbol
    source: str
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Bind:
    """A size, stride or offset of a buffer that came from outside becomes a symbol."""

    symbol: Symbol
    buffer: str
    query: OneOf["size", "stride", "offset"]
    axis: int = 0
    origin: Origin = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Assert:
    """An error with this message where the condition, a scalar without loads, does not hold."""

    condition: Expr
    message: str
    origin: Origin = field(default=NOWHERE, compare=False)
    error: type[Exception] = RuntimeError  # one of ASSERTED


ASSERTED: tuple[type[Exception], ...] = (RuntimeError, IndexError)
Operation = (
    LoopOperation | Call | Template | Collective | Wait | UserKernel | If | While | Invoke
    | Allocate | DeviceCopy | Seeds | RandomState | Item | Bind | Assert
)  # fmt: skip
CALLS = (Template, Collective, Wait, UserKernel)  # operations around one call

# An input is a buffer, a number, or an object that only calls know (a generator, a script object).
Input = str | Symbol | Constant
# An output is a buffer, a number, or what a call could be given.
Output = str | Index | Argument | Scalar


@dataclass(frozen=True)
class Program:
    name: str
    inputs: tuple[Input, ...]
    buffers: tuple[Buffer, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Output, ...]

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def __str__(self) -> str:
        from ferrite.ir.program.text import program_text

        return program_text(self)


def call_of(operation: Operation) -> Call | None:
    """The call inside an operation that is one."""
    if isinstance(operation, Call):
        return operation
    return operation.call if isinstance(operation, CALLS) else None


def argument_names(*arguments: CallArgument) -> Iterator[str]:
    """The buffers that arguments name."""
    for argument in arguments:
        match argument:
            case Ref(name):
                yield name
            case Sequence(_, items):
                yield from argument_names(*items)
            case Mapping(items):
                yield from argument_names(*(value for _, value in items))
            case Slice(start, stop, step):
                yield from argument_names(start, stop, step)
            case _:
                pass


def argument_indices(*arguments: CallArgument) -> Iterator[Index]:
    """The index expressions among arguments."""
    for argument in arguments:
        match argument:
            case Size(index):
                yield index
            case Sequence(_, items):
                yield from argument_indices(*items)
            case Mapping(items):
                yield from argument_indices(*(value for _, value in items))
            case Slice(start, stop, step):
                yield from argument_indices(start, stop, step)
            case _:
                pass


def argument_scalars(*arguments: CallArgument) -> Iterator[Expr]:
    """The scalar expressions among arguments."""
    for argument in arguments:
        match argument:
            case Scalar(value):
                yield value
            case Sequence(_, items):
                yield from argument_scalars(*items)
            case Mapping(items):
                yield from argument_scalars(*(value for _, value in items))
            case Slice(start, stop, step):
                yield from argument_scalars(start, stop, step)
            case _:
                pass
