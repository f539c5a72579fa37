"""Complex numbers as pairs of floats, before a program is grouped: every store of one is two, of its parts.

Memory is seen as floats, with one dimension more for the part. Operators are written out as eager's kernels for a GPU
compute them; an operation with one that is not here is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ferrite.errors import NotGenerated
from ferrite.ir import (
    ONE,
    PART_TYPES,
    ZERO,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Masked,
    Op,
    arithmetic_type,
    both,
    cast,
    choose,
    compare,
    const,
    either,
    masked,
    nodes_of,
    number,
    op,
    with_parts,
)
from ferrite.ir.program import Buffer, Compute, Destination, Operation, Program, Reduce, Scan, Store, roots_of

ADDED_UP = ("sum",)  # part by part
Pair = tuple[Expr, Expr]

YES = const(True, torch.bool)


def with_complex_parts(program: Program, device: str) -> Program:
    """The program with complex numbers on devices of this type as pairs of floats, where they can be."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    parts = ComplexParts(buffers)
    operations = [new for operation in program.operations for new in parts.in_parts(operation, device)]
    return replace(program, buffers=tuple(buffers.values()), operations=tuple(operations))


class ComplexParts:
    """`float_views`: buffers of complex numbers, seen as floats, by the names of the buffers."""

    def __init__(self, buffers: dict[str, Buffer]) -> None:
        self.buffers = buffers
        self.float_views: dict[str, str] = {}

    # --- operations ---------------------------------------------------------------------------------------------------

    def in_parts(self, operation: Operation, device: str) -> tuple[Operation, ...]:
        if not isinstance(operation, Compute | Reduce | Scan) or not self.is_complex(operation, device):
            return (operation,)
        try:
            if isinstance(operation, Compute):
                stores = tuple(new for store in operation.stores for new in self.stores(store))
                return (replace(operation, stores=stores),)
            return self.added_up(operation)
        except NotGenerated:
            return (operation,)

    def is_complex(self, operation: Compute | Reduce | Scan, device: str) -> bool:
        written = operation.stores if isinstance(operation, Compute) else operation.destinations
        names = [each.buffer for each in written if each is not None]
        if all(self.buffers[name].device.type != device for name in names):
            return False
        return any(item.dtype.is_complex for item in nodes_of(*roots_of(operation)))

    def stores(self, store: Store) -> tuple[Store, ...]:
        value = self.value(store.value)
        if isinstance(value, Expr):
            return (replace(store, value=value),)
        if store.mode not in ("set", "add"):
            raise NotGenerated(f"{store.mode} of complex numbers")
        float_view = self.float_view(store.buffer)
        return tuple(
            replace(store, buffer=float_view, coordinates=(*store.coordinates, number(place)), value=part)
            for place, part in enumerate(value)
        )

    def added_up(self, operation: Reduce | Scan) -> tuple[Operation, ...]:
        kind = operation.kind if isinstance(operation, Reduce) else operation.combine.name
        values = [self.value(value) for value in operation.values]
        if all(isinstance(value, Expr) for value in values):
            return (replace(operation, values=tuple(value for value in values if isinstance(value, Expr))),)
        (value,), (destination,) = values, operation.destinations
        if kind not in ADDED_UP or destination is None or isinstance(value, Expr):
            raise NotGenerated(f"{kind} of complex numbers")
        float_view = self.float_view(destination.buffer)
        return tuple(
            replace(
                operation,
                values=(part,),
                destinations=(Destination(float_view, (*destination.coordinates, number(place))),),
            )
            for place, part in enumerate(value)
        )

    def float_view(self, name: str) -> str:
        """A buffer of complex numbers, seen as floats."""
        if name not in self.float_views:
            buffer = self.buffers[name]
            new = f"{name}_parts"
            while new in self.buffers:
                new += "_"
            sizes, strides = (*buffer.sizes, number(2)), (*(stride * 2 for stride in buffer.strides), ONE)
            dtype, offset = PART_TYPES[buffer.dtype], buffer.offset * 2
            self.buffers[new] = Buffer(new, dtype, sizes, strides, offset, buffer.device, "view", buffer.storage)
            self.float_views[name] = new
        return self.float_views[name]

    # --- expressions --------------------------------------------------------------------------------------------------

    def value(self, root: Expr) -> Expr | Pair:
        made: dict[Expr, Expr | Pair] = {}
        for item in nodes_of(root):  # operands first
            made[item] = self.made(item, made)
        return made[root]

    def made(self, item: Expr, made: dict[Expr, Expr | Pair]) -> Expr | Pair:
        def real(part: Expr) -> Expr:
            found = made[part]
            assert isinstance(found, Expr)
            return found

        def pair(part: Expr) -> Pair:
            found = made[part]
            return found if isinstance(found, tuple) else (found, const(0.0, found.dtype))

        if item.dtype.is_complex:
            return self.pair(item, real, pair)
        if not any(part.dtype.is_complex for part in item.args):
            if any(made.get(part) is not part for part in item.under):
                return with_parts(item, real, unchanged(item, made))
            return item
        if isinstance(item, Cast):
            left, right = pair(item.arg)
            if item.dtype is torch.bool:
                wide = arithmetic_type(left.dtype)
                return either(*(compare("ne", cast(each, wide), const(0.0, wide)) for each in (left, right)))
            return cast(left, item.dtype)
        if isinstance(item, Op) and item.name in TO_REAL:
            return TO_REAL[item.name](*map(pair, item.operands))
        raise NotGenerated(f"{type(item).__name__.lower()} of complex numbers")

    def pair(self, item: Expr, real: Callable[[Expr], Expr], pair: Callable[[Expr], Pair]) -> Pair:
        part = PART_TYPES[item.dtype]
        match item:
            case Const():
                return const(item.value.real, part), const(item.value.imag, part)
            case Load():
                float_view = self.float_view(item.buffer)
                first, second = (Load.intern(float_view, (*item.coordinates, which), part) for which in (ZERO, ONE))
                return first, second
            case Cast():
                left, right = pair(item.arg)
                return cast(left, part), cast(right, part)
            case Masked():
                mask, here, there = real(item.mask), pair(item.value), pair(item.other)
                return masked(mask, here[0], there[0]), masked(mask, here[1], there[1])
            case Op(name="where"):
                condition, here, there = real(item.operands[0]), pair(item.operands[1]), pair(item.operands[2])
                return choose(condition, here[0], there[0]), choose(condition, here[1], there[1])
            case Op(name="complex"):
                return real(item.operands[0]), real(item.operands[1])
            case Op() if item.name in TO_COMPLEX:
                return TO_COMPLEX[item.name](*map(pair, item.operands))
        raise NotGenerated(f"{type(item).__name__.lower()} of complex numbers")


