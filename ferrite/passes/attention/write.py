"""Write an attention that was found as one call of scaled_dot_product_attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.passes.attention.bias import Bias
from ferrite.passes.attention.found import Attention, Node, Refused
from ferrite.passes.attention.operands import Operands, same_shape
from ferrite.passes.attention.worth import Call
from ferrite.rewrite import Site

aten = torch.ops.aten


class AttentionWriter:
    def __init__(self, site: Site, found: Attention) -> None:
        self.site, self.found = site, found
        self.operands = Operands(site)
        self.call = self.operands.call
        self.batch = batch_of(found)
        self.dtype: torch.dtype = fake_value(found.weights_product.right).dtype
        self.factor = 1.0  # of query and key

    def write(self) -> Node:
        query, key, value = self.factors()
        bias = Bias(self.found, self.operands, self.batch, self.dtype)
        for scale in bias.scales:
            target = aten.div.Tensor if scale.divides else aten.mul.Tensor
            query = self.call(target, query, scale.tensor)
        factor = bias.factor * self.factor
        if fake_value(query).dtype != self.dtype:
            raise Refused("the scale has another type")
        if not 0 < factor < math.inf:
            raise Refused("the scale is not positive")
        hidden = bias.hidden_rows() if bias.fills and not self.site.is_inference else None
        if hidden is None:
            mask = bias.mended(bias.node) if bias.node is not None and bias.may_be_endless else bias.node
        else:
            # what is hidden in full depends on no query and no key, and so do its gradients
            query = self.call(aten.masked_fill.Scalar, query, hidden, 0.0)
            mask = bias.node
            if mask is not None and bias.may_be_endless:
                mask = self.call(aten.masked_fill.Scalar, mask, hidden, 0.0)
        lost = hidden if bias.may_be_endless else None
        result = self.attention(query, key, value, mask, factor, bias, alone=lost is None)
        return self.in_place(result if lost is None else self.nan_where(lost, result, value))

    def attention(
        self, query: Node, key: Node, value: Node, mask: Node | None, factor: float, bias: Bias, alone: bool
    ) -> Node:
        """The call, if it is right and pays. `alone`: nobody else reads the value."""
        grouped = self.operands.grouped(key, value) if alone else None
        key, value = grouped or (key, value)
        call = Call(
            *(query, key, value, mask, self.found.dropout, factor),
            grouped=grouped is not None,
            trains_mask=any(fake_value(each).requires_grad for each in bias.masks),
        )
        if (problem := call.problem(self.site.options.attention == "auto")) is not None:
            raise Refused(problem)
        return self.call(aten.scaled_dot_product_attention.default, *call.arguments, **call.keywords)

    def nan_where(self, lost: Node, result: Node, value: Node) -> Node:
        """Rows of which a softmax makes nan: so are the gradients of all values, and of nothing else."""
        total = self.call(aten.sum.dim_IntList, value, [-2], True)
        rows = self.call(aten.masked_fill.Scalar, self.call(aten.zeros_like.default, result), lost, math.nan)
        return self.call(aten.where.self, lost, self.call(aten.mul.Tensor, rows, total), result)

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
        if kept and same_shape(fake_value(product).shape[:-2], fake_value(node).shape[:-2]):
            # its batch may have been flattened for the product: look for it before it was
            node = operands.in_shape(node, [*self.batch, *fake_value(node).shape[-2:]])
            order = (0, 1, 2, 3) if order[-2] < order[-1] else (0, 1, 3, 2)
        node = operands.reordered(node, order)
        own = fake_value(node).shape
        if not same_shape(own[:-2], self.batch):
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


def batch_of(found: Attention) -> Sequence[Any]:
    """Batch and heads, as the scores have them at some place; one of them is 1 where they have less."""
    nodes = (found.softmax.nodes[0], *(node for node, _ in found.scores), found.scores_product.node)
    shapes = [tuple(fake_value(node).shape[:-2]) for node in nodes]
    for batch in shapes:
        if len(batch) == 2:
            return batch
    batch = shapes[0]
    return (math.prod(batch[:-1]), batch[-1]) if len(batch) > 2 else (*batch, 1, 1)[:2]
