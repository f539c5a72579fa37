"""Products of tensor parallel layers begin with the part of a matrix that is there, and send on the part that is done.

    x = wait(all_gather(s))                  x0 = all_gather(s[:m]); x1 = all_gather(s[m:])
    y = mm(x, w)                      =>     y0 = mm(wait(x0), w); y1 = mm(wait(x1), w); y = their rows, in order

    y = mm(x, w)                             y0 = mm(x's rows 0 to m of each rank, w); r0 = reduce_scatter(y0)
    r = wait(reduce_scatter(y))       =>     y1 = mm(the others, w); r1 = reduce_scatter(y1); r = wait both

So one part is on its way while another is multiplied. Each row of a product and each sum over ranks is computed as
before. Where the ranks of a group share memory (GPUs, once `enable_symm_mem_for_group` was called), torch has one
operator for a gather with its products, and one for a product with its reduce-scatter: those are called, where they do
what the collective does (`shared_memory`), and parts are made elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import Regions, argument, fake_value, mode_of
from ferrite.passes.post_grad.distributed.agreement import all_share_memory, decide
from ferrite.passes.post_grad.distributed.exchanges import (
    ALL_GATHER,
    PART,
    REDUCE_SCATTER,
    WAIT,
    WHY,
    Exchange,
    exchanges_in,
)
from ferrite.passes.post_grad.distributed.overlap import layout_of, limits_for
from ferrite.passes.post_grad.distributed.settings import AsyncTp, Overlap, chosen
from ferrite.passes.post_grad.distributed.shared_memory import refuse_memory, refuse_operator, refuse_words
from ferrite.passes.post_grad.distributed.timeline import Placement, forecast
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Writer, inherit

aten = torch.ops.aten
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
# Torch defines these when memory that ranks share is first asked for.
FUSED_GATHER = "symm_mem.fused_all_gather_matmul.default"
FUSED_SCATTER = "symm_mem.fused_matmul_reduce_scatter.default"
NO_MEMORY = Refusal("the ranks of its group share no memory")


@graph_pass(stage="post_grad", with_collectives=True)
def micro_pipeline_tp_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Gathers with the products behind them, and products with the reduce-scatters behind them, go part by part."""
    settings = chosen(context.options, "async_tp", AsyncTp)
    if settings is None:
        return 0
    hidden = hidden_anyway(gm, context)
    count, regions, exchanges = 0, Regions(gm.graph), exchanges_in(gm.graph)
    groups = dict.fromkeys(each.group for each in exchanges if each.start.target in (ALL_GATHER, REDUCE_SCATTER))
    sharing = {group for group in groups if all_share_memory(group)}
    for exchange in exchanges:
        if not context.fuel.left or exchange.start.target not in (ALL_GATHER, REDUCE_SCATTER):
            continue
        if exchange.start in hidden:
            exchange.start.meta[WHY] = "what does not need it hides it"
            continue
        found = gathered_product(exchange) if exchange.start.target is ALL_GATHER else scattered_product(exchange)
        apart = refuse_one_operator(exchange) if exchange.group in sharing else NO_MEMORY
        refusal = found if isinstance(found, Refusal) else refusal_of(found, settings.chunks, apart is None, regions)
        if refusal is not None or isinstance(found, Refusal):
            exchange.start.meta[WHY] = refusal.reason if refusal is not None else ""
            continue
        context.fuel.spend()
        Parts(gm.graph, found, settings.chunks, apart).write()
        context.count(f"micro_pipeline_{exchange.kind}")
        count += 1
    return count


def refuse_one_operator(exchange: Exchange) -> Refusal | None:
    """Why torch's operator for a collective and its products is not called, in a group that shares memory; None where
    it is."""
    if exchange.kind == "all_gather":
        found = refuse_operator(exchange, torch_api.find_operator(FUSED_GATHER))
        return found or refuse_memory(exchange) or refuse_words(exchange)
    return refuse_operator(exchange, torch_api.find_operator(FUSED_SCATTER))


