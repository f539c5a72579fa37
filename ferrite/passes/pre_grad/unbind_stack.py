"""Items without the axis they were taken along, stacked or joined again; and calls on a stack for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.passes.pre_grad import sections
from ferrite.passes.pre_grad.horizontal import bytes_of
from ferrite.passes.pre_grad.pieces import Stretch
from ferrite.passes.pre_grad.predicates import requires_grad
from ferrite.passes.pre_grad.runs import JOINS, cancel, wanted
from ferrite.passes.pre_grad.split_cat_cases import all_three, backwards, flat, floats, unbind_join
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten


def unsqueezed(stretch: Stretch) -> bool:
    """Whether a run is of items as `unbind` and `select` give them."""
    return not any(operand.piece is not None and operand.piece.squeezed for operand in stretch.operands)


UNBIND_STACK = (
    NodeRule(
        name="unbind_stack_pass",
        purpose="neighbouring items, stacked or joined, are a view of what they were taken from",
        targets=JOINS,
        rewrite=wanted("selects stacked", "selects joined", accepts=unsqueezed),
        layout="free",
        examples=(
            Case("stacked again", unbind_join(all_three, 1, 1), floats(2, 3)),
            Case("stacked along another dimension", unbind_join(all_three, 0, 2), floats(3, 2, 4)),
            Case("some, joined", unbind_join(lambda p, x: [p[1], p[2], p[3]], 0, 1, torch.cat), floats(4, 2, 3)),
            Case("among others", unbind_join(lambda p, x: [x.sum(1), *[p[i] for i in range(6)]], 1, 0), floats(2, 6)),
        ),
        near_misses=(
            Case("reversed", unbind_join(backwards), floats(2, 3)),
            Case("repeated", unbind_join(lambda p, x: [p[0], p[1], p[1]]), floats(2, 3)),
            Case(
                "items that stay", lambda x: (p := x.unbind(1))[0] * torch.stack([x.sum(1), p[0], p[1]]), floats(2, 2)
            ),
            Case("returned", unbind_join(all_three, 1, 1, read=lambda y: y), floats(2, 3)),
        ),
    ),
)


@pre_grad_pass(rules=UNBIND_STACK)
def unbind_stack_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Neighbouring items of a tensor that are stacked or joined again are a view of it."""
    return cancel(gm, UNBIND_STACK, context, twin=False)


UNBIND_CAT = (
    NodeRule(
        name="unbind_cat_to_view_pass",
        purpose="neighbouring items, joined, are what they were taken from with two dimensions as one",
        targets=JOINS,
        rewrite=wanted("selects joined", accepts=unsqueezed),
        layout="free",
        examples=(
            Case("along the first", unbind_join(all_three, 0, 0, torch.cat), floats(3, 2)),
            Case("two dimensions apart", unbind_join(all_three, 0, 2, torch.cat), floats(3, 2, 2, 2)),
            Case("selected one by one", lambda x: flat(torch.cat([x[:, 0], x[:, 1]], 1)), floats(2, 2, 3)),
        ),
        near_misses=(
            Case("as many items, reversed", unbind_join(backwards, 0, 0, torch.cat), floats(3, 2)),
            Case("one twice", unbind_join(lambda p, x: [p[0], p[1], p[1]], 0, 0, torch.cat), floats(3, 2)),
            Case("stacked", unbind_join(all_three, 0, 0), floats(3, 2)),
        ),
    ),
)


@pre_grad_pass(rules=UNBIND_CAT)
def unbind_cat_to_view_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Neighbouring items of a tensor that are joined merge its dimension with another."""
    return cancel(gm, UNBIND_CAT, context)


UNBIND_STACK_SLICES = (
    NodeRule(
        name="unbind_stack_to_slices_pass",
        purpose="neighbouring items, stacked, are a slice of what they were taken from",
        targets=JOINS,
        rewrite=wanted("selects stacked", accepts=unsqueezed),
        layout="free",
        examples=(
            Case("some", unbind_join(lambda p, x: [p[1], p[2]], 1, 1), floats(2, 4)),
            Case("behind the last dimension", unbind_join(all_three, 0, 1), floats(3, 2)),
            Case("unsqueezed", lambda x: flat(torch.cat([p.unsqueeze(0) for p in x.unbind(1)])), floats(2, 3)),
        ),
        near_misses=(
            Case("joined", unbind_join(all_three, 0, 0, torch.cat), floats(3, 2)),
            Case("reversed", unbind_join(backwards, 0), floats(3, 2)),
        ),
    ),
)


@pre_grad_pass(rules=UNBIND_STACK_SLICES)
def unbind_stack_to_slices_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Neighbouring items of a tensor that are stacked are a slice of it, with its axis elsewhere."""
    return cancel(gm, UNBIND_STACK_SLICES, context)


