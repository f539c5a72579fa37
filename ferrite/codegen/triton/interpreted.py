"""What Triton's interpreter lacks or gets wrong, computed with torch: functions of CUDA's library, and conversions to
and from bfloat16, which it truncates; ends of loops. Compiled source does not come here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ferrite.codegen.triton.operators import RENAMED
from ferrite.ir import OPERATORS

OTHER_NAMES = {there: name for name, there in RENAMED.items()}


def tensor_of(block: Any) -> torch.Tensor:
    """The numbers of a block of the interpreter's. It keeps bfloat16 as unsigned integers."""
    import numpy

    data = numpy.ascontiguousarray(block.handle.data)
    if str(block.dtype) == "bf16":
        return torch.from_numpy(data.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)


def block_of(result: torch.Tensor, *like: Any) -> Any:
    """A block of the interpreter's, or a number where all that it comes from are."""
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if result.dtype is torch.bfloat16:
        dtype, data = tl.bfloat16, result.view(torch.int16).numpy().view(numpy.uint16)
    else:
        names = {torch.float32: tl.float32, torch.float64: tl.float64, torch.int64: tl.int64}
        dtype, data = names[result.dtype], result.numpy()
    whole = any(block.type.is_block() for block in like)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if whole else dtype)


def with_torch(meaning: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *blocks: block_of(meaning(*map(tensor_of, blocks)), *blocks)


class Library:
    """`libdevice`: every function is what the scalar operator of its name means."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return with_torch(OPERATORS[OTHER_NAMES.get(name, name)].meaning)


def add_one_by_one(pointer: Any, value: Any, mask: Any) -> None:
    """Floats of 16 bits added where they belong, lane by lane."""
    import numpy

    numbers = tensor_of(value)
    places, counted = numpy.broadcast_arrays(pointer.handle.data, mask.handle.data)
    added = numbers.broadcast_to(places.shape).reshape(-1)
    for place, number, counts in zip(places.reshape(-1).tolist(), added, counted.reshape(-1).tolist(), strict=True):
        if counts:
            there = torch.frombuffer((ctypes.c_uint16 * 1).from_address(place), dtype=number.dtype)
            there += number


def sort_lanes(values: Any, dim: Any) -> Any:
    return block_of(tensor_of(values).sort(dim=int(getattr(dim, "value", dim))).values, values)


def reduced_by_pairs(operation: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """Neighbours along the axis are combined, all pairs at once, until one is left: `tl.reduce` with any function."""
    import numpy

    given, axis = operation.unravel(blocks, operation.axis)
    numbers = [numpy.moveaxis(block.handle.data, axis, 0) for block in given]
    while len(numbers[0]) > 1:  # extents are powers of two
        numbers = combined(operation, given, [each[::2] for each in numbers], [each[1::2] for each in numbers])
    results = [numpy.moveaxis(each, 0, axis) if operation.keep_dims else each[0] for each in numbers]
    if operation.axis is None:  # of a whole block, which was made flat
        shape = (1,) * len(blocks[0].shape) if operation.keep_dims else ()
        results = [each.reshape(shape) for each in results]
    return [operation.to_tensor(each, block.dtype) for each, block in zip(results, given, strict=True)]


def scanned_by_strides(operation: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """Each number takes in what the one 1, 2, 4, ... places before it has: `tl.associative_scan` with any function."""
    import numpy

    numbers = [numpy.moveaxis(block.handle.data, operation.axis, 0) for block in blocks]
    stride = 1
    while stride < len(numbers[0]):
        before = [numpy.roll(each, stride, 0) for each in numbers]
        with_before = combined(operation, blocks, before, numbers)
        numbers = [
            numpy.concatenate((each[:stride], new[stride:])) for each, new in zip(numbers, with_before, strict=True)
        ]
        stride *= 2
    results = [numpy.moveaxis(each, 0, operation.axis) for each in numbers]
    return [operation.to_tensor(each, block.dtype) for each, block in zip(results, blocks, strict=True)]


def combined(operation: Any, blocks: tuple[Any, ...], left: list[Any], right: list[Any]) -> list[Any]:
    """What the user's function of two states makes of arrays of them."""
    import numpy

    states = [
        operation.to_tensor(each, block.dtype)
        for side in (left, right)
        for each, block in zip(side, blocks, strict=True)
    ]
    made = operation.combine_fn.fn(*states)
    made = made if isinstance(made, tuple) else (made,)
    return [
        numpy.broadcast_to(getattr(getattr(new, "handle", None), "data", new), old.shape).astype(old.dtype)
        for new, old in zip(made, left, strict=True)
    ]


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Reductions and scans with a function of their own are done by whole arrays: 10 to 100 times as fast."""
    from triton.runtime.interpreter import ReduceOps, ScanOps

    before = ReduceOps.generic_reduce, ScanOps.generic_scan
    ReduceOps.generic_reduce, ScanOps.generic_scan = reduced_by_pairs, scanned_by_strides
    try:
        yield
    finally:
        ReduceOps.generic_reduce, ScanOps.generic_scan = before


@contextmanager
def loops_with_ends() -> Iterator[None]:
    """The interpreter keeps a number as an array of one element. Triton 3.6 hands that to `int` where a loop ends,
    and NumPy 2.4 refuses it."""
    from triton.runtime import interpreter

    prepare: Any = getattr(interpreter, "_patch_lang_tensor", None)

    def prepare_with_index(tensor: Any, scope: Any) -> None:
        prepare(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda block: int(block.handle.data.item()))

    if prepare is None:
        yield
        return
    interpreter._patch_lang_tensor = prepare_with_index
    try:
        yield
    finally:
        interpreter._patch_lang_tensor = prepare


@contextmanager
def interpreter_mended() -> Iterator[None]:
    with loops_with_ends(), whole_blocks():
        yield


# By the names that they have in the source.
REPLACED: dict[str, Any] = {
    "libdevice": Library(),
    "sort_lanes": sort_lanes,
    "atomic_add_half": add_one_by_one,
    **dict.fromkeys(
        ("multiply_add", "add_product"), with_torch(lambda left, right, total: total + left.float() @ right.float())
    ),
    "add_apart": lambda left, right: left + right,
    "subtract_apart": lambda left, right: left - right,
    "quick_reciprocal": with_torch(torch.reciprocal),
    "quick_exp2": with_torch(torch.exp2),
    "to_bfloat16": with_torch(lambda value: value.to(torch.bfloat16)),
    "from_bfloat16": with_torch(lambda value: value.to(torch.float32)),
}
