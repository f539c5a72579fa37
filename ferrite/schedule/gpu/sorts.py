"""Sorts of short rows: a program sorts the rows that it has, as integers that hold a key and its place.

The upper half of such an integer is a number that is ordered as the key is, the lower half the place, so that equal
keys stay in their order; its last bit says that a zero was negative. What comes out is taken apart again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ferrite.ir import Axis, Expr, Load, cast, choose, compare, const, index_value, op
from ferrite.ir.program import Buffer, Combine, Compute, Destination, Operation, Scan, Sort, Store
from ferrite.machines import GpuMachine

I32, I64 = torch.int32, torch.int64
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32)
PLACE_BITS = 32  # bits of the place, and its mark
GREATEST = (1 << 31) - 1


def is_short(operation: Sort, machine: GpuMachine) -> bool:
    """Whether a program sorts a row in registers, and two halves of an integer hold what is sorted."""
    high = operation.along.extent.high
    if high is None or high > machine.max_sorted_elements or len(operation.keys) != 1:
        return False
    return operation.keys[0].dtype in (*FLOATS, *INTEGERS)


def in_registers(
    operation: Sort, buffers: Mapping[str, Buffer], part: Callable[[torch.dtype, tuple[Axis, ...]], Destination]
) -> Iterator[Operation]:
    (key,), (values, places) = operation.keys, operation.destinations
    if values is None and places is None:
        yield operation
        return
    both = part(I64, operation.axes)
    packed = with_place(key, operation)
    yield Scan(operation.axes, operation.along, Combine("sorted"), (packed,), (both,), operation.origin)
    found = Load.intern(both.buffer, both.coordinates, I64)
    stores = []
    if values is not None:
        value = key_of(found, key.dtype, operation.descending)
        stores.append(Store(values.buffer, values.coordinates, cast(value, buffers[values.buffer].dtype)))
    if places is not None:
        lower = op("bitwise_and", found, const((1 << PLACE_BITS) - 1, I64))
        place = op("bitwise_right_shift", lower, const(1, I64))
        stores.append(Store(places.buffer, places.coordinates, cast(place, buffers[places.buffer].dtype)))
    yield Compute(operation.axes, tuple(stores), operation.origin)


def with_place(key: Expr, operation: Sort) -> Expr:
    """One integer of both. What is no number is greater than all numbers."""
    lower = op("bitwise_left_shift", index_value(operation.along), const(1, I64))
    if key.dtype in FLOATS:
        value = cast(key, torch.float32)
        order = as_ordered(op("bitcast", value, dtype=I32))
        zero = compare("eq", value, const(0.0, torch.float32))
        negative = op("logical_and", zero, compare("lt", order, const(0, I32)))
        order = choose(zero, const(0, I32), order)
        order = choose(op("isnan", value, dtype=torch.bool), const(GREATEST, I32), order)
        lower = op("bitwise_or", lower, cast(negative, I64))
    else:
        order = cast(key, I32)
    order = op("bitwise_not", order) if operation.descending else order
    return op("bitwise_or", op("bitwise_left_shift", cast(order, I64), const(PLACE_BITS, I64)), lower)


def key_of(packed: Expr, dtype: torch.dtype, descending: bool) -> Expr:
    order = cast(op("bitwise_right_shift", packed, const(PLACE_BITS, I64)), I32)
    order = op("bitwise_not", order) if descending else order
    if dtype not in FLOATS:
        return cast(order, dtype)
    marked = compare("ne", op("bitwise_and", packed, const(1, I64)), const(0, I64))
    value = op("bitcast", as_ordered(order), dtype=torch.float32)
    return cast(choose(marked, const(-0.0, torch.float32), value), dtype)


def as_ordered(bits: Expr) -> Expr:
    """The bits of a float as an integer that is ordered as it is; and back."""
    negative = op("bitwise_right_shift", bits, const(31, I32))
    return op("bitwise_xor", bits, op("bitwise_and", negative, const(GREATEST, I32)))
