"""Reductions of which the result is known, or half known.

cumsum(full([n], v), 0)                     =>      arange(1, n + 1) * v

p = amax(x, [1]); amax(x)                   =>      p = amax(x, [1]); amax(p)
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.machines import machine_of
from ferrite.passes.shared.cases import full
from ferrite.passes.shared.constants import filled
from ferrite.rewrite import Case, NodeRule, Site, arguments_of

aten = torch.ops.aten


# --- cumsum of a constant ---------------------------------------------------------------------------------------------


def closed_form(site: Site) -> Any:
    """1v, 2v, 3v, ... along one dimension, computed where every index is exact."""
    full, result = site.arguments["self"], site.value(site.node)
    found = filled(full)
    if found is None:
        return Refusal("its operand is no constant")
    value, sizes, of = found.value, found.sizes, site.value(full)
    if result.ndim == 0:
        return Refusal("it has no dimension")
    if of.dtype.is_complex or result.dtype.is_complex or not isinstance(value, (int, float, bool)):
        return Refusal("the constant is complex or symbolic")
    if found.pinned:
        return Refusal("it is in pinned memory")
    element = as_held(value, of.dtype, result.dtype)
    if element is None:
        return Refusal("the dtype does not hold the constant")
    dim = site.arguments["dim"] % result.ndim
    length = sizes[dim]
    floating = result.dtype.is_floating_point
    wide = torch.float64 if floating else torch.int64
    stop = site.call(operator.add, length, 1) if isinstance(length, torch.fx.Node) else length + 1
    count = site.call(aten.arange.start, 1, stop, dtype=wide, device=result.device)
    steps = site.call(aten.mul.Tensor, count, element)
    narrow = site.call(aten._to_copy.default, steps, dtype=result.dtype) if wide is not result.dtype else steps
    site.through(full)
    if result.ndim == 1:
        return narrow
    column = site.call(aten.reshape.default, narrow, [-1 if axis == dim else 1 for axis in range(result.ndim)])
    spread = site.call(aten.expand.default, column, list(sizes))
    return site.call(aten.clone.default, spread, memory_format=torch.contiguous_format)


def as_held(value: float, dtype: torch.dtype, then: torch.dtype) -> float | None:
    """A number as a tensor of one dtype holds it, then one of another; None where eager refuses it."""
    try:
        return torch.full((), value, dtype=dtype).to(then).item()
    except RuntimeError:
        return None


POINTLESS_CUMSUM = NodeRule(
    name="pointless_cumsum_replacement",
    purpose="the running sum of a constant has a closed form",
    targets=(aten.cumsum.default,),
    rewrite=closed_form,
    numerics="rounded",
    examples=(
        Case("float", lambda x: x + aten.cumsum.default(full([4, 3], 0.5), 1), lambda: [torch.rand(4, 3)]),
        Case("ones", lambda x: torch.ones(4, 3).cumsum(0) - x, lambda: [torch.rand(4, 3)]),
        Case("zeros", lambda x: x + torch.zeros(4, 3).cumsum(1), lambda: [torch.rand(4, 3)]),
        Case("a bool counts as one", lambda x: x + aten.cumsum.default(full([4], 2, torch.bool), 0), lambda: [ones(4)]),
        Case(
            "an int loses its fraction",
            lambda x: x + aten.cumsum.default(full([4], 1.9, torch.int64), 0),
            lambda: [ones(4)],
        ),
        Case(
            "another dtype is asked for",
            lambda x: x + aten.cumsum.default(full([4], 1, torch.int32), 0, dtype=torch.float32),
            lambda: [ones(4)],
        ),
        Case(
            "int32 adds up in int64", lambda x: x + aten.cumsum.default(full([4], 3, torch.int32), 0), lambda: [ones(4)]
        ),
        Case(
            "integers are asked for",
            lambda x: x + aten.cumsum.default(full([4], 1.9), 0, dtype=torch.int64),
            lambda: [ones(4)],
        ),
        Case(
            "narrow integers wrap",
            lambda x: x + aten.cumsum.default(full([9], 100, torch.int8), 0, dtype=torch.int8),
            lambda: [ones(9)],
        ),
        Case(
            "double precision",
            lambda x: x + aten.cumsum.default(full([4], 0.1, torch.float64), 0),
            lambda: [torch.zeros(4, dtype=torch.float64)],
        ),
        Case("infinite", lambda x: x + aten.cumsum.default(full([4], -torch.inf), 0), lambda: [ones(4)]),
        Case("nan", lambda x: x + aten.cumsum.default(full([4], torch.nan), 0), lambda: [ones(4)]),
        Case("returned", lambda x: aten.cumsum.default(full([x.shape[0], 3], 0.5), 0), lambda: [ones(4)]),
        Case(
            "the constant is read again",
            lambda x: (c := full([4], 0.5), x * c + aten.cumsum.default(c, 0))[1],
            lambda: [ones(4)],
        ),
        Case("nothing to sum", lambda x: x + aten.cumsum.default(full([0], 1.0), 0), lambda: [ones(0)]),
        Case("last dimension", lambda x: x + aten.cumsum.default(full([2, 5], 3.0), -1), lambda: [torch.rand(2, 5)]),
        Case(
            "long in half precision",
            lambda x: x + aten.cumsum.default(full([70000], 0.5, torch.float16), 0),
            lambda: [torch.zeros(70000).half()],
        ),
    ),
    near_misses=(
        Case("no constant", lambda x: aten.cumsum.default(x, 0), lambda: [ones(4)]),
        Case(
            "complex",
            lambda x: x + aten.cumsum.default(full([4], 1, torch.complex64), 0),
            lambda: [ones(4)],
        ),
        Case("no dimension", lambda x: x + aten.cumsum.default(full([], 1.0), 0), lambda: [torch.rand(())]),
    ),
)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


# --- a whole one from a partial one -----------------------------------------------------------------------------------


PARTIAL_OF: dict[Any, Any] = {aten.max.default: aten.amax.default, aten.min.default: aten.amin.default}


def smallest_partial(whole: torch.fx.Node) -> torch.fx.Node | Refusal:
    """The reduction of the same kind and tensor that leaves the fewest elements."""
    given, kind = arguments_of(whole), PARTIAL_OF.get(whole.target, whole.target)
    if given.get("dim") or given.get("keepdim"):
        return Refusal("it is partial itself")
    source: torch.fx.Node = given["self"]
    value = fake_value(source)
    least = machine_of(value.device).min_reused_elements
    if not torch_api.known_true(value.numel() >= least):
        return Refusal(f"it is not provably over {least} elements or more")
    partials = [user for user in source.users if user.target is kind and arguments_of(user)["dim"]]
    if not partials:
        return Refusal("nothing of it is reduced in part")
    return min(partials, key=lambda node: torch_api.size_hint(fake_value(node).numel()))


def with_a_later_partial(whole: torch.fx.Node) -> tuple[torch.fx.Node, ...] | Refusal:
    """What is replaced: a partial reduction that stands behind the whole one moves before it."""
    partial = smallest_partial(whole)
    if isinstance(partial, Refusal):
        return partial
    return (whole,) if partial < whole else (whole, partial)


def from_partial(site: Site) -> Any:
    """The largest of all is the largest of the largest of each row."""
    partial = smallest_partial(site.node)
    if isinstance(partial, Refusal):
        return partial
    if len(site.roots) == 1:
        return site.call(partial.target, partial)
    given = arguments_of(partial)
    earlier = site.call(partial.target, given["self"], given["dim"], given["keepdim"])
    return site.call(partial.target, earlier), earlier


def both_read(whole: Any, partial: Any, *, first: bool = False) -> Any:
    """A function that reads a whole and a partial reduction, whichever comes first."""

    def function(x: Any) -> Any:
        if first:
            return whole(x) * 2, partial(x).sum()
        return partial(x).sum(), whole(x) * 2

    return function


def with_nan() -> list[torch.Tensor]:
    x = torch.rand(64, 128)
    x[3, 5] = torch.nan
    return [x]


PARTIAL_REDUCTION = NodeRule(
    name="reuse_partial",
    purpose="a whole reduction starts from a partial one",
    targets=(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default),
    rewrite=from_partial,
    roots=with_a_later_partial,
    examples=(
        Case("amax", both_read(aten.amax.default, lambda x: aten.amax.default(x, [1])), lambda: [torch.rand(64, 128)]),
        Case(
            "min", both_read(aten.min.default, lambda x: aten.amin.default(x, [0], True)), lambda: [torch.rand(64, 128)]
        ),
        Case("nan", both_read(aten.max.default, lambda x: aten.amax.default(x, [-1])), with_nan),
        Case(
            "the partial one comes later",
            both_read(aten.max.default, lambda x: aten.amax.default(x, [1], True), first=True),
            lambda: [torch.rand(64, 128)],
        ),
        Case(
            "both are returned",
            lambda x: (aten.amax.default(x), aten.amax.default(x, [0])),
            lambda: [torch.rand(64, 128)],
        ),
        Case("no dimension left", both_read(aten.amin.default, lambda x: aten.amin.default(x, [0, 1])), with_nan),
    ),
    near_misses=(
        Case("small", both_read(aten.amax.default, lambda x: aten.amax.default(x, [1])), lambda: [torch.rand(4, 128)]),
        Case(
            "another kind",
            both_read(aten.amax.default, lambda x: aten.amin.default(x, [1])),
            lambda: [torch.rand(64, 128)],
        ),
        Case("two whole ones", both_read(aten.amax.default, aten.amax.default), lambda: [torch.rand(64, 128)]),
        Case(
            "of another tensor",
            both_read(aten.amax.default, lambda x: aten.amax.default(aten.neg.default(x), [1])),
            lambda: [torch.rand(64, 128)],
        ),
    ),
)
