"""Matrix products read and write transposed matrices: a copy made for them is not needed.

    linear(contiguous(swap(x)), w, b)      =>   linear(swap(x), w, b)
    matmul(contiguous(swap(a)), b)         =>   matmul(swap(a), b)
    contiguous(swap(linear(x, w, b)))      =>   addmm(b[:, None], w, swap(x)), its result as it lies

`swap` exchanges the last two dimensions, however it is spelled. A product of `swap(x)` itself is left: it reads x as it
lies already, in eager too.

The model behind `auto`. On a GPU the libraries multiply transposed matrices as fast as others, so that each copy less
is a gain, as long as the call stays one product of matrices or of equal batches: a linear layer on a transposed batch
would become a batch of products. On a CPU the same holds for the left operand only (measured: 0.7 to 1.0 of the time
with the copy); a transposed right operand, or a linear layer on a transposed input, may take a path that is several
times slower than copying, and a transposed result gains nothing. `always` is for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.errors import Refusal
from ferrite.graph import fake_value, storages_of
from ferrite.passes.pre_grad.predicates import is_plain, linear_view, matmul_view, sole_user
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.cases import trainable
from ferrite.passes.shared.facts import on_cpu
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules, arguments_of

aten = torch.ops.aten
MOVES = (aten.transpose.int, aten.permute.default, aten.movedim.int, aten.movedim.intlist)
COPIES = (aten.contiguous.default, aten.clone.default)
# A sum that is rounded to sixteen bits before the bias is added is rounded twice.
SHORT = frozenset({torch.float16, torch.bfloat16})


def permutation(node: torch.fx.Node) -> list[int]:
    """Which dimension of the operand stands at each place of the result."""
    given, rank = arguments_of(node), fake_value(node).dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in given["dims"]]
    if node.target is aten.transpose.int:
        order = list(range(rank))
        first, second = given["dim0"], given["dim1"]
        order[first], order[second] = order[second], order[first]
        return order
    source, destination = (
        [item] if isinstance(item, int) else list(item) for item in (given["source"], given["destination"])
    )
    placed = dict(zip((dim % rank for dim in destination), (dim % rank for dim in source), strict=True))
    others = iter(dim for dim in range(rank) if dim not in placed.values())
    return [placed[place] if place in placed else next(others) for place in range(rank)]


def swapped(node: Any) -> torch.fx.Node | None:
    """What a node exchanges the last two dimensions of; None if it does anything else."""
    if not isinstance(node, torch.fx.Node) or node.target not in MOVES or not isinstance(node.args[0], torch.fx.Node):
        return None
    value = fake_value(node)
    if not is_plain(value) or value.is_complex() or value.dim() < 2:
        return None
    rank = value.dim()
    return node.args[0] if permutation(node) == [*range(rank - 2), rank - 1, rank - 2] else None


def copied(node: Any) -> torch.fx.Node | None:
    """What a node makes a dense copy of."""
    if not isinstance(node, torch.fx.Node) or node.target not in COPIES:
        return None
    source: Any = node.args[0]
    fresh = storages_of(node) != storages_of(source)
    return source if fresh and torch_operators.known_contiguous(fake_value(node)) else None


def transposed_copy(node: Any) -> torch.fx.Node | None:
    """The transposed view that an operand is a copy of, if nobody else reads the copy."""
    view = copied(node)
    return view if view is not None and swapped(view) is not None and sole_user(node) is not None else None


# --- operands ---------------------------------------------------------------------------------------------------------


def linear_of_transposed(site: Site) -> Any:
    layer = linear_view(site.node)
    view = transposed_copy(layer.input) if layer is not None else None
    if layer is None or view is None:
        return Refusal("its input is no copy of a transposed tensor")
    rank = site.value(layer.input).dim()
    if (problem := left_out(site, rank == 2 and not on_cpu(site.value(view)))) is not None:
        return problem
    site.through(layer.input)
    return site.call(aten.linear.default, view, *site.node.args[1:])


def product_of_transposed(site: Site) -> Any:
    product = matmul_view(site.node)
    if product is None:
        return Refusal("its operands are not known")
    left, right = transposed_copy(product.left), transposed_copy(product.right)
    values = [site.value(product.left), site.value(product.right)]
    plain = values[0].dim() == values[1].dim() <= 3  # no batch is expanded or taken apart
    if not on_cpu(values[0]):
        pays = plain
    else:
        pays, right = plain and left is not None, right if site.options.transpose_folding == "always" else None
    if left is None and right is None:
        return Refusal("no operand is a copy of a transposed tensor, or none of which a gain is known")
    if (problem := left_out(site, pays)) is not None:
        return problem
    site.through(*(node for node, view in ((product.left, left), (product.right, right)) if view is not None))
    return site.call(site.node.target, left or product.left, right or product.right)


def left_out(site: Site, pays: bool) -> Refusal | None:
    chosen = site.options.transpose_folding
    if chosen == "off" or (chosen == "auto" and not pays):
        return Refusal(f"no gain is known, and the option transpose_folding is {chosen}")
    return None


# --- results ----------------------------------------------------------------------------------------------------------


def transposed_linear(site: Site) -> Any:
    """The whole product transposed: its result lies as the copy would."""
    view = copied(site.node) or site.node
    node = swapped(view)
    layer = linear_view(node)
    if node is None or layer is None:
        return Refusal("it does not transpose what a linear layer gives")
    if sole_user(node) is None or (view is not site.node and sole_user(view) is None):
        return Refusal("the layer's result is read elsewhere too")
    source, weight = site.value(layer.input), site.value(layer.weight)
    if source.dim() < 2 or weight.dim() != 2 or not all(map(is_plain, (source, weight))):
        return Refusal("it is no layer of ordinary matrices")
    pays = view is not site.node and source.dim() == 2 and not on_cpu(source)
    if (problem := left_out(site, pays) or unfit(source, layer.bias)) is not None:
        return problem
    site.through(*dict.fromkeys((view, node)))
    operand = site.call(aten.transpose.int, layer.input, source.dim() - 2, source.dim() - 1)
    if layer.bias is None:
        return site.call(aten.matmul.default, layer.weight, operand)
    column = site.call(aten.unsqueeze.default, layer.bias, 1)
    if source.dim() == 2:
        return site.call(aten.addmm.default, column, layer.weight, operand)
    if source.dim() == 3:
        batch = site.call(aten.expand.default, layer.weight, [source.shape[0], *weight.shape])
        return site.call(aten.baddbmm.default, column, batch, operand)
    return site.call(aten.add.Tensor, site.call(aten.matmul.default, layer.weight, operand), column)


def unfit(source: torch.Tensor, bias: torch.fx.Node | None) -> Refusal | None:
    if bias is None:
        return None
    if fake_value(bias).dim() != 1:
        return Refusal("the bias is no vector")
    if source.dim() > 3 and source.dtype in SHORT:
        return Refusal("the bias would be added to what is rounded already")
    if source.dim() == 3 and not all(type(size) is int for size in source.shape):
        return Refusal("the sizes are not known")
    return None


# --- the rules --------------------------------------------------------------------------------------------------------

F = torch.nn.functional
ALWAYS = {"transpose_folding": "always"}


def layer_inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], list[Any]]:
    """An input whose last but one dimension, 4, is what the layer takes; its weight and bias."""
    return trainable(shape, (5, 4), (5,), dtype=dtype)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], list[Any]]:
    return trainable((*shape, 4), (5, 4), (5,), dtype=dtype)


def returned(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x, w, b).mT


def read_twice(x: Any, w: Any, b: Any) -> Any:
    y = F.linear(x, w, b)
    return y.mT.contiguous().sum(0) + y.sum()


PERMUTE_LINEAR = (
    NodeRule(
        name="permute_linear",
        purpose="a linear layer reads its input transposed",
        targets=(aten.linear.default,),
        rewrite=linear_of_transposed,
        examples=(
            Case("a matrix", lambda x, w, b: F.linear(x.t().contiguous(), w, b), layer_inputs(4, 3), ALWAYS),
            Case(
                "a batch",
                lambda x, w, b: F.linear(x.permute(0, 2, 1).clone(memory_format=torch.contiguous_format), w),
                layer_inputs(2, 4, 3),
                ALWAYS,
            ),
        ),
        near_misses=(
            Case("no copy", lambda x, w, b: F.linear(x.mT, w, b), layer_inputs(2, 4, 3), ALWAYS),
            Case(
                "other dimensions", lambda x, w, b: F.linear(x.transpose(0, 1).contiguous(), w, b), rows(2, 3), ALWAYS
            ),
            Case(
                "the copy is read elsewhere",
                lambda x, w, b: (lambda y: F.linear(y, w, b).sum() + y)(x.mT.contiguous()),
                layer_inputs(2, 4, 3),
                ALWAYS,
            ),
            Case(
                "off",
                lambda x, w, b: F.linear(x.t().contiguous(), w, b),
                layer_inputs(4, 3),
                {"transpose_folding": "off"},
            ),
            Case("no gain known", lambda x, w, b: F.linear(x.t().contiguous(), w, b), layer_inputs(4, 3)),
        ),
        numerics="rounded",
    ),
)
PERMUTE_MATMUL = (
    NodeRule(
        name="permute_matmul",
        purpose="a matrix product reads its operands transposed",
        targets=(aten.matmul.default, aten.mm.default, aten.bmm.default),
        rewrite=product_of_transposed,
        examples=(
            Case("bmm", lambda a, b: torch.bmm(a.mT.contiguous(), b), trainable((2, 4, 3), (2, 4, 5))),
            Case("mm", lambda a, b: torch.mm(a.t().contiguous(), mat2=b), trainable((4, 3), (4, 5))),
            Case(
                "@ on the right", lambda a, b: a @ b.movedim(1, 2).contiguous(), trainable((2, 3, 4), (2, 5, 4)), ALWAYS
            ),
            Case(
                "both, of rank four",
                lambda a, b: torch.matmul(a.mT.contiguous(), b.swapdims(-1, -2).contiguous()),
                trainable((2, 2, 4, 3), (2, 2, 5, 4)),
                ALWAYS,
            ),
        ),
        near_misses=(
            Case("no copy", lambda a, b: torch.bmm(a.mT, b), trainable((2, 4, 3), (2, 4, 5))),
            Case(
                "other dimensions",
                lambda a, b: torch.bmm(a.transpose(0, 1).contiguous(), b),
                trainable((3, 2, 4), (2, 4, 5)),
                ALWAYS,
            ),
            Case(
                "the copy is written",
                lambda a, b: torch.bmm(a.mT.contiguous().add_(1), b),
                trainable((2, 4, 3), (2, 4, 5)),
                ALWAYS,
            ),
            Case("no gain known", lambda a, b: a @ b.mT.contiguous(), trainable((2, 3, 4), (2, 5, 4))),
        ),
        numerics="rounded",
    ),
)
LINEAR_PERMUTE = (
    NodeRule(
        name="linear_permute",
        purpose="the transposed result of a linear layer is computed as it is wanted",
        targets=(*MOVES, *COPIES),
        rewrite=transposed_linear,
        examples=(
            Case("a matrix, copied", lambda x, w, b: F.linear(x, w, b).t().contiguous(), rows(3), ALWAYS),
            Case("a batch, copied", lambda x, w, b: F.linear(x, w, b).mT.contiguous(), rows(2, 3), ALWAYS),
            Case("no bias", lambda x, w, b: F.linear(x, w).mT.contiguous() * b[:, None], rows(2, 3), ALWAYS),
            Case(
                "rank four", lambda x, w, b: F.linear(x, w, b).permute(0, 1, 3, 2).contiguous(), rows(2, 2, 3), ALWAYS
            ),
            Case("not copied", lambda x, w, b: F.linear(x, w, b).mT.sum(0), rows(2, 3), ALWAYS),
        ),
        near_misses=(
            Case(
                "other dimensions", lambda x, w, b: F.linear(x, w, b).transpose(0, 1).contiguous(), rows(2, 3), ALWAYS
            ),
            Case("read elsewhere", read_twice, rows(2, 3), ALWAYS),
            Case("returned as a view", returned, rows(2, 3), ALWAYS),
            Case(
                "bfloat16 of rank four",
                lambda x, w, b: F.linear(x, w, b).mT.contiguous(),
                rows(2, 2, 3, dtype=torch.bfloat16),
                ALWAYS,
            ),
            Case("no gain known", lambda x, w, b: F.linear(x, w, b).t().contiguous(), rows(3)),
        ),
        layout="free",
        numerics="rounded",
    ),
)


@pre_grad_pass(rules=LINEAR_PERMUTE)
def linear_permute_fusion(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A linear layer whose result is transposed computes it so."""
    return apply_rules(gm, LINEAR_PERMUTE, context)


@pre_grad_pass(rules=PERMUTE_LINEAR)
def permute_linear_fusion(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A linear layer whose input was transposed and copied reads it without the copy."""
    return apply_rules(gm, PERMUTE_LINEAR, context)


@pre_grad_pass(rules=PERMUTE_MATMUL)
def permute_matmul_fusion(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A matrix product whose operands were transposed and copied reads them without the copy."""
    return apply_rules(gm, PERMUTE_MATMUL, context)
