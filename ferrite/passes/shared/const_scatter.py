"""Scatters into a constant: a selection by coordinate needs no write. The joint and the post-grad stage have the rule.

    scatter(full(S, 0.0), 1, index, v)        =>      where(index == iota along 1, v, 0.0)

Eager raises for an index out of range, and so does this: the index is read out of an iota by itself, which changes no
index that is in range and raises the same error for one that is not.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.passes.shared.cases import full
from ferrite.passes.shared.constants import Filled, filled
from ferrite.rewrite import Case, NodeRule, Site

aten = torch.ops.aten


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
