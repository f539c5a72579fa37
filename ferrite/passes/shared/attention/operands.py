"""Query, key and value as attention takes them: [batch, heads, length, width].

Before a product they are often copied, flattened or repeated, so that a matrix product can read them. Attention reads
them where they lie: `Operands` looks for a value that has the wanted shape already, and writes a view otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied
from ferrite.graph import argument, fake_value, same_sizes
from ferrite.passes.shared.attention.found import Node, same_count, source_of
from ferrite.rewrite import Site, arguments_of

aten, prims = torch.ops.aten, torch.ops.prims
COPIES = frozenset({aten.clone.default, aten.contiguous.default})
# Calls that keep the order of the elements.
FLAT = COPIES | {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
CASTS = frozenset({aten.to.dtype, aten._to_copy.default, prims.convert_element_type.default})
REPEATS = frozenset({aten.repeat_interleave.self_int, torch.repeat_interleave, "repeat_interleave"})


class Operands:
    def __init__(self, site: Site) -> None:
        self.site = site

    def skip(self, node: Node) -> Node:
        """What a call was made of; it is read here now."""
        self.site.through(node)
        inner = source_of(node)
        assert inner is not None
        return inner

    # --- shapes -------------------------------------------------------------------------------------------------------

    def in_shape(self, node: Node, shape: Sequence[Any]) -> Node:
        """The same elements in the same order: an earlier value that has the shape, or a new view."""
        here, path = node, []
        while not same_sizes(fake_value(here).shape, shape):
            inner = source_of(here) if here.target in FLAT else None
            if inner is None or not same_count(inner, node):
                return self.reshaped(node, shape)
            path.append(here)
            here = inner
        self.site.through(*path)
        while here.target in COPIES | {aten.expand.default} and same_look(source_of(here), here):
            here = self.skip(here)
        return here

    def reshaped(self, node: Node, shape: Sequence[Any]) -> Node:
        if not torch_api.known_equal(fake_value(node).numel(), math.prod(shape)):
            raise NotApplied("an operand has another batch than the scores")
        unknown = [place for place, size in enumerate(shape) if not isinstance(size, int)]
        if len(unknown) > 1:
            raise NotApplied("more than one size is known only when it runs")
        sizes = [-1 if place in unknown else size for place, size in enumerate(shape)]
        return self.call(aten.reshape.default, node, sizes)

    def expanded(self, node: Node, shape: Sequence[Any]) -> Node:
        """Repeated along the batch, in no memory of its own."""
        own = fake_value(node).shape
        new = len(shape) - len(own)
        if new < 0 or not all(known_one_of(size, 1, wide) for size, wide in zip(own, shape[new:], strict=True)):
            raise NotApplied("an operand has another batch than the scores")
        kept = (-1 if torch_api.known_equal(*pair) else pair[1] for pair in zip(own, shape[new:], strict=True))
        sizes = [*shape[:new], *kept]
        if not all(isinstance(size, int) for size in sizes):
            raise NotApplied("how often an operand is repeated is known only when it runs")
        return self.call(aten.expand.default, node, sizes)

    def reordered(self, node: Node, order: tuple[int, ...]) -> Node:
        """Dimensions in another order; transposing twice is not transposing."""
        path = []
        here = node
        while order != tuple(range(len(order))) and (inner_order := permutation(here)) is not None:
            order = tuple(inner_order[dim] for dim in order)
            path.append(here)
            here = source_of(here) or here
        self.site.through(*path)
        return here if order == tuple(range(len(order))) else self.call(aten.permute.default, here, list(order))

    # --- what attention does by itself --------------------------------------------------------------------------------

    def without_copies(self, node: Node) -> Node:
        """Attention reads any strides, as long as a row is dense."""
        while node.target in COPIES and (inner := source_of(node)) is not None and is_dense_row(fake_value(inner)):
            node = self.skip(node)
        return node

    def narrowed(self, node: Node, dtype: torch.dtype) -> Node:
        """What a factor was before it was cast up: products of narrow numbers are summed in a wide type anyway."""
        while fake_value(node).dtype != dtype:
            inner = source_of(node) if node.target in CASTS else None
            if inner is None or fake_value(inner).dtype.itemsize > fake_value(node).dtype.itemsize:
                raise NotApplied(f"query and key are {fake_value(node).dtype}, the value is {dtype}")
            node = self.skip(node)
        return node

    def scaled(self, node: Node) -> tuple[Node, float]:
        """A factor of the operand belongs to the scale of the scores."""
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and len(node.users) == 1:
            inner, number = source_of(node), argument(node, "other")
            dense = inner is not None and is_dense_row(fake_value(inner))
            if isinstance(number, (int, float)) and number > 0 and dense and same_look(inner, node):
                return self.skip(node), number if node.target is aten.mul.Tensor else 1 / number
        return node, 1.0

    def grouped(self, key: Node, value: Node) -> tuple[Node, Node] | None:
        """Keys and values before each head was repeated for its group of queries."""
        both = repeated(key), repeated(value)
        if both[0] is None or both[1] is None or both[0][2] != both[1][2]:
            return None
        found = []
        for base, path, _ in filter(None, both):
            self.site.through(*path)
            lacks = fake_value(base).dim() == 5
            found.append(self.call(aten.squeeze.dim, base, 2) if lacks else base)
        return found[0], found[1]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made: Node = self.site.call(target, *args, **kwargs)
        return made


def known_one_of(size: Any, *sizes: Any) -> bool:
    return any(torch_api.known_equal(size, each) for each in sizes)


def same_look(one: Node | None, other: Node) -> bool:
    if one is None:
        return False
    old, new = fake_value(one), fake_value(other)
    return old.dtype == new.dtype and same_sizes(old.shape, new.shape)


def is_dense_row(value: torch.Tensor) -> bool:
    return torch_api.known_equal(value.stride(-1), 1)


def permutation(node: Node) -> tuple[int, ...] | None:
    """For each dimension of a call that only reorders them, the one it was."""
    rank = fake_value(node).dim()
    if node.target is aten.permute.default:
        return tuple(dim % rank for dim in argument(node, "dims") or ())
    if node.target is aten.transpose.int:
        order = list(range(rank))
        one, other = (int(argument(node, name)) % rank for name in ("dim0", "dim1"))  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
        return tuple(order)
    return None


def repeated(node: Node) -> tuple[Node, list[Node], int] | None:
    """[b, h, l, d] from [b, h / n, 1, l, d] or [b, h / n, l, d]: the source, the calls between, and n."""
    shape = fake_value(node).shape
    if node.target in REPEATS:
        given, source = arguments_of(node), source_of(node)
        times, dim = given.get("repeats", given.get("1")), given.get("dim", given.get("2"))
        if len(shape) == 4 and type(times) is int and dim in (1, -3) and source is not None:
            return source, [node], times
        return None
    path = []
    while node.target in FLAT and node.target is not aten.expand.default and (inner := source_of(node)) is not None:
        path.append(node)
        node = inner
    if node.target is not aten.expand.default or len(shape) != 4 or not path:
        return None
    base, wide = source_of(node), fake_value(node).shape
    if base is None or len(wide) != 5 or fake_value(base).dim() != 5 or type(wide[2]) is not int:
        return None
    narrow = fake_value(base).shape
    if not same_sizes((*wide[:2], 1, *wide[3:]), narrow) or not same_sizes(
        (wide[0], *wide[3:]), (shape[0], *shape[2:])
    ):
        return None
    return base, [*path, node], wide[2]