def hidden_anyway(gm: torch.fx.GraphModule, context: PassContext) -> set[torch.fx.Node]:
    """Collectives that moving them alone would hide, where that is asked for too."""
    overlap = chosen(context.options, "overlap", Overlap)
    layout = layout_of(gm.graph, context.options, overlap.compute) if overlap is not None else None
    if overlap is None or layout is None or layout.has_streams:
        return set()

    def own_choice() -> list[int]:
        jobs = [layout.job(exchange) for exchange in layout.exchanges]
        found = forecast(Placement(jobs, layout.clock, limits_for(layout, overlap)).placed(), layout.clock)
        return [number for number, exposed in enumerate(found.exposed) if exposed <= 0]

    decided = decide(gm, "whole", context.options, layout.exchanges, layout.freedom(), own_choice)
    return {layout.exchanges[number].start for number in decided}


# --- what is there ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A collective and its products. `dim`: of what one rank has, the dimension that ranks have parts of. `matrix`: of
    a gather, the gathered rows, which `products` multiply; of a reduce-scatter, what its one product multiplies.
    `between`: nodes of which nothing is left. `sizes`: of what one rank has, with the columns of the product."""

    exchange: Exchange
    dim: int
    matrix: torch.fx.Node
    products: tuple[torch.fx.Node, ...]
    between: tuple[torch.fx.Node, ...]
    sizes: tuple[Any, ...]

    @property
    def is_gather(self) -> bool:
        return self.exchange.kind == "all_gather"


def is_plain(exchange: Exchange) -> Refusal | None:
    start = exchange.start
    if len(exchange.waits) != 1 or len(start.users) != 1 or start.kwargs:
        return Refusal("its result is read before anybody waits for it")
    return None


def gathered_product(exchange: Exchange) -> Pair | Refusal:
    """A gather whose rows are multiplied, with nothing but another look at them in between."""
    if (refusal := is_plain(exchange)) is not None:
        return refusal
    shard: Any = exchange.start.args[0]
    node, between, dim = exchange.waits[0], list[torch.fx.Node](), 0
    ranks, sizes = exchange.shape.size, tuple(fake_value(shard).shape)
    while not (products := products_of(node)):
        user = only_look(node)
        if user is None:
            return Refusal("it is read in other ways than by a product of its rows")
        if user.target in RESHAPES or user.target is aten.clone.default:
            between, node = [*between, node], user
        elif user.target is aten.permute.default and not dim and (moved := moved_rank(user, ranks, sizes)):
            between, node, dim = [*between, node], user, moved
        elif user.target in SPLITS and not dim and (join := joined_parts(user, ranks)) is not None:
            between += [node, user, *user.users]
            node, dim = join
            if not dim or argument(user, "dim") != 0:
                return Refusal("its parts are joined in another order")
        else:
            return Refusal("it is not multiplied")
    columns = fake_value(node).shape[-1]
    if not torch_api.known_equal(columns, sizes[-1]) or dim == len(sizes) - 1:
        return Refusal("it is gathered along the dimension that products sum over")
    return Pair(exchange, dim, node, tuple(products), tuple(between), sizes)


def only_look(node: torch.fx.Node) -> torch.fx.Node | None:
    """Who alone reads a node. Equal looks at it that are only multiplied become one first."""
    users: list[Any] = list(node.users) or [None]
    first, *others = users
    if first is not None and first.target in RESHAPES:
        for other in others:
            if other.target not in RESHAPES or other.args[1:] != first.args[1:] or not products_of(other):
                return None
        for other in others:
            other.replace_all_uses_with(first)
            node.graph.erase_node(other)
        others = []
    return None if others else first


def products_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The products of which a matrix is the left side alone."""
    return [user for user in node.users if user.target is aten.mm.default and user.args[0] is node is not user.args[1]]


def moved_rank(node: torch.fx.Node, ranks: int, sizes: Sequence[Any]) -> int | None:
    """Where a permutation moves the ranks to, which are the first dimension; None where it does anything else."""
    operand: Any = node.args[0]
    if not same(fake_value(operand).shape, (ranks, *sizes)):
        return None
    dims: Any = argument(node, "dims")
    order = [each % (len(sizes) + 1) for each in dims]
    place = order.index(0)
    return place if place and order == [*range(1, place + 1), 0, *range(place + 1, len(order))] else None


