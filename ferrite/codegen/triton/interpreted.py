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


# By the names that they have in the source.
REPLACED: dict[str, Any] = {
    "libdevice": Library(),
    "sort_lanes": sort_lanes,
    "atomic_add_half": add_one_by_one,
    **dict.fromkeys(
        ("multiply_add", "add_product"), with_torch(lambda left, right, total: total + left.float() @ right.float())
    ),
    "power_of_two": with_torch(torch.exp2),
    "to_bfloat16": with_torch(lambda value: value.to(torch.bfloat16)),
    "from_bfloat16": with_torch(lambda value: value.to(torch.float32)),
}
