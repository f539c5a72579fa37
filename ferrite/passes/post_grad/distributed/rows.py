"""A gathered matrix that is only multiplied with itself and shared out again need not be gathered.

    x = wait(all_gather(s))                              g = wait(all_reduce(mm(s.t(), s), "sum"))
    g = mm(x.t(), x); h = mm(x.t(), x * 2)        =>     y = mm(s, g)
    y = split(mm(x, g), rows)[rank]

As optimizers do that work on matrices whose rows are shared among ranks. What has the rows of `x` is computed for the
rows of this rank alone; products and sums over rows are sums over ranks. Everything between the gather and the split
must be of these kinds.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch

from ferrite.capture import is_view, torch_api, torch_runtime
from ferrite.errors import Refusal
from ferrite.graph import Regions, argument, fake_value, is_elementwise
from ferrite.options import NoSettings
from ferrite.passes.post_grad.distributed.exchanges import ALL_GATHER, ALL_REDUCE, WAIT, WHY, Exchange, exchanges_in
from ferrite.passes.post_grad.distributed.settings import chosen
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import inherit

aten = torch.ops.aten
Rows = Literal["rows", "columns", "split"]  # a matrix with the rows, with them as columns, or as a list of parts
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@graph_pass(stage="post_grad", with_collectives=True)
def decompose_collectives(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Gathered rows that are multiplied with each other and shared out again stay where they are."""
    options = context.options
    if chosen(options, "decompose_comms", NoSettings) is None or options.numerics == "strict":
        return 0
    count, regions = 0, Regions(gm.graph)
    for exchange in exchanges_in(gm.graph):
        if exchange.start.target is ALL_GATHER and context.fuel.left:
            region = Region(gm.graph, exchange)
            refusal = region.follow()
            if refusal is None and not regions.all_in_one(region.nodes()):
                refusal = Refusal("memory is written between the gather and where each rank takes its part")
            if refusal is not None:
                exchange.start.meta[WHY] = refusal.reason
                continue
            context.fuel.spend()
            region.rewrite()
            count += 1
    return count


class Region:
    """What hangs on a gather, up to where each rank takes its part."""

    def __init__(self, graph: torch.fx.Graph, exchange: Exchange) -> None:
        self.graph, self.exchange = graph, exchange
        self.shard: Any = exchange.start.args[0]
        self.kinds: dict[torch.fx.Node, Rows] = {}
        self.sums: list[torch.fx.Node] = []  # over rows: each becomes a sum over ranks
        self.leaving: list[torch.fx.Node] = []
        ranks = torch_runtime.ranks_of_group(exchange.group)
        self.rank = ranks.index(torch.distributed.get_rank()) if ranks is not None else None

    def follow(self) -> Refusal | None:
        """Sort every node of the region; why that is not possible, if it is not."""
        (wait,) = self.exchange.waits
        value = fake_value(wait)
        if self.rank is None or value.ndim != 2 or len(self.exchange.start.users) != 1:
            return Refusal("it is no matrix of rows, or its group is not known")
        self.kinds[wait] = "rows"
        grams = 0
        for node in list(self.graph.nodes):
            mine = [operand for operand in node.all_input_nodes if operand in self.kinds]
            if not mine or node is wait:
                continue
            if node.op == "output":
                return Refusal("gathered rows leave the graph")
            kind = self.kind_of(node)
            if kind == "gram":
                grams += 1
                self.sums.append(node)
            elif kind == "sum":
                self.sums.append(node)
            elif kind == "leaves":
                self.leaving.append(node)
            elif kind is None:
                return Refusal(f"{node.name} needs rows of other ranks")
            else:
                self.kinds[node] = kind  # type: ignore[assignment]
        if grams < 2 or not self.leaving:
            return Refusal("fewer than two products of the rows with each other, or no rank takes its own part")
        return None

    def nodes(self) -> list[torch.fx.Node]:
        return [self.exchange.start, *self.kinds, *self.sums, *self.leaving]

    def kind_of(self, node: torch.fx.Node) -> str | None:
        """What a node makes of rows: the same, turned, a sum over them, the rank's part; None for anything else."""
        kinds = [self.kinds.get(operand) for operand in node.args if isinstance(operand, torch.fx.Node)]
        target = node.target
        if target is aten.mm.default:
            return "gram" if kinds == ["columns", "rows"] else "rows" if kinds == ["rows", None] else None
        if target in TURNS and kinds == ["rows"] and self.turns(node):
            return "columns"
        if target in SPLITS and kinds == ["rows"] and self.is_even_split(node):
            return "split"
        if target is operator.getitem and kinds == ["split"]:
            return "leaves" if node.args[1] == self.rank or not node.users else None
        if is_elementwise(target) and "columns" not in kinds and self.is_row_by_row(node):
            return "rows"
        if target is aten.sum.dim_IntList and kinds == ["rows"] and argument(node, "dim") == [0]:
            return "sum" if argument(node, "dtype") is None else None
        if target is aten.linalg_vector_norm.default and kinds == ["rows"] and argument(node, "dtype") is None:
            return "sum" if argument(node, "ord") == 2 and argument(node, "dim") in (None, [0], [0, 1]) else None
        return None

    def turns(self, node: torch.fx.Node) -> bool:
        return node.target is aten.t.default or list(node.args[1:]) in ([0, 1], [1, 0], [[1, 0]])

    def is_even_split(self, node: torch.fx.Node) -> bool:
        dim, rows = argument(node, "dim"), fake_value(self.shard).shape[0]
        sizes = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        return dim in (0, -2) and all(isinstance(size, int) and torch_api.known_equal(size, rows) for size in sizes)

    def is_row_by_row(self, node: torch.fx.Node) -> bool:
        """Whether every operand has these rows, or none at all."""
        value = fake_value(node)
        if not isinstance(value, torch.Tensor) or value.ndim != 2:
            return False
        for operand in node.all_input_nodes:
            other = fake_value(operand)
            is_matrix = isinstance(other, torch.Tensor) and other.ndim == 2
            if operand not in self.kinds and is_matrix and not torch_api.known_equal(other.shape[0], 1):
                return False
        return not is_view(node.target)

    def rewrite(self) -> None:
        """Nodes stay, and read the rows of this rank; sums are added up over the ranks."""
        (wait,) = self.exchange.waits
        start = self.exchange.start
        wait.replace_all_uses_with(self.shard)
        for node in self.sums:
            users = list(node.users)
            with self.graph.inserting_before(node.next):
                call, is_norm = self.graph.call_function, node.target is aten.linalg_vector_norm.default
                begun = call(aten.mul.Tensor, (node, node)) if is_norm else node
                made = [begun, call(ALL_REDUCE, (begun, "sum", self.exchange.group))]
                made.append(call(WAIT, (made[-1],)))
                made += [call(aten.sqrt.default, (made[-1],))] if is_norm else []
            for each in made[0 if is_norm else 1 :]:
                inherit(each, node)
            for user in users:
                user.replace_input_with(node, made[-1])
        for node in self.leaving:
            split: Any = node.args[0]
            if node.users:
                node.replace_all_uses_with(split.args[0])
            self.graph.erase_node(node)
            if not split.users:
                self.graph.erase_node(split)
        self.graph.erase_node(wait)
        self.graph.erase_node(start)