def joined_parts(node: torch.fx.Node, ranks: int) -> tuple[torch.fx.Node, int] | None:
    """Where equal parts, one for each rank, are joined again, in order: the joined ones, and along which dimension."""
    users = list(node.users)
    if len(users) != ranks or any(user.target is not operator.getitem for user in users):
        return None
    joins = {each for user in users for each in user.users}
    join = next(iter(joins))
    if len(joins) != 1 or join.target is not aten.cat.default or list(join.args[0]) != users:  # type: ignore[arg-type]
        return None
    if [user.args[1] for user in users] != list(range(ranks)):
        return None
    if len({tuple(fake_value(user).shape) for user in users}) != 1:
        return None
    return join, argument(join, "dim") % fake_value(join).ndim


def same(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(sizes) == len(others) and all(map(torch_api.known_equal, sizes, others))


def scattered_product(exchange: Exchange) -> Pair | Refusal:
    """A product whose rows are added up over ranks and shared out, with nothing but another look at them in between."""
    if (refusal := is_plain(exchange)) is not None:
        return refusal
    node: Any = exchange.start.args[0]
    sizes, between, dim = tuple(fake_value(exchange.waits[0]).shape), [], 0
    while node.target is not aten.mm.default:
        if len(node.users) != 1 or not node.all_input_nodes:
            return Refusal("what is added up is read elsewhere")
        if node.target is aten.permute.default and not dim and (moved := split_rank(node, exchange.shape.size, sizes)):
            dim = moved
        elif node.target is aten.cat.default and not dim and (split := split_of(node, exchange.shape.size)) is not None:
            between += [node, *split.users]
            whole: Any = split.args[0]
            dim, node = argument(split, "dim") % fake_value(whole).ndim, split
        elif node.target not in RESHAPES and node.target is not aten.clone.default:
            return Refusal("it is no product that is added up")
        between.append(node)
        node = node.args[0]
    if len(node.users) != 1:
        return Refusal("the product is read elsewhere")
    matrix = node.args[0]
    columns = fake_value(node).shape[-1]
    if len(sizes) < 2 or not torch_api.known_equal(columns, sizes[-1]) or dim == len(sizes) - 1:
        return Refusal("the columns of the product are shared out")
    return Pair(exchange, dim, matrix, (node,), tuple(between), sizes)


def split_of(join: torch.fx.Node, ranks: int) -> torch.fx.Node | None:
    """What is taken apart into equal parts, one for each rank, which lie one behind the other from then on."""
    first: Any = next(iter(join.all_input_nodes))
    split = first.args[0] if first.target is operator.getitem else None
    if not isinstance(split, torch.fx.Node) or split.target not in SPLITS:
        return None
    return split if joined_parts(split, ranks) == (join, 0) else None


def split_rank(node: torch.fx.Node, ranks: int, sizes: Sequence[Any]) -> int | None:
    """From where a permutation moves the ranks to the front."""
    operand: Any = node.args[0]
    dims: Any = argument(node, "dims")
    order = [each % (len(sizes) + 1) for each in dims]
    place = order[0]
    if len(order) != len(sizes) + 1 or not same(fake_value(operand).shape, (*sizes[:place], ranks, *sizes[place:])):
        return None
    return place if place and order == [place, *(each for each in range(len(order)) if each != place)] else None


def refusal_of(pair: Pair, chunks: int, is_fused: bool, regions: Regions) -> Refusal | None:
    """Why parts of a pair cannot be made; None where they can."""
    if not regions.all_in_one((pair.exchange.start, *pair.products)):
        return Refusal("memory is written between it and the product")
    if not all(isinstance(size, int) for size in (*pair.sizes, *fake_value(pair.matrix).shape)):
        return Refusal("its sizes are not known")
    if not is_fused and pair.sizes[pair.dim] % chunks:
        return Refusal(f"the rows of a rank do not make {chunks} parts")
    if pair.is_gather and any(follows(product.args[1], pair.matrix) for product in pair.products):
        return Refusal("it is multiplied with what is computed from it")
    return None


def follows(node: Any, other: torch.fx.Node) -> bool:
    """Whether a node is computed from another, which stands before it."""
    seen, stack = set[torch.fx.Node](), [node]
    while stack:
        found = stack.pop()
        if found is other:
            return True
        if found not in seen and other < found:
            seen.add(found)
            stack += found.all_input_nodes
    return False


# --- what is written --------------------------------------------------------------------------------------------------


class Parts:
    """A pair, written part by part, or as one operator. `apart`: why it is not the latter."""

    def __init__(self, graph: torch.fx.Graph, pair: Pair, chunks: int, apart: Refusal | None) -> None:
        self.graph, self.pair, self.chunks, self.apart = graph, pair, chunks, apart
        self.writer = Writer(graph, mode_of(graph))
        self.ranks = pair.exchange.shape.size
        self.start, self.wait = pair.exchange.start, pair.exchange.waits[0]
        sizes, dim = list(pair.sizes), pair.dim
        self.rows = sizes[dim] // chunks
        self.part_sizes = [*sizes[:dim], self.rows, *sizes[dim + 1 :]]

    def write(self) -> None:
        is_fused = self.apart is None
        if self.pair.is_gather:
            (self.fused_gather if is_fused else self.gather)()
        else:
            (self.fused_scatter if is_fused else self.scatter)()
        gone = [*self.pair.products, self.pair.matrix, *reversed(self.pair.between), self.wait, self.start]
        if not self.pair.is_gather:
            gone = [self.wait, self.start, *self.pair.between, *self.pair.products]
        for node in dict.fromkeys(gone):
            if not node.users:
                self.graph.erase_node(node)

    def call(self, target: Any, *args: Any, like: torch.fx.Node, **kwargs: Any) -> torch.fx.Node:
        node = self.writer.call(target, *args, **kwargs)
        inherit(node, like)
        if target in (ALL_GATHER, REDUCE_SCATTER):
            node.meta[PART] = True
            if self.apart is not None and self.apart is not NO_MEMORY:
                node.meta[WHY] = f"in parts, as no operator in shared memory does it: {self.apart.reason}"
        return node

    def gather(self) -> None:
        """Every part begins at once; each product takes its parts one after the other."""
        pair, like = self.pair, self.start
        shard: Any = like.args[0]
        begun = []
        with self.graph.inserting_before(like):
            for number in range(self.chunks):
                first = number * self.rows
                part = self.call(aten.slice.Tensor, shard, pair.dim, first, first + self.rows, like=like)
                part = self.call(aten.clone.default, part, like=like, memory_format=torch.contiguous_format)
                begun.append(self.call(ALL_GATHER, part, *like.args[1:], like=like))
        parts: list[torch.fx.Node] = []
        for product in sorted(pair.products):
            results = []
            with self.graph.inserting_before(product):
                for number, start in enumerate(begun):
                    if len(parts) <= number:
                        waited = self.call(WAIT, start, like=self.wait)
                        columns = [-1, pair.sizes[-1]]
                        parts.append(self.call(aten.reshape.default, waited, columns, like=self.wait))
                    results.append(self.call(aten.mm.default, parts[number], product.args[1], like=product))
                whole = self.joined(results, product)
            product.replace_all_uses_with(whole)
        others = [user for user in pair.matrix.users if user not in pair.products]
        if others:  # rows that are read elsewhere too, as for the gradient of the other side
            first = min(others)
            hoist(parts, first)
            with self.graph.inserting_before(first):
                whole = self.joined(parts, pair.matrix)
            pair.matrix.replace_all_uses_with(whole, delete_user_cb=lambda user: user in others)

    def joined(self, parts: Sequence[torch.fx.Node], like: torch.fx.Node) -> torch.fx.Node:
        """Rows of all parts, each of which has those of rank after rank, in the order of the whole."""
        dim, leading = self.pair.dim, self.part_sizes[:-1]
        looks = []
        for part in parts:
            columns = fake_value(part).shape[-1]
            look = self.call(aten.reshape.default, part, [self.ranks, *leading, columns], like=like)
            if dim:
                order = [*range(1, dim + 1), 0, *range(dim + 1, len(leading) + 2)]
                look = self.call(aten.permute.default, look, order, like=like)
            looks.append(look)
        whole = self.call(aten.cat.default, looks, dim + 1, like=like)
        return self.call(aten.reshape.default, whole, list(fake_value(like).shape), like=like)

    def scatter(self) -> None:
        """Each part is sent as soon as it is multiplied."""
        pair, (product,) = self.pair, self.pair.products
        dim, sizes = pair.dim, list(pair.sizes)
        inner = fake_value(pair.matrix).shape[-1]
        begun, waited = [], []
        with self.graph.inserting_before(self.start):
            by_rank = [*sizes[:dim], self.ranks, *sizes[dim:-1], inner]
            rows = self.call(aten.reshape.default, pair.matrix, by_rank, like=product)
            for number in range(self.chunks):
                first = number * self.rows
                part = self.call(aten.slice.Tensor, rows, dim + 1, first, first + self.rows, like=product)
                if dim:
                    order = [dim, *(each for each in range(len(by_rank)) if each != dim)]
                    part = self.call(aten.permute.default, part, order, like=product)
                part = self.call(aten.clone.default, part, like=product, memory_format=torch.contiguous_format)
                part = self.call(aten.reshape.default, part, [-1, inner], like=product)
                done = self.call(aten.mm.default, part, product.args[1], like=product)
                leading = [self.ranks * self.part_sizes[0], *self.part_sizes[1:]]
                done = self.call(aten.reshape.default, done, leading, like=product)
                begun.append(self.call(REDUCE_SCATTER, done, *self.start.args[1:], like=self.start))
        with self.graph.inserting_before(self.wait):
            waited = [self.call(WAIT, start, like=self.wait) for start in begun]
            whole = self.call(aten.cat.default, waited, dim, like=self.wait)
        self.wait.replace_all_uses_with(whole)

    # --- where ranks share memory -------------------------------------------------------------------------------------

    def fused_gather(self) -> None:
        pair, like = self.pair, self.start
        others = [user for user in pair.matrix.users if user not in pair.products]
        first = min(pair.products)
        rights: list[Any] = [product.args[1] for product in pair.products]
        hoist(rights, first)
        with self.graph.inserting_before(first):
            shard: Any = like.args[0]
            both = self.call(
                torch_api.find_operator(FUSED_GATHER),
                shard,
                rights,
                pair.dim,
                pair.exchange.group,
                like=like,
                return_A=bool(others),
            )
            results = self.call(operator.getitem, both, 1, like=like)
            for number, product in enumerate(pair.products):
                result = self.call(operator.getitem, results, number, like=product)
                whole = self.call(aten.reshape.default, result, list(fake_value(product).shape), like=product)
                product.replace_all_uses_with(whole)
            if others:
                rows = self.call(operator.getitem, both, 0, like=self.wait)
                rows = self.call(aten.reshape.default, rows, list(fake_value(pair.matrix).shape), like=pair.matrix)
                pair.matrix.replace_all_uses_with(rows, delete_user_cb=lambda user: user in others)

    def fused_scatter(self) -> None:
        pair, (product,) = self.pair, self.pair.products
        sizes, dim = list(pair.sizes), pair.dim
        inner = fake_value(pair.matrix).shape[-1]
        with self.graph.inserting_before(self.start):
            whole = [*sizes[:dim], self.ranks * sizes[dim], *sizes[dim + 1 : -1], inner]
            left = self.call(aten.reshape.default, pair.matrix, whole, like=product)
            operands = (left, product.args[1], pair.exchange.reduce_op, dim, pair.exchange.group)
            result = self.call(torch_api.find_operator(FUSED_SCATTER), *operands, like=self.start)
        self.wait.replace_all_uses_with(result)


def hoist(wanted: Sequence[torch.fx.Node], before: torch.fx.Node) -> None:
    """Move what nodes are computed from before another, in their order."""
    needed, stack = set[torch.fx.Node](), list(wanted)
    while stack:
        node = stack.pop()
        if before < node and node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    for node in sorted(needed):
        before.prepend(node)