def unchanged(item: Expr, made: dict[Expr, Expr | Pair]) -> Callable[[Index], Index]:
    """Indices that read memory read no complex numbers; nothing in them is another."""
    inside = [part for part in item.under if part not in item.args]
    if any(made.get(part) is not part for part in inside):
        raise NotGenerated("an index that comes from complex numbers")
    return lambda index: index


# --- operators --------------------------------------------------------------------------------------------------------


def added(left: Pair, right: Pair) -> Pair:
    return op("add", left[0], right[0]), op("add", left[1], right[1])


def subtracted(left: Pair, right: Pair) -> Pair:
    return op("sub", left[0], right[0]), op("sub", left[1], right[1])


def multiplied(left: Pair, right: Pair) -> Pair:
    (a, b), (c, d) = left, right
    return op("sub", op("mul", a, c), op("mul", b, d)), op("add", op("mul", a, d), op("mul", b, c))


def divided(left: Pair, right: Pair) -> Pair:
    """By the greater part of the divisor first, so that nothing overflows on the way."""
    (a, b), (c, d) = left, right
    sizes = size_of(c), size_of(d)
    first = compare("ge", *sizes)
    great, small = choose(first, c, d), choose(first, d, c)
    ratio = op("div", small, great)
    scale = op("reciprocal", op("add", great, op("mul", small, ratio)))
    along, across = op("mul", a, ratio), op("mul", b, ratio)
    real = op("mul", choose(first, op("add", a, across), op("add", along, b)), scale)
    imaginary = op("mul", choose(first, op("sub", b, along), op("sub", across, a)), scale)
    zero = const(0.0, c.dtype)
    if any(isinstance(each, Const) and each.value for each in sizes):
        return real, imaginary
    none = both(*(compare("eq", each, zero) for each in sizes if each is not zero)) if sizes != (zero, zero) else YES
    return choose(none, op("div", a, sizes[0]), real), choose(none, op("div", b, sizes[1]), imaginary)


def size_of(part: Expr) -> Expr:
    return const(abs(part.value), part.dtype) if isinstance(part, Const) else op("abs", part)


def of_either(name: str) -> Callable[[Pair], Expr]:
    return lambda value: either(*(op(name, part, dtype=torch.bool) for part in value))


TO_COMPLEX: dict[str, Callable[..., Pair]] = {
    "add": added,
    "sub": subtracted,
    "mul": multiplied,
    "div": divided,
    "neg": lambda value: (op("neg", value[0]), op("neg", value[1])),
    "conj": lambda value: (value[0], op("neg", value[1])),
}
TO_REAL: dict[str, Callable[..., Expr]] = {
    "real": lambda value: value[0],
    "imag": lambda value: value[1],
    "abs_complex": lambda value: op("hypot", *value),
    "angle": lambda value: op("atan2", value[1], value[0]),
    "eq": lambda left, right: both(*(compare("eq", *parts) for parts in zip(left, right, strict=True))),
    "ne": lambda left, right: either(*(compare("ne", *parts) for parts in zip(left, right, strict=True))),
    "isnan": of_either("isnan"),
    "isinf": of_either("isinf"),
    "isfinite": lambda value: both(*(op("isfinite", part, dtype=torch.bool) for part in value)),
}
