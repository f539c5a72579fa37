"""Write an attention that was found as one call of scaled_dot_product_attention."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied
from ferrite.graph import attribute_of, fake_value, same_sizes
from ferrite.passes.shared.attention.bias import Bias
from ferrite.passes.shared.attention.found import FoundAttention, Node
from ferrite.passes.shared.attention.operands import Operands
from ferrite.passes.shared.attention.operators import MASKED_ATTENTION
from ferrite.passes.shared.attention.worth import AttentionCall
from ferrite.rewrite import Site

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


class AttentionWriter:
    def __init__(self, site: Site, found: FoundAttention) -> None:
        self.site, self.found = site, found
        self.operands = Operands(site)
        self.call = self.operands.call
        self.batch = batch_of(found)
        self.dtype: torch.dtype = fake_value(found.weights_product.right).dtype
        self.factor = 1.0  # of query and key

    def write(self) -> Node:
        query, key, value = self.factors()
        training, safe = self.trains(), self.found.softmax.meaning.safe
        bias = Bias(self.found, self.operands, self.batch, self.dtype, mend=not training and not safe)
        for target, scale in bias.scales:
            query = self.call(target, query, scale)
        if fake_value(query).dtype != self.dtype:
            raise NotApplied("the scale has another type")
        grouped = self.operands.grouped(key, value)
        key, value = grouped or (key, value)
        call = AttentionCall(
            *(query, key, value, bias.node, self.found.dropout, bias.factor * self.factor),
            filled=bias.filled,
            grouped=grouped is not None,
            training=training,
            looks_at_mask=training and bias.may_hide_rows,
            trains_mask=bias.trains,
        )
        if safe and call.looks_at_mask:
            raise NotApplied("what a safe softmax makes of hidden rows is not done while training")
        if (problem := call.problem(self.site.options.attention == "auto")) is not None:
            raise NotApplied(problem)
        if not call.looks_at_mask:
            return self.in_place(self.call(SDPA, *call.arguments, **call.keywords))
        both = self.call(MASKED_ATTENTION, query, key, value, bias.node, bias.filled, call.factor)
        return self.in_place(self.call(operator.getitem, both, 0))

    def trains(self) -> bool:
        """Whether a gradient may be asked for."""
        inputs = (node for node in self.found.root.graph.nodes if node.op in ("placeholder", "get_attr"))
        return not self.site.is_inference and any(may_require_gradient(node) for node in inputs)

    # --- query, key, value and result ---------------------------------------------------------------------------------

    def factors(self) -> tuple[Node, Node, Node]:
        product, last = self.found.scores_product, self.found.weights_product
        *rest, d, j = product.right_order
        query = self.operand(product.left, product.left_order, product.node)
        key = self.operand(product.right, (*rest, j, d), product.node)
        value = self.operand(last.right, last.right_order, last.node)
        query, key = (self.operands.narrowed(each, self.dtype) for each in (query, key))
        query, on_query = self.operands.scaled(query)
        key, on_key = self.operands.scaled(key)
        self.factor = on_query * on_key
        return query, key, value

    def operand(self, node: Node, order: tuple[int, ...], product: Node) -> Node:
        """A factor with the batch of the scores, rows by columns."""
        operands, rank = self.operands, len(order)
        kept = order[:-2] == tuple(range(rank - 2))
        if kept and same_sizes(fake_value(product).shape[:-2], fake_value(node).shape[:-2]):
            # its batch may have been flattened for the product: look for it before it was
            node = operands.in_shape(node, [*self.batch, *fake_value(node).shape[-2:]])
            order = (0, 1, 2, 3) if order[-2] < order[-1] else (0, 1, 3, 2)
        node = operands.reordered(node, order)
        own = fake_value(node).shape
        if not same_sizes(own[:-2], self.batch):
            wanted = [*self.batch, *own[-2:]]
            whole = torch_api.known_equal(fake_value(node).numel(), math.prod(wanted))
            node = operands.in_shape(node, wanted) if whole else operands.expanded(node, wanted)
        return operands.without_copies(node)

    def in_place(self, node: Node) -> Node:
        """The result as the last call of what was found has it."""
        last, root = self.found.weights_product, fake_value(self.found.root)
        order = last.result_order
        if order != tuple(range(len(order))):
            inner = [fake_value(last.node).shape[order.index(dim)] for dim in range(len(order))]
            node = self.call(aten.permute.default, self.operands.in_shape(node, inner), list(order))
        return self.operands.in_shape(node, root.shape)


def batch_of(found: FoundAttention) -> Sequence[Any]:
    """Batch and heads, as the scores have them at some place; one of them is 1 where they have less."""
    nodes = (found.softmax.node, *(node for node, _ in found.scores), found.scores_product.node)
    shapes = [tuple(fake_value(node).shape[:-2]) for node in nodes]
    for batch in shapes:
        if len(batch) == 2:
            return batch
    batch = shapes[0]
    return (math.prod(batch[:-1]), batch[-1]) if len(batch) > 2 else (*batch, 1, 1)[:2]


def may_require_gradient(node: Node) -> bool:
    value = attribute_of(node) if node.op == "get_attr" else node.meta.get("example_value", fake_value(node))
    return isinstance(value, torch.Tensor) and value.requires_grad
