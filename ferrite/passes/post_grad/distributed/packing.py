"""How several collectives of one kind become one: their operands packed into one tensor, and its results taken apart.

    a = all_gather(x); b = all_gather(y)                 t = all_gather(cat(flat x, flat y))
    a = wait(a); b = wait(b)                      =>     t = wait(t).view(ranks, -1)
                                                         a, b = the columns of x and of y, each in its shape

A packed all-gather lies rank by rank, so its results are copied out of it; a reduce-scatter is packed so that the part
of each rank is together. Packing is written as operators of the graph (`traced`), where kernels write the parts; as one
call (`opaque`), which also packs tensors of different types as bytes (`opaque_multidtype`); or the collective takes a
list and nothing is packed (`coalesced`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, storages_of
from ferrite.passes.post_grad.distributed.exchanges import (
    ALL_GATHER,
    ALL_REDUCE,
    MEMBERS,
    PART,
    REDUCE_SCATTER,
    WAIT,
    Exchange,
)
from ferrite.passes.post_grad.sizes import SizeWriter
from ferrite.passes.shared.library import define
from ferrite.rewrite import Writer, inherit

aten = torch.ops.aten
MERGEABLE: Mapping[str, Any] = {
    "all_gather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
}


@define("pack_bucket(Tensor[] tensors) -> Tensor")
def pack_bucket(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one behind the other, as one row: of their type, or of bytes where they have several, each of which then
    begins at a multiple of its size, and all end at a multiple of the largest."""
    dtypes = {tensor.dtype for tensor in tensors}
    flat = [tensor.reshape(-1) for tensor in tensors]
    if len(dtypes) == 1:
        return torch.cat(flat)
    pieces = [tensor.contiguous().view(torch.uint8) for tensor in flat]
    rest = padding(tensors)
    return torch.cat([*pieces, pieces[0].new_zeros(rest)]) if rest else torch.cat(pieces)


