"""Many additions to few places: each goes to one of several copies, so that fewer wait for each other.

    index_put(x, [index], v, accumulate)      =>      x + sum over P copies, write k going to copy k mod P

Eager raises for an index out of range, and so does this: the index is read out of an iota by itself, which changes no
index that is in range and raises the same error for one that is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.options import at_least, settings_of
from ferrite.passes.shared.cases import on_meta
from ferrite.passes.shared.facts import on_cpu
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, in_order

aten = torch.ops.aten


GROUP = "partitioned_scatter"
MAX_COPIED_ELEMENTS = 1 << 28  # of all copies together, where nobody knows how much memory the device has


@dataclass(frozen=True)
class ScatterCopies:
    """How many copies are worth it: `min_index` writes at least, copies of at most `mem_fraction` of the memory."""

    min_parts: int = 2
    max_parts: int = 128
    min_index: int = 4096  # below, writes rarely wait for each other
    mem_fraction: float = at_least(0, 0.1)


def copies_for(
    writes: int, elements: int, limits: ScatterCopies | None = None, most_elements: float = MAX_COPIED_ELEMENTS
) -> int:
    """How many copies: more where more writes meet in one place, fewer where a copy is large. A power of two, or 0.

    >>> copies_for(5000, 10), copies_for(5000, 5000), copies_for(10**7, 2 * 10**6)
    (128, 16, 16)
    """
    limits = limits or ScatterCopies()
    if elements == 0:
        return 0
    wanted = 16 * math.sqrt(writes / elements)
    for large, most in ((10**8, 4), (10**7, 8), (10**6, 16)):
        if elements >= large:
            wanted = min(wanted, most)
            break
    wanted = min(wanted, limits.max_parts, most_elements / elements)
    return 0 if wanted < max(limits.min_parts, 1) else 1 << int(math.log2(wanted))


def most_elements_on(device: torch.device, itemsize: int, limits: ScatterCopies) -> float:
    if device.type != "cuda":
        return MAX_COPIED_ELEMENTS
    return limits.mem_fraction * torch.cuda.get_device_properties(device).total_memory / itemsize


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
    limits = settings_of(site.options.post_grad_fusions, GROUP, ScatterCopies)
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

PARTITIONED_SCATTER_RULES: tuple[AnyRule, ...] = (PARTITIONED_SCATTER,)
