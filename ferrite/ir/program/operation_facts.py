"""What an operation answers about itself: reads, writes, symbols, axes, cost. All derived, nothing stored by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ferrite.ir.expr import Expr, Load, Op, data_of, indices_of, nodes_of, symbols_in
from ferrite.ir.index.algebra import Axis, Index, Symbol
from ferrite.ir.program.arguments import Ref
from ferrite.ir.program.loop_operations import Attention, Compute, Destination, Reduce, Scan, Sort, Store
from ferrite.ir.program.nodes import (
    Allocate,
    Assert,
    Bind,
    Call,
    CallArgument,
    Collective,
    DeviceCopy,
    If,
    Invoke,
    Item,
    Operation,
    Output,
    Program,
    RandomState,
    Seeds,
    Size,
    UserKernel,
    Wait,
    While,
    argument_indices,
    argument_names,
    argument_scalars,
    call_of,
)
from ferrite.ir.scalar import OPERATORS

Found = TypeVar("Found")


@dataclass(frozen=True)
class Access:
    """Elements of a buffer that an operation accesses: at these coordinates, or all of them (None)."""

    buffer: str
    coordinates: tuple[Index, ...] | None
    mode: str = "set"


def cached_on_operation(
    question: Callable[[Operation], tuple[Found, ...]],
) -> Callable[[Operation], tuple[Found, ...]]:
    """Keeps the answer with the operation, which never changes: every stage asks the same of each again."""
    name = f"_{question.__name__}"

    @functools.wraps(question)
    def answer(operation: Operation) -> tuple[Found, ...]:
        cache = vars(operation)
        if name not in cache:
            cache[name] = question(operation)
        found: tuple[Found, ...] = cache[name]
        return found

    return answer


def expressions(operation: Operation) -> tuple[Expr, ...]:
    """The scalar expressions of a loop operation."""
    match operation:
        case Compute():
            return tuple(store.value for store in operation.stores)
        case Reduce() | Scan() | Attention():
            return operation.values
        case Sort():
            return operation.keys
        case Assert():
            return (operation.condition,)
    return ()


def roots_of(operation: Operation) -> list[Expr]:
    """All expressions that an operation evaluates: its values, and what its coordinates and arguments read."""
    roots = list(expressions(operation))
    for destination in destinations_of(operation):
        for index in destination.coordinates:
            roots += data_of(index)
    roots += argument_scalars(*arguments_of(operation))
    return roots


def arguments_of(operation: Operation) -> tuple[CallArgument, ...]:
    """What an operation hands to an operator or a sub-program."""
    call = call_of(operation)
    if call is not None:
        return (*call.args, *(value for _, value in call.kwargs))
    match operation:
        case If() | Invoke():
            return operation.operands
        case While():
            return (*operation.carried, *operation.constants)
    return ()


def axes_of(operation: Operation) -> tuple[Axis, ...]:
    """The axes of a loop operation."""
    match operation:
        case Compute() | Scan() | Sort():
            return operation.axes
        case Reduce():
            return (*operation.axes, *operation.reduced)
        case Attention():
            return operation.all_axes
    return ()


def destinations_of(operation: Operation) -> tuple[Destination, ...]:
    if isinstance(operation, Reduce | Scan | Sort | Attention):
        return tuple(destination for destination in operation.destinations if destination is not None)
    return tuple(Destination(store.buffer, store.coordinates) for store in stores_of(operation))


def stores_of(operation: Operation) -> tuple[Store, ...]:
    return operation.stores if isinstance(operation, Compute) else ()


@cached_on_operation
def loads(operation: Operation) -> tuple[Load, ...]:
    """The loads in all that an operation evaluates, operands before users."""
    return tuple(item for item in nodes_of(*roots_of(operation)) if isinstance(item, Load))


@cached_on_operation
def reads(operation: Operation) -> tuple[Access, ...]:
    """What an operation reads, in order, each access once."""
    found: dict[Access, None] = {}
    for item in loads(operation):
        found[Access(item.buffer, item.coordinates)] = None
    for store in stores_of(operation):
        if store.mode != "set":
            found[Access(store.buffer, store.coordinates)] = None
    found.update({Access(name, None): None for name in argument_names(*read_arguments(operation))})
    match operation:
        case If(predicate=str(name)):
            found[Access(name, None)] = None
        case Wait():
            found.update({Access(name, None): None for name in operation.holds})
        case DeviceCopy():
            found[Access(operation.source, None)] = None
        case Item():
            found[Access(operation.source, None)] = None
        case Bind():
            found[Access(operation.buffer, None)] = None
    return tuple(found)


def read_arguments(operation: Operation) -> tuple[CallArgument, ...]:
    """What an operation hands over to be read: all of it, but for operands that its sub-programs write and never read.

    One that nobody in there accesses counts: it is handed over, so it must be there.
    """
    if not isinstance(operation, If | While | Invoke):
        return arguments_of(operation)
    bodies = bodies_of(operation)

    def only_written(place: int) -> bool:
        given = [(body, body.inputs[place]) for body in bodies]
        return any(item in changed_inputs(body) for body, item in given) and not any(is_read(*pair) for pair in given)

    return tuple(argument for place, argument in enumerate(arguments_of(operation)) if not only_written(place))


def is_read(program: Program, item: object) -> bool:
    """Whether a program reads one of its inputs, or returns it."""
    storages = {buffer.name: buffer.storage for buffer in program.buffers}
    looking = [operation for operation in program.operations if not isinstance(operation, Bind)]  # at elements
    read = {storages[access.buffer] for operation in looking for access in reads(operation)}
    read |= {storages[output] for output in program.outputs if isinstance(output, str)}
    return item in read


@cached_on_operation
def writes(operation: Operation) -> tuple[Access, ...]:
    """What an operation writes, results and buffers it changes."""
    found = {Access(store.buffer, store.coordinates, store.mode): None for store in stores_of(operation)}
    if isinstance(operation, Reduce | Scan | Sort | Attention):
        found.update(
            {Access(destination.buffer, destination.coordinates): None for destination in destinations_of(operation)}
        )
    call = call_of(operation)
    if call is not None:
        found.update({Access(name, None): None for name in (*call.results, *call.writes) if isinstance(name, str)})
    match operation:
        case If() | While() | Invoke():
            found.update({Access(name, None): None for name in operation.results if isinstance(name, str)})
            found.update({Access(name, None): None for name in changed_operands(operation)})
        case Allocate() | DeviceCopy() | Seeds():
            found[Access(operation.target, None)] = None
    return tuple(found)


def changed_operands(operation: If | While | Invoke) -> Iterator[str]:
    """Operands that a sub-program writes to."""
    match operation:
        case If():
            pairs = [(operation.then, operation.operands), (operation.otherwise, operation.operands)]
        case While():
            operands = (*operation.carried, *operation.constants)
            pairs = [(operation.condition, operands), (operation.body, operands)]
        case Invoke():
            pairs = [(operation.body, operation.operands)]
    for body, operands in pairs:
        inputs = {item: place for place, item in enumerate(body.inputs) if isinstance(item, str)}
        for name in changed_inputs(body):
            yield from argument_names(operands[inputs[name]])


def changed_inputs(program: Program) -> tuple[str, ...]:
    """The inputs of a program whose memory it writes to, each once."""
    storages = {buffer.name: buffer.storage for buffer in program.buffers}
    written = {storages[access.buffer] for operation in program.operations for access in writes(operation)}
    return tuple(item for item in program.inputs if isinstance(item, str) and item in written)


def defines(operation: Operation) -> tuple[Symbol, ...]:
    """The symbols that an operation gives a value."""
    match operation:
        case Item() | Bind():
            return (operation.symbol,)
        case RandomState():
            return (operation.seed, *(symbol for symbol, _blocks in operation.draws))
        case If() | While() | Invoke():
            return tuple(item for item in operation.results if isinstance(item, Symbol))
    call = call_of(operation)
    return tuple(item for item in call.results if isinstance(item, Symbol)) if call is not None else ()


def symbols(operation: Operation) -> frozenset[Symbol]:
    """The symbols that an operation needs to know, those of its extents and coordinates and arguments."""
    indices = [axis.extent for axis in axes_of(operation)]
    for destination in destinations_of(operation):
        indices += destination.coordinates
    for item in nodes_of(*roots_of(operation)):
        indices += indices_of(item)
    indices += argument_indices(*arguments_of(operation))
    if isinstance(operation, If) and isinstance(operation.predicate, Index):
        indices.append(operation.predicate)
    if isinstance(operation, RandomState):
        indices += [index for index, _ in operation.multiples]
        indices += [blocks for _symbol, blocks in operation.draws]
    return frozenset(symbol for index in indices for symbol in symbols_in(index))


def returning(output: Output) -> Call:
    """An output as a call that is given it: all that is asked of an operation can be asked of it."""
    match output:
        case str():
            return Call("return", (Ref(output),), (), ())
        case Index():
            return Call("return", (Size(output),), (), ())
    return Call("return", (output,), (), ())


def has_effect(operation: Operation) -> bool:
    """Whether an operation must run even where nobody reads what it writes."""
    match operation:
        case Assert() | Seeds() | RandomState() | Collective() | Wait() | UserKernel():
            return True
        case If() | While() | Invoke():
            return any(has_effect(inner) for body in bodies_of(operation) for inner in body.operations)
    call = call_of(operation)
    return call is not None and call.effect is not None


def bodies_of(operation: If | While | Invoke) -> tuple[Program, ...]:
    """The programs that an operation runs."""
    match operation:
        case If():
            return (operation.then, operation.otherwise)
        case While():
            return (operation.condition, operation.body)
        case Invoke():
            return (operation.body,)


def cost(operation: Operation) -> int:
    """Work at one point of the axes, in additions; what a call does is not counted."""
    nodes = [item for item in nodes_of(*roots_of(operation)) if item.args]
    return sum(OPERATORS[item.name].cost if isinstance(item, Op) else 1 for item in nodes)
