"""Scatters in forms that need fewer writes to the same place.

    scatter(full(S, 0.0), 1, index, v)        =>      where(index == iota along 1, v, 0.0)

    index_put(x, [index], v, accumulate)      =>      x + sum over P copies, write k going to copy k mod P

Eager raises for an index out of range, and so do these: the index is read out of an iota by itself, which changes no
index that is in range and raises the same error for one that is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.options import at_least, settings_of
from ferrite.passes.constants import Filled, filled
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, in_order

aten = torch.ops.aten


# --- into a constant --------------------------------------------------------------------------------------------------


def select_by_index(site: Site) -> Any:
    """One index per row: each element tells by its own coordinate whether it was written."""
    constant, index, value = site.arguments["self"], site.arguments["index"], site.arguments.get("value")
    if not site.options.const_scatter:
        return Refusal("the option const_scatter is off")
    if "src" in site.arguments:
        source = filled(site.arguments["src"])
        if source is None:
            return Refusal("it writes a tensor, not a number")
        value = source.value
    if "reduce" in site.arguments:
        return Refusal("it reduces")
    found = filled(constant)
    if found is None:
        return Refusal("its operand is no constant")
    if len(constant.users) != 1:
        return Refusal("the constant has another user and stays")
    result, places = site.value(site.node), site.value(index)
    background, sizes = found.value, found.sizes
    problem = (
        constant_problem(found, value, result)
        or (Refusal("the index is on another device") if places.device != result.device else None)
        or index_problem(result, places, site.arguments["dim"])
    )
    if problem:
        return problem
    site.through(constant, *([site.arguments["src"]] if "src" in site.arguments else []))
    dim = site.arguments["dim"] % result.ndim
    count = site.call(aten.arange.default, sizes[dim], dtype=places.dtype, device=result.device)
    coordinate = site.call(aten.reshape.default, count, [-1 if axis == dim else 1 for axis in range(result.ndim)])
    checked = site.call(aten.gather.default, site.call(aten.expand.default, coordinate, list(sizes)), dim, index)
    written = site.call(aten.eq.Tensor, checked, coordinate)
    # each number takes the dtype of the result by itself: no detour over the default dtype
    numbers = [
        site.call(aten.full.default, [], n, dtype=result.dtype, device=result.device) for n in (value, background)
    ]
    return site.call(aten.where.self, written, *numbers)


def constant_problem(constant: Filled, value: Any, result: torch.Tensor) -> Refusal | None:
    if constant.pinned:
        return Refusal("the constant is in pinned memory")
    if not isinstance(value, (int, float)) or not isinstance(constant.value, (int, float)):
        return Refusal("a number is complex or symbolic")
    if result.dtype.is_complex or not fits(value, result.dtype):
        return Refusal("the number does not fit the dtype")
    return None


def fits(value: float, dtype: torch.dtype) -> bool:
    """Whether writing a number raises no error; half precision is the case where `full` would not raise."""
    if dtype is torch.bool:
        return True
    if not math.isfinite(value):
        return dtype.is_floating_point
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def index_problem(result: torch.Tensor, index: torch.Tensor, dim: int) -> Refusal | None:
    if result.ndim == 0 or index.ndim != result.ndim:
        return Refusal("the index has another rank")
    for axis in range(result.ndim):
        if axis == dim % result.ndim:
            if not torch_api.known_equal(index.shape[axis], 1):
                return Refusal("there may be more than one index per row")
        elif not torch_api.known_equal(index.shape[axis], result.shape[axis]):
            return Refusal("rows without an index are not ruled out")
    return None


def full(shape: list[Any], value: Any, dtype: torch.dtype) -> Any:
    return aten.full.default(shape, value, dtype=dtype, device=torch.device("cpu"), pin_memory=False)


def one_hot(value: Any, dtype: torch.dtype, background: Any = 0) -> Any:
    return lambda i: aten.scatter.value(full([i.shape[0], 6], background, dtype), 1, i, value) + 1


def places(*shape: int, upto: int = 6) -> Any:
    return lambda: [torch.randint(upto, shape)]


SCATTER_UPON_CONSTANT = NodeRule(
    name="scatter_upon_const_tensor",
    purpose="one write per row into a constant is a selection by coordinate",
    targets=(aten.scatter.value, aten.scatter.src, aten.scatter.value_reduce),
    rewrite=select_by_index,
    examples=(
        Case("double precision", one_hot(0.1, torch.float64, 0.7), places(4, 1)),
        Case("a long integer", one_hot(2**40 + 1, torch.int64), places(4, 1)),
        Case("half precision", one_hot(-1.0, torch.float16), places(4, 1)),
        Case("an int loses its fraction", one_hot(1.9, torch.int32), places(4, 1)),
        Case("zeros", lambda i: torch.zeros(4, 6).scatter(1, i, 1.0), places(4, 1)),
        Case("a tensor of ones is written", lambda i: torch.zeros(4, 6).scatter(1, i, torch.ones(4, 3)), places(4, 1)),
        Case("bool", lambda i: aten.scatter.value(full([4, 6], 0, torch.bool), 1, i, 2), places(4, 1)),
        Case(
            "not the last dimension, counted from the end",
            lambda i: aten.scatter.value(full([3, 6, 2], 0.0, torch.float32), -2, i, 1.0),
            places(3, 1, 2),
        ),
    ),
    near_misses=(
        Case("switched off", one_hot(0.1, torch.float64), places(4, 1), {"const_scatter": False}),
        Case("a shorter index", lambda i: aten.scatter.value(full([9, 6], 0, torch.int32), 1, i, 1), places(4, 1)),
        Case("two indices per row", lambda i: aten.scatter.value(full([4, 6], 0, torch.int32), 1, i, 1), places(4, 2)),
        Case(
            "a tensor is written",
            lambda i, v: aten.scatter.src(full([4, 6], 0.0, torch.float32), 1, i, v),
            lambda: [torch.randint(6, (4, 1)), torch.rand(4, 1)],
        ),
        Case(
            "it adds",
            lambda i: aten.scatter.value_reduce(full([4, 6], 0.0, torch.float32), 1, i, 1.0, reduce="add"),
            places(4, 1),
        ),
        Case(
            "the constant is read again",
            lambda i: (c := full([4, 6], 0.0, torch.float32), aten.scatter.value(c, 1, i, 1.0) + c)[1],
            places(4, 1),
        ),
        Case(
            "no constant",
            lambda i, x: aten.scatter.value(x, 1, i, 1.0),
            lambda: [torch.randint(6, (4, 1)), torch.rand(4, 6)],
        ),
    ),
)


# --- many writes into few places --------------------------------------------------------------------------------------

GROUP = "partitioned_scatter"
MOST_ELEMENTS = 1 << 28  # of all copies together, where nobody knows how much memory the device has


@dataclass(frozen=True)
class Copies:
    """How many copies are worth it: `min_index` writes at least, copies of at most `mem_fraction` of the memory."""

    min_parts: int = 2
    max_parts: int = 128
    min_index: int = 4096  # below, writes rarely wait for each other
    mem_fraction: float = at_least(0, 0.1)


def copies_for(writes: int, elements: int, limits: Copies | None = None, most_elements: float = MOST_ELEMENTS) -> int:
    """How many copies: more where more writes meet in one place, fewer where a copy is large. A power of two, or 0.

    >>> copies_for(5000, 10), copies_for(5000, 5000), copies_for(10**7, 2 * 10**6)
    (128, 16, 16)
    """
    limits = limits or Copies()
    if elements == 0:
        return 0
    wanted = 16 * math.sqrt(writes / elements)
    for large, most in ((10**8, 4), (10**7, 8), (10**6, 16)):
        if elements >= large:
            wanted = min(wanted, most)
            break
    wanted = min(wanted, limits.max_parts, most_elements / elements)
    return 0 if wanted < max(limits.min_parts, 1) else 1 << int(math.log2(wanted))


def most_elements_on(device: torch.device, itemsize: int, limits: Copies) -> float:
    if device.type != "cuda":
        return MOST_ELEMENTS
    return limits.mem_fraction * torch.cuda.get_device_properties(device).total_memory / itemsize


def on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def is_spread(index: torch.fx.Node) -> bool:
    """Whether an index is one that this rule wrote: shifted by the copy whose turn it is."""
    shift = in_order(index)[1] if index.target is aten.add.Tensor else None
    turn = in_order(shift)[0] if isinstance(shift, torch.fx.Node) and shift.target is aten.mul.Tensor else None
    return isinstance(turn, torch.fx.Node) and turn.target is aten.remainder.Scalar


def spread_over_copies(site: Site) -> Any:
    target, positions, written = (
        site.value(site.arguments["self"]),
        site.arguments["indices"],
        site.arguments["values"],
    )
    where = [(dim, item) for dim, item in enumerate(positions) if item is not None]
    if site.arguments["accumulate"] is not True:
        return Refusal("it overwrites, and the last write must win")
    if on_cpu(target):
        return Refusal("on a cpu no writes wait for each other")
    if len(where) != 1:
        return Refusal("it has more than one index")
    (dim, index), values = where[0], site.value(written)
    at = site.value(index)
    if target.dtype is torch.bool or at.dtype in (torch.bool, torch.uint8):
        return Refusal("it is of bools, or a mask")
    sizes = [*target.shape, *at.shape, *values.shape]
    if not all(isinstance(size, int) for size in sizes):
        return Refusal("a size is symbolic")
    limits = settings_of(site.options.post_grad_fusions, GROUP, Copies)
    if at.numel() < limits.min_index:
        return Refusal(f"there are fewer than {limits.min_index} writes")
    if is_spread(index):
        return Refusal("it is spread over copies already")
    room = most_elements_on(target.device, target.element_size(), limits)
    copies = copies_for(at.numel(), target.numel(), limits, room)
    if not copies:
        return Refusal("the writes are spread already, or copies would take too much memory")
    before, size, after = list(target.shape[:dim]), target.shape[dim], list(target.shape[dim + 1 :])
    device, skip = target.device, [None] * dim
    every = site.call(aten.arange.default, size, dtype=torch.int64, device=device)
    flat = site.call(aten.reshape.default, site.call(aten.index.Tensor, every, [index]), [-1])
    turn = site.call(aten.arange.default, at.numel(), dtype=torch.int64, device=device)
    shift = site.call(aten.mul.Tensor, site.call(aten.remainder.Scalar, turn, copies), size)
    spread = site.call(aten.expand.default, written, [*before, *at.shape, *after])
    rows = site.call(aten.reshape.default, spread, [*before, at.numel(), *after])
    zeros = site.call(aten.full.default, [*before, copies * size, *after], 0, dtype=target.dtype, device=device)
    filled = site.call(aten.index_put.default, zeros, [*skip, site.call(aten.add.Tensor, flat, shift)], rows, True)
    apart = site.call(aten.reshape.default, filled, [*before, copies, size, *after])
    total = site.call(aten.sum.dim_IntList, apart, [dim], dtype=target.dtype)
    return site.call(aten.add.Tensor, site.arguments["self"], total)


def on_meta(tensor: Any) -> Any:
    """The device that stands in for an accelerator where there is none: rules look, they do not run."""
    return aten._to_copy.default(tensor, device=torch.device("meta"))


def put(positions: Any, accumulate: bool = True, device: Any = on_meta) -> Any:
    return lambda x, i, v: aten.index_put.default(device(x), positions(device(i)), device(v), accumulate)


def writes(*shape: int, index: tuple[int, ...] = (5000,), values: tuple[int, ...] = (5000,)) -> Any:
    return lambda: [torch.zeros(shape), torch.randint(-10, 10, index), torch.rand(values)]


PARTITIONED_SCATTER = NodeRule(
    name="partitioned_scatter",
    purpose="many additions to few places go to copies that are summed",
    targets=(aten.index_put.default,),
    rewrite=spread_over_copies,
    numerics="rounded",
    examples=(
        Case("5000 writes to 10 places", put(lambda i: [i]), writes(10)),
        Case("an index of two dimensions, one number", put(lambda i: [i]), writes(10, index=(50, 100), values=())),
        Case(
            "as few writes as was asked for",
            put(lambda i: [i]),
            writes(10, index=(50,), values=(50,)),
            {"post_grad_fusions": {GROUP: {"min_index": 50}}},
        ),
        Case("the second dimension", put(lambda i: [None, i]), writes(3, 10, index=(5000,), values=(3, 5000))),
    ),
    near_misses=(
        Case("it overwrites", put(lambda i: [i], accumulate=False), writes(10)),
        Case("on a cpu", put(lambda i: [i], device=lambda x: x), writes(10)),
        Case("few writes", put(lambda i: [i]), writes(10, index=(50,), values=(50,))),
        Case("two indices", put(lambda i: [i, i]), writes(10, 10)),
        Case(
            "fewer copies than was asked for",
            put(lambda i: [i]),
            writes(10),
            {"post_grad_fusions": {GROUP: {"min_parts": 64, "max_parts": 32}}},
        ),
        Case("many places", put(lambda i: [i]), writes(10**6)),
    ),
)

SCATTER_RULES: tuple[AnyRule, ...] = (SCATTER_UPON_CONSTANT,)
PARTITIONED_SCATTER_RULES: tuple[AnyRule, ...] = (PARTITIONED_SCATTER,)