# --- stacked for one call ---------------------------------------------------------------------------------------------


def through_stack(function: Any, dims: tuple[int, int] = (0, 0), read: Any = None) -> Callable[..., Any]:
    """Two tensors stacked, a function of the stack, the two taken out again."""

    def run(a: Any, b: Any) -> Any:
        parts = torch.unbind(function(torch.stack([a, b], dims[0])), dims[1])
        return (read or (lambda p: (p[0] * 2, p[1] + 1)))(parts)

    return run


def many_of_them(count: int) -> Callable[..., Any]:
    """A function of a stack of so many that differ, taken apart again."""

    def run(x: Any) -> Any:
        rows = [x * number for number in range(1, count + 1)]
        return [part * 2 for part in torch.unbind(torch.tanh(torch.stack(rows)))]

    return run


def two(*shape: int, other: torch.dtype = torch.float32) -> Callable[[], list[Any]]:
    return lambda: [torch.randn(shape).requires_grad_(), torch.randn(shape).to(other).requires_grad_()]


def of_pieces(x: Any) -> Any:
    p = torch.split(x, 2, 1)
    q = torch.unbind(torch.relu(torch.stack([p[0], p[1]], 0)), 0)
    return q[0] * 2 + q[1]


def of_items(x: Any) -> Any:
    p = torch.unbind(x, 1)
    q = torch.unbind(torch.relu(torch.stack([p[1], p[2]], 0)), 0)
    return q[0] * 2 + q[1]


def stack_read(a: Any, b: Any) -> Any:
    stacked = torch.stack([a, b])
    p = torch.unbind(torch.relu(stacked))
    return p[0] + p[1] + stacked.sum()


STACKED_CALLS = (
    NodeRule(
        name="merge_stack_tahn_unbind_pass",
        purpose="a function of a stack that is taken apart again is computed for each",
        targets=(aten.unbind.int,),
        roots=sections.items_of_stacked(is_exact=False),
        rewrite=sections.one_call_each,
        layout="free",
        numerics="rounded",
        examples=(
            Case("tanh", through_stack(torch.tanh), two(2, 3)),
            Case("sigmoid, along another dimension", through_stack(torch.sigmoid, (1, 1)), two(2, 3)),
            Case("as many calls as before", many_of_them(3), floats(2, 4)),
            Case("a stack that costs more than calls", many_of_them(5), floats(64, 128)),
            Case("calls that fuse", many_of_them(5), floats(2, 4), {"kernel_rewrites": True}),
        ),
        near_misses=(
            Case("taken apart along another dimension", through_stack(torch.tanh, (0, 1)), two(2, 3)),
            Case("more calls than before", many_of_them(5), floats(2, 4)),
            Case("no elementwise function", through_stack(lambda s: s.softmax(0)), two(2, 3)),
            Case("an item not read, with a gradient", through_stack(torch.tanh, read=lambda p: p[0] * 2), two(2, 3)),
            Case("the items are returned", through_stack(torch.tanh, read=lambda p: (p[0], p[1])), two(2, 3)),
        ),
    ),
    NodeRule(
        name="merge_stack_relu_unbind_pass",
        purpose="the same for functions that give the same bits wherever an element stands",
        targets=(aten.unbind.int,),
        roots=sections.items_of_stacked(is_exact=True),
        rewrite=sections.one_call_each,
        layout="free",
        examples=(
            Case("relu", through_stack(torch.relu), two(2, 3)),
            Case("with numbers", through_stack(lambda s: s.clamp(-1, 0.5), (1, 1)), two(2, 3)),
            Case("of neighbouring slices", of_pieces, floats(2, 4)),
            Case("of neighbouring items", of_items, floats(2, 4)),
        ),
        near_misses=(
            Case("the stack is read", stack_read, two(2, 3)),
            Case("another dtype in the stack", through_stack(torch.relu), two(2, 3, other=torch.float64)),
            Case("rounded elsewhere", through_stack(torch.tanh), two(2, 3)),
        ),
    ),
)


