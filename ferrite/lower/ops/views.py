"""Views: the same elements under other indices. Nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import size_facts, torch_api
from ferrite.errors import NotLowered
from ferrite.graph import INDEX_INSIDE, argument, fake_value
from ferrite.ir import ONE, ZERO, Index, Number, Symbol, contiguous_strides, exact, maximum, multiply
from ferrite.lower.assertions import add_assert, compared
from ferrite.lower.builder import Builder
from ferrite.lower.ops.conditions import NO, YES, clamped, from_the_end, inside
from ferrite.lower.sizes import UnknownSize
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, check_broadcast, is_one, own_axes

aten, prims = torch.ops.aten, torch.ops.prims


def dim_of(dim: int, rank: int) -> int:
    return dim + max(rank, 1) if dim < 0 else dim


def put(items: Sequence[Index], at: int, new: Index) -> list[Index]:
    """The items with one replaced."""
    return [*items[:at], new, *items[at + 1 :]]


# --- order and number of dimensions -----------------------------------------------------------------------------------


@lowers(aten.permute.default)
def permute(ctx: Builder, x: Value, dims: Sequence[int]) -> Value:
    return permuted(x, [dim_of(dim, x.rank) for dim in dims])


def permuted(x: Value, order: Sequence[int]) -> Value:
    sizes = [x.sizes[dim] for dim in order]
    axes = own_axes(sizes)
    place: list[Index] = [ZERO] * x.rank
    for new, old in enumerate(order):
        place[old] = axes[new]
    return x.view(sizes, place)


@lowers(prims.transpose.default)
def prims_transpose(ctx: Builder, a: Value, permutation: Sequence[int]) -> Value:
    return permuted(a, permutation)


@lowers(aten.transpose.int, aten.transpose_.default)
def transpose(ctx: Builder, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.rank))
    if order:
        left, right = dim_of(dim0, x.rank), dim_of(dim1, x.rank)
        order[left], order[right] = order[right], order[left]
    return permuted(x, order)


@lowers(aten.t.default, aten.t_.default)
def t(ctx: Builder, x: Value) -> Value:
    return permuted(x, list(reversed(range(x.rank))))


@lowers(aten.unsqueeze.default, aten.unsqueeze_.default)
def unsqueeze(ctx: Builder, x: Value, dim: int) -> Value:
    at = dim_of(dim, x.rank + 1)
    sizes = [*x.sizes[:at], ONE, *x.sizes[at:]]
    axes = own_axes(sizes)
    return x.view(sizes, [*axes[:at], *axes[at + 1 :]])


@lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
@lowers(aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims)
def squeeze(ctx: Builder, x: Value, dim: int | Sequence[int] | None = None) -> Value:
    dims = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    found = squeezed(x, [dim_of(each, x.rank) for each in dims])
    if found.rank != len(ctx.out_sizes):
        raise UnknownSize("a size that torch takes for one, and nobody else knows")
    return found


def squeezed(x: Value, dims: Sequence[int]) -> Value:
    kept = [each for each, size in enumerate(x.sizes) if not (each in dims and is_one(size))]
    sizes = [x.sizes[each] for each in kept]
    place: list[Index] = [ZERO] * x.rank
    for each, item in zip(kept, own_axes(sizes), strict=True):
        place[each] = item
    return x.view(sizes, place)


@lowers(prims.squeeze.default)
def prims_squeeze(ctx: Builder, a: Value, dimensions: Sequence[int]) -> Value:
    return squeezed(a, dimensions)


@lowers(aten.expand.default)
def expand(ctx: Builder, x: Value, size: Sequence[Index | int], implicit: bool) -> Value:
    return placed(x, ctx.out_sizes, range(len(ctx.out_sizes) - x.rank, len(ctx.out_sizes)))


@lowers(prims.broadcast_in_dim.default)
def broadcast_in_dim(
    ctx: Builder, a: Value, shape: Sequence[Index | int], broadcast_dimensions: Sequence[int]
) -> Value:
    return placed(a, ctx.out_sizes, broadcast_dimensions)


def placed(x: Value, sizes: Sequence[Index], dims: Sequence[int]) -> Value:
    """Every dimension of `x` becomes one of `dims`; the others repeat it, and so do dimensions of size one."""
    check_broadcast(x.sizes, [sizes[dim] for dim in dims])
    axes = own_axes(sizes)
    return x.view(sizes, [ZERO if is_one(size) else axes[dim] for size, dim in zip(x.sizes, dims, strict=True)])


# --- reshaping --------------------------------------------------------------------------------------------------------


@lowers(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def view(ctx: Builder, x: Value, **shape: object) -> Value:
    return reshaped(x, ctx.out_sizes)


@lowers(aten.view_copy.default)
def view_copy(ctx: Builder, x: Value, size: Sequence[Index | int]) -> Value:
    return ctx.lazy(ctx.out_sizes, reshaped(x, ctx.out_sizes).at(own_axes(ctx.out_sizes)), x.device)


@lowers(prims.reshape.default, prims.collapse_view.default, prims.collapse.default, prims.split_dim.default)
def prims_reshape(ctx: Builder, a: Value, **how: Any) -> Value:
    return reshaped(a, ctx.out_sizes)


def reshaped(x: Value, sizes: Sequence[Index]) -> Value:
    """The elements in the same order under other sizes."""
    if tuple(sizes) == x.sizes:
        return x.view(sizes, own_axes(sizes))
    if any(size is ZERO for size in sizes):
        return x.view(sizes, [ZERO] * x.rank)
    return x.view(sizes, split_place(x.sizes, sizes))


def split_place(old: Sequence[Index], new: Sequence[Index]) -> list[Index]:
    """Coordinates in a tensor of sizes `old` of each element of `new`, in order: runs of dimensions that hold the same
    number of elements are matched one by one, so that most need no division."""
    axes, place = own_axes(new), list[Index]()
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [old[i]] if i < len(old) else [], [new[j]] if j < len(new) else []
        i, j = i + len(olds), j + len(news)
        left, right = total(olds), total(news)
        while left is not right and (i < len(old) or j < len(new)):
            if j >= len(new) or (i < len(old) and smaller(left, right)):
                olds.append(old[i])
                left, i = multiply(left, old[i]), i + 1
            else:
                news.append(new[j])
                right, j = multiply(right, new[j]), j + 1
        place += split_run(olds, news, axes[j - len(news) : j])
    return place


def smaller(left: Index, right: Index) -> bool:
    """Whether to extend the left run: by bounds where they say, else by which divides the other."""
    if left.high is not None and right.high is not None:
        return left.high < right.high
    return exact(right, left) is not None or exact(left, right) is None


def split_run(olds: Sequence[Index], news: Sequence[Index], axes: Sequence[Index]) -> list[Index]:
    flat: Index = ZERO
    for item, stride in zip(axes, contiguous_strides(news), strict=True):
        flat = flat + item * stride
    place: list[Index] = []
    for size, stride in zip(olds, contiguous_strides(olds), strict=True):
        place.append(ZERO if size is ONE else (flat // stride) % size)
    return place


def total(sizes: Sequence[Index]) -> Index:
    product: Index = ONE
    for size in sizes:
        product = multiply(product, size)
    return product


def flattened(x: Value) -> Value:
    return reshaped(x, (total(x.sizes),))


# --- parts ------------------------------------------------------------------------------------------------------------


@lowers(aten.select.int)
def select(ctx: Builder, x: Value, dim: int, index: Index | int) -> Value:
    at = dim_of(dim, x.rank)
    return selected(x, at, selected_place(ctx, x, at, index))


def selected_place(ctx: Builder, x: Value, at: int, index: Index | int) -> Index:
    """Where the element lies that is selected. torch's fake value may not have looked whether there is one: the program
    does, unless the bounds of both numbers, or the guards of the graph, say so."""
    given, size = ctx.index(index), x.sizes[at]
    place = from_the_end(given, size)
    there_is = inside(place, size)
    if there_is is NO and isinstance(given, Number):
        raise NotLowered("there is no such element: eager says so")
    if there_is is not YES and not is_guarded_index(ctx):
        sizes = ", ".join(map(str, x.sizes))
        message = f"select(): index {given} out of range for tensor of size [{sizes}] at dimension {at}"
        add_assert(ctx, there_is, message, IndexError)
    return place


def is_guarded_index(ctx: Builder) -> bool:
    """Whether torch knows that the index of the call at hand lies inside of its dimension."""
    node = ctx.node
    if node is None or node.target is not ctx.operator:  # inside something that was taken apart
        return False
    if INDEX_INSIDE in node.meta:
        return True
    source, dim, index = (argument(node, name) for name in ("self", "dim", "index"))
    place = fake_value(index) if isinstance(index, torch.fx.Node) else index
    size = fake_value(source).shape[dim]  # type: ignore[arg-type]
    return torch_api.known_true(place >= 0) and torch_api.known_true(place < size)  # type: ignore[operator]


def selected(x: Value, at: int, index: Index) -> Value:
    sizes = [*x.sizes[:at], *x.sizes[at + 1 :]]
    axes = own_axes(sizes)
    return x.view(sizes, [*axes[:at], index, *axes[at:]])


@lowers(aten.slice.Tensor)
def slice_(
    ctx: Builder, x: Value, dim: int, start: Index | int | None, end: Index | int | None, step: Index | int
) -> Value:
    at = dim_of(dim, x.rank)
    begin = start_of(ctx, start, x.sizes[at])
    count = slice_count(ctx, begin, end, step, x.sizes[at], ctx.out.shape[at])
    return sliced(x, at, begin, ctx.index(step), count)


def start_of(ctx: Builder, start: Index | int | None, size: Index) -> Index:
    """A start as Python reads it: from the end where negative, never outside."""
    return ZERO if start is None else clamped(from_the_end(ctx.index(start), size), size)


def slice_count(
    ctx: Builder, begin: Index, end: Index | int | None, step: Index | int, size: Index, said: Any
) -> Index:
    """How many elements a slice has: torch's own expression, or, where it has just a new name for it, ours.

    Where data decides and torch goes on as if it had decided so (`y[:n] - y`: as if n were the size of y), that is
    checked, as torch's own graph does.
    """
    count = ctx.index(said)
    stop = size if end is None else clamped(from_the_end(ctx.index(end), size), size)
    stride = ctx.index(step)
    if (
        not isinstance(count, Symbol)
        or count in ctx.bound
        or any(count in bound.atoms for bound in (begin, stop, stride, size))
    ):
        made = (maximum(ZERO, stop - begin) + stride - 1) // stride
        if made is not count and size_facts.is_so_by_assertion(said):
            message = f"Runtime assertion failed: a slice has not the size {count}"
            add_assert(ctx, compared("eq", made, count), message)
        return count
    return ctx.sizes.define(count, (maximum(ZERO, stop - begin) + stride - 1) // stride)


def sliced(x: Value, at: int, start: Index, step: Index, count: Index) -> Value:
    sizes = put(x.sizes, at, count)
    axes = own_axes(sizes)
    return x.view(sizes, put(axes, at, start + axes[at] * step))


@lowers(aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default)
@lowers(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
@lowers(aten.chunk.default, aten.unsafe_chunk.default)
def split(ctx: Builder, x: Value, dim: int, **how: Any) -> list[Value]:
    at = dim_of(dim, x.rank)
    parts, start = list[Value](), ctx.index(0)
    for fake in ctx.out:
        count = ctx.index(fake.shape[at])
        parts.append(sliced(x, at, start, ONE, count))
        start = start + count
    return parts


@lowers(aten.unbind.int)
def unbind(ctx: Builder, x: Value, dim: int) -> list[Value]:
    at = dim_of(dim, x.rank)
    return [selected(x, at, ctx.index(place)) for place in range(len(ctx.out))]


@lowers(aten.diagonal.default)
def diagonal(ctx: Builder, x: Value, offset: int, dim1: int, dim2: int) -> Value:
    first, second = dim_of(dim1, x.rank), dim_of(dim2, x.rank)
    sizes = ctx.out_sizes
    *others, along = own_axes(sizes)
    rest = iter(others)
    place = [
        along + max(-offset, 0) if k == first else along + max(offset, 0) if k == second else next(rest)
        for k in range(x.rank)
    ]
    return x.view(sizes, place)


@lowers(aten.unfold.default)
def unfold(ctx: Builder, x: Value, dimension: int, size: int, step: int) -> Value:
    sizes = ctx.out_sizes
    if not x.rank:
        return x.view(sizes, [])
    at = dim_of(dimension, x.rank)
    *axes, within = own_axes(sizes)
    return x.view(sizes, put(axes, at, axes[at] * step + within))


@lowers(aten.alias.default, aten.detach.default, aten.detach_.default, aten.lift_fresh.default)
def alias(ctx: Builder, x: Value) -> Value:
    return x.view(x.sizes, own_axes(x.sizes))


@lowers(prims.view_of.default)
def view_of(ctx: Builder, a: Value) -> Value:
    return a.view(a.sizes, own_axes(a.sizes))


@lowers(aten.clone.default)
def clone(ctx: Builder, x: Value, memory_format: object) -> Value:
    return ctx.lazy(x.sizes, ctx.elements(x, x.sizes), x.device)
