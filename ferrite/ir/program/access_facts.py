"""Why every place that a program accesses is inside of its buffer.

A kernel compares with bounds only what is read from memory, `data(v, extent)`. Every other index is used as it is, and
rests on a fact:

    sizes     axes end, and symbols lie in ranges: `x[2*i0 + 1]` of x[s0], with i0 below s0 // 2
    check     what is read from memory is compared with an extent when it runs: `x[data(v, 4)]` of x[4]
    form      what is computed is below that extent by its form, and is not compared: `x[data(minimum(v, 3), 4)]`
    mask      it is read only where a condition holds: `masked(ge(i0, 2), x[i0 - 2], 0)`
    relation  a guard, or an assertion that has been checked, relates sizes: `x[i0]` of x[s0], with i0 below s1 <= s0
    nothing   an axis has no iterations

Where several are needed for one place, the last one in this list that is needed names it. None: no proof was found,
which need not mean that there is none; `check_bounds` compares every address (`ferrite.codegen.llvm.bounds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Literal as OneOf

from ferrite.ir.expr import Const, Data, Expr, IndexValue, Load, Masked, Op, data_atoms, indices_of
from ferrite.ir.index.algebra import ZERO, FloorDiv, Index, Sum, add, axis, largest_item, number, positive, smallest
from ferrite.ir.index.nested_bounds import never_negative_in_loops, terms_of
from ferrite.ir.index.substitution import substitute
from ferrite.ir.intervals import is_below_extent
from ferrite.ir.program.nodes import Buffer, If, Invoke, Operation, Program, While
from ferrite.ir.program.operation_facts import axes_of, bodies_of, destinations_of, roots_of
from ferrite.ir.types import is_integer

Fact = OneOf["sizes", "check", "form", "mask", "relation", "nothing"]
FACTS: tuple[Fact, ...] = ("sizes", "check", "form", "mask", "relation", "nothing")
MAX_CONDITIONS = 2  # that one proof takes together
Conditions = tuple[Index, ...]  # none of these is negative


@dataclass(frozen=True)
class AccessFact:
    """`fact`: why a coordinate is from 0 up to a size of a buffer. `writes`: it is stored to."""

    buffer: str
    coordinate: Index
    size: Index
    fact: Fact | None
    writes: bool = False

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{verb} {self.buffer} at {self.coordinate}, of {self.size}: {self.fact or 'no proof'}"


def facts_text(program: Program, relations: Conditions = ()) -> str:
    """How many places follow from sizes, and each of the others with its fact, behind the operation it belongs to."""
    lines, by_sizes = list[str](), 0
    for each in with_bodies(program):
        buffers = {buffer.name: buffer for buffer in each.buffers}
        for operation in each.operations:
            found = access_facts(operation, buffers, relations)
            others = [fact for fact in found if fact.fact != "sizes"]
            by_sizes += len(found) - len(others)
            lines += [f"{type(operation).__name__.lower()} {operation.origin}"] if others else []
            lines += [f"    {fact}" for fact in others]
    return "\n".join([f"{by_sizes} places follow from sizes", *lines]) + "\n"


def with_bodies(program: Program) -> Iterator[Program]:
    yield program
    for operation in program.operations:
        for body in bodies_of(operation) if isinstance(operation, If | While | Invoke) else ():
            yield from with_bodies(body)


def access_facts(operation: Operation, buffers: Mapping[str, Buffer], relations: Conditions = ()) -> list[AccessFact]:
    """Of every coordinate of everything that a loop operation loads and stores. `relations`: what is known of symbols
    together, none of it negative."""
    is_empty = any(each.extent is ZERO for each in axes_of(operation))
    found: dict[AccessFact, None] = {}

    def note(name: str, coordinates: Iterable[Index], conditions: Conditions, writes: bool) -> None:
        for place, size in zip(coordinates, buffers[name].sizes, strict=True):
            fact: Fact | None = "nothing" if is_empty else fact_of(place, size, conditions, relations)
            found[AccessFact(name, place, size, fact, writes)] = None

    for load, conditions in guarded_loads(roots_of(operation)):
        note(load.buffer, load.coordinates, conditions, False)
    for destination in destinations_of(operation):
        note(destination.buffer, destination.coordinates, (), True)
    return list(found)


def fact_of(place: Index, size: Index, conditions: Conditions = (), relations: Conditions = ()) -> Fact | None:
    """Why an index is from 0 up to a size, where the conditions hold."""
    from_memory = data_atoms(place)
    below: dict[Data, Index] = {each: axis(f"data{count}", each.extent) for count, each in enumerate(from_memory)}
    ends, masks = [substitute(each, below) for each in (place, size - 1 - place)], conditions
    if below:
        masks = tuple(substitute(each, below) for each in conditions)
    if all(follows(end, ()) for end in ends):
        if not from_memory:
            return "sizes"
        return "form" if all(map(is_below_extent, from_memory)) else "check"
    if all(follows(end, masks) for end in ends):
        return "mask"
    return "relation" if relations and all(follows(end, (*masks, *relations)) for end in ends) else None


# --- proofs -----------------------------------------------------------------------------------------------------------


def follows(end: Index, conditions: Sequence[Index], most: int = MAX_CONDITIONS) -> bool:
    """Whether an index is never negative: by itself, or as it is no less than the sum of others that are not."""
    low = least(end).low
    if (low is not None and low >= 0) or never_negative_in_loops(end):
        return True
    for place, each in enumerate(conditions if most else ()):
        times = times_in(each, end)
        if times and follows(end - each * times, conditions[place + 1 :], most - 1):
            return True
    return False


def times_in(condition: Index, end: Index) -> int:
    """How often a condition is to be taken off so that one of its terms is no more in an index; 0 where it has none."""
    mine = dict(terms_of(end))
    for item, factor in terms_of(condition):
        if mine.get(item, 0) % factor == 0 and mine.get(item, 0) // factor > 0:
            return mine[item] // factor
    return 0


def least(index: Index) -> Index:
    """A lower bound without axes. Beyond `smallest`, it looks into quotients whose top may be negative."""
    parts: list[tuple[Index, int]] = [(number(index.constant if isinstance(index, Sum) else 0), 1)]
    for item, factor in terms_of(index):
        parts.append((greatest_term(item) if factor < 0 else least_term(item), factor))
    return smallest(add(parts))


def least_term(item: Index) -> Index:
    if isinstance(item, FloorDiv) and positive(item.bottom):
        return least(item.top) // item.bottom
    return smallest(item)


def greatest_term(item: Index) -> Index:
    if isinstance(item, FloorDiv) and positive(item.bottom):
        return -least(-item.top) // item.bottom
    return largest_item(item)


# --- what is read under which conditions ------------------------------------------------------------------------------


def guarded_loads(roots: Iterable[Expr]) -> Iterator[tuple[Load, Conditions]]:
    """Every load under these, those inside coordinates too, with what holds where it is read."""
    seen: set[tuple[Expr, Conditions]] = set()
    left: list[tuple[Expr, Conditions]] = [(root, ()) for root in roots]
    while left:
        pair = left.pop()
        if pair in seen:
            continue
        seen.add(pair)
        item, conditions = pair
        if isinstance(item, Load):
            yield item, conditions
        left += [(atom.value, conditions) for index in indices_of(item) for atom in data_atoms(index)]
        if isinstance(item, Masked):
            inside = (*conditions, *(each for each in held_by(item.mask) if each not in conditions))
            left += [(item.mask, conditions), (item.other, conditions), (item.value, inside)]
        else:
            left += [(each, conditions) for each in item.args]


def held_by(condition: Expr) -> Iterator[Index]:
    """What is not negative where a condition holds."""
    if not isinstance(condition, Op) or len(condition.operands) != 2:
        return
    if condition.name in ("logical_and", "bitwise_and"):
        for each in condition.operands:
            yield from held_by(each)
        return
    left, right = map(as_whole_number, condition.operands)
    if left is not None and right is not None:
        yield from differences(condition.name, left, right)


def differences(comparison: str, left: Any, right: Any) -> Iterator[Any]:
    """What is not negative where two whole numbers compare so: of `i < n` it is n - i - 1. They may be of any kind that
    can be subtracted."""
    match comparison:
        case "ge":
            yield left - right
        case "gt":
            yield left - right - 1
        case "le" | "lt":
            yield from differences("ge" if comparison == "le" else "gt", right, left)
        case "eq":
            yield left - right
            yield right - left


def as_whole_number(value: Expr) -> Index | None:
    if isinstance(value, IndexValue) and is_integer(value.dtype):
        return value.index
    if isinstance(value, Const) and is_integer(value.dtype):
        return number(int(value.value.real))
    return None