@pre_grad_pass(rules=STACKED_CALLS)
def merge_stack_tahn_unbind_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """An elementwise function of a stack that is taken apart again is computed without the stack."""
    return cancel(gm, STACKED_CALLS, context, twin=False)


# --- a product that is summed -----------------------------------------------------------------------------------------


# As one kernel this takes 0.2 to 0.4 of the time. As calls of torch the product is held in memory, which is as large as
# the matrices. Training pays for that, since what einsum makes of it takes as much again for the gradients: 0.2 to 0.7
# of the time on CPUs and a GPU, where inference takes 0.5 to 1.3 (`python -m bench.passes rewrites`).
MOST_HELD = 2**24  # bytes


def product_and_sum(site: Site) -> Any:
    """abc,abcd->abd."""
    equation, tensors = str(site.arguments["equation"]).replace(" ", ""), site.arguments["tensors"]
    left, arrow, result = equation.partition("->")
    names = left.split(",")
    if not arrow or len(names) != 2 or len(tensors) != 2 or not all(map(str.isalpha, (*names, result))):
        return Refusal("it is no product of two, written out")
    vector, matrix = names
    if len(set(matrix)) != 4 or len(matrix) != 4 or vector != matrix[:3] or result != matrix[:2] + matrix[3]:
        return Refusal("it is not abc,abcd->abd of four different letters")
    if any(site.value(tensor).dtype not in (torch.float32, torch.float64) for tensor in tensors):
        return Refusal("the product of another dtype than float32 or float64 would be rounded first")
    small = bytes_of(tensors[1]) <= MOST_HELD
    if not becomes_a_kernel(site, tensors[1]) and not (small and requires_grad(site.node) is True):
        return Refusal("the product would be held in memory, and is large or not trained")
    wide = site.call(aten.unsqueeze.default, tensors[0], 3)
    return site.call(aten.sum.dim_IntList, site.call(aten.mul.Tensor, wide, tensors[1]), [2])


def becomes_a_kernel(site: Site, tensor: torch.fx.Node) -> bool:
    """Whether product and sum become one loop."""
    native = site.options.executor == "native" and site.value(tensor).device.type == "cpu"
    return native or site.options.kernel_rewrites


def einsum(
    equation: str,
    *sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    fused: bool = True,
    trained: bool = True,
) -> Case:
    def make_inputs() -> list[Any]:
        return [torch.rand(size, dtype=dtype).requires_grad_(trained) for size in sizes]

    label = f"{equation}, {dtype}" if fused else f"{equation}, {'trained' if trained else 'not trained'}, in eager"
    options = {"executor": "native" if fused else "calls"}
    return Case(label, lambda x, y: torch.einsum(equation, x, y) + 1, make_inputs, options)


EINSUM = (
    NodeRule(
        name="einsum_to_pointwise_pass",
        purpose="a batch of vector times matrix is a product and a sum, which fuse",
        targets=(aten.einsum.default,),
        rewrite=product_and_sum,
        layout="free",
        numerics="rounded",
        examples=(
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5)),
            einsum("kij, kijx -> kix", (2, 3, 4), (2, 3, 4, 2), dtype=torch.float64),
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), trained=False),
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), fused=False),
        ),
        near_misses=(
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), fused=False, trained=False),
            einsum("abb,abbd->abd", (2, 3, 3), (2, 3, 3, 2)),
            einsum("abc,abcc->abc", (2, 3, 4), (2, 3, 4, 4)),
            einsum("...c,...cd->...d", (2, 3, 4), (2, 3, 4, 5)),
            einsum("abc,abcd->acd", (2, 3, 4), (2, 3, 4, 5)),
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), dtype=torch.bfloat16),
        ),
    ),
)


@pre_grad_pass(rules=EINSUM)
def einsum_to_pointwise_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A batch of vector times matrix becomes a product and a sum, as one kernel or in training."""
    return apply_rules(gm, EINSUM, context)