def padding(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes behind the last one, so that what follows begins at a multiple of the largest item."""
    total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
    return int(-total % max(tensor.dtype.itemsize for tensor in tensors))


class Merge:
    """Several exchanges, and what is written in their place, before the `last` of them that begins."""

    def __init__(
        self, members: Sequence[Exchange], style: str, graph: torch.fx.Graph, mode: Any, last: torch.fx.Node
    ) -> None:
        self.style, self.graph, self.last = style, graph, last
        # the widest items first, so that each begins at a multiple of its own size
        widest_first = style == "opaque_multidtype" and len({each.dtypes for each in members}) > 1
        self.members = sorted(members, key=lambda each: -each.dtypes[0].itemsize) if widest_first else list(members)
        self.operands: list[Any] = [each.start.args[0] for each in self.members]
        self.ranks = members[0].shape.size
        self.writer = Writer(graph, mode)
        self.sizes = SizeWriter(self.writer, last)
        self.as_bytes = widest_first

    def write(self) -> list[torch.fx.Node]:
        """The new nodes. Those that they stand for are gone."""
        with self.graph.inserting_before(self.last):
            results = self.coalesced() if self.style == "coalesced" else self.packed()
        for exchange, result in zip(self.members, results, strict=True):
            (wait,) = exchange.waits
            wait.replace_all_uses_with(result)
            self.graph.erase_node(wait)
            self.graph.erase_node(exchange.start)
        return self.writer.made

    # --- one tensor ---------------------------------------------------------------------------------------------------

    def packed(self) -> list[torch.fx.Node]:
        ways: Mapping[str, Callable[[], list[torch.fx.Node]]] = {
            "all_gather": self.gathered,
            "reduce_scatter": self.scattered,
            "all_reduce": self.reduced,
        }
        results = ways[self.members[0].kind]()
        for exchange, result in zip(self.members, results, strict=True):
            inherit(result, exchange.waits[0])
        return results

    def row(self, tensors: Sequence[Any]) -> torch.fx.Node:
        if self.style != "traced":
            return self.writer.call(torch.ops.ferrite.pack_bucket.default, list(tensors))
        return self.writer.call(aten.cat.default, [self.writer.call(aten.reshape.default, x, [-1]) for x in tensors])

    def exchanged(self, packed: torch.fx.Node) -> torch.fx.Node:
        first = self.members[0].start
        start = self.writer.call(first.target, packed, *first.args[1:])
        wait = self.writer.call(WAIT, start)
        for node in (packed, start, wait):
            inherit(node, first)
        start.meta[MEMBERS] = len(self.members)
        return wait

    def gathered(self) -> list[torch.fx.Node]:
        matrix = self.writer.call(aten.view.default, self.exchanged(self.row(self.operands)), [self.ranks, -1])
        widths = [self.width(x) for x in self.operands]
        if self.as_bytes and (rest := padding([fake_value(x) for x in self.operands])):
            widths.append(rest)
        return [
            self.shaped(part, exchange.start)
            for part, exchange in zip(self.columns(matrix, widths, 1), self.members, strict=False)
        ]

    def scattered(self) -> list[torch.fx.Node]:
        rows = [self.writer.call(aten.reshape.default, x, [self.ranks, -1]) for x in self.operands]
        packed = self.writer.call(aten.reshape.default, self.writer.call(aten.cat.default, rows, 1), [-1])
        widths = [self.sizes.node(fake_value(each.start).numel()) for each in self.members]
        parts = self.columns(self.exchanged(packed), widths, 0)
        return [self.shaped(part, each.start) for part, each in zip(parts, self.members, strict=True)]

    def reduced(self) -> list[torch.fx.Node]:
        parts = self.columns(self.exchanged(self.row(self.operands)), [self.width(x) for x in self.operands], 0)
        return [self.shaped(part, each.start) for part, each in zip(parts, self.members, strict=True)]

    def columns(self, packed: torch.fx.Node, widths: Sequence[Any], dim: int) -> list[torch.fx.Node]:
        split = self.writer.call(aten.split_with_sizes.default, packed, list(widths), dim)
        return [self.writer.call(operator.getitem, split, place) for place in range(len(widths))]

    def width(self, operand: Any) -> Any:
        value = fake_value(operand)
        return self.sizes.node(value.numel() * (value.dtype.itemsize if self.as_bytes else 1))

    def shaped(self, part: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
        """A part in the shape and the memory of its own that the result of a collective has."""
        value = fake_value(like)
        if self.as_bytes:
            flat = self.writer.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            part = self.writer.call(aten.view.dtype, self.writer.call(aten.view.default, flat, [-1]), value.dtype)
        shaped = self.writer.call(aten.reshape.default, part, self.sizes.nodes(value.shape))
        is_own = self.as_bytes or storages_of(shaped).isdisjoint(storages_of(part))
        return shaped if is_own else self.writer.call(aten.clone.default, shaped)

    # --- a list -------------------------------------------------------------------------------------------------------

    def coalesced(self) -> list[torch.fx.Node]:
        first = self.members[0].start
        name = str(torch_api.operator_name(first.target)).removesuffix(".default")
        target = torch_api.find_operator(f"{name}_coalesced.default")
        start = self.writer.call(target, list(self.operands), *first.args[1:])
        inherit(start, first)
        start.meta[MEMBERS] = len(self.members)
        results = []
        for place, exchange in enumerate(self.members):
            item = self.writer.call(operator.getitem, start, place)
            results.append(self.writer.call(WAIT, item))
            for node in (item, results[-1]):
                inherit(node, exchange.waits[0])
        return results


def operand_of(exchange: Exchange) -> Any:
    return exchange.start.args[0] if exchange.start.args else None


def refusal_to_merge(exchange: Exchange, style: str) -> Refusal | None:
    """Why a collective cannot become part of another; None where it can."""
    start, operand = exchange.start, operand_of(exchange)
    if start.target is not MERGEABLE.get(exchange.kind):
        return Refusal("it is no collective on one tensor")
    if len(exchange.waits) != 1 or len(start.users) != 1:
        return Refusal("its result is read before anybody waits for it")
    if PART in start.meta:
        return Refusal("it is a part of one that was taken apart")
    if start.kwargs:
        return Refusal("it is spelled with keywords")
    if exchange.kind == "reduce_scatter":
        if style == "opaque_multidtype":
            return Refusal("sums of several types cannot be packed as bytes")
        rows = fake_value(operand).shape[0]
        if not torch_api.known_equal(rows % exchange.shape.size, 0):
            return Refusal("its rows cannot be shared evenly among the ranks")
    value = fake_value(operand)
    if value.dtype.is_complex or value.layout is not torch.strided:
        return Refusal("its elements are complex, or it is not strided")
    if not value.ndim and exchange.kind != "all_reduce":
        return Refusal("it has no dimension to be shared along")
    return None
