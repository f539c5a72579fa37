"""Linear layers side by side become one, and so do sums of layers on the pieces of one input.

    y0 = linear(x, w0, b0)              y = linear(x, cat([w0, w1]), cat([b0, b1]))
    y1 = linear(x, w1, b1)      =>      y0, y1 = split(y, [n0, n1], -1)

    y0 = linear(x0, w, b)               y = linear(cat([x0, x1]), w, b)
    y1 = linear(x1, w, b)       =>      y0, y1 = split(y, [r0, r1])

    linear(x[:, :k], w0, b) + linear(x[:, k:], w1)      =>      linear(x, cat([w0, w1], 1), b)

So for products with matrices that stand on the right, too. When it pays: see `horizontal`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ferrite.passes.pre_grad.horizontal import Horizontal
from ferrite.passes.pre_grad.products import (
    PRODUCTS,
    known_rows,
    known_width,
    one_after_the_other,
    one_input_pays,
    one_weight_pays,
    side_by_side,
)
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.pre_grad.sum_of_linears import SUM_RULES
from ferrite.passes.shared.cases import trainable
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, apply_rules

aten = torch.ops.aten
ALWAYS = {"horizontal": "always"}


def layers(*biases: bool, then: Callable[[Any], Any] = torch.relu) -> Callable[..., Any]:
    """As many layers as flags on the first input, with a bias each where its flag says so."""

    def function(x: Any, *rest: Any) -> Any:
        given = iter(rest)
        return [then(F.linear(x, next(given), next(given) if b else None)) for b in biases]

    return function


def attention_inputs(x: Any, *weights: Any) -> Any:
    """The projections of attention, and the first steps behind them."""
    q, k, v = (F.linear(x, w, b).unflatten(-1, (2, 2)).transpose(1, 2) for w, b in pairs(weights))
    return torch.matmul(torch.matmul(q, k.transpose(-2, -1)).softmax(-1), v)


def pairs(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def tied(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x, w, b).relu(), F.linear(x, w, b).tanh()


def one_is_written(x: Any, w: Any, v: Any) -> Any:
    return torch.relu_(F.linear(x, w)).cos(), F.linear(x, v).tanh()


def one_is_detached(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x, w).detach().cos(), F.linear(x, v).tanh()


def chained(x: Any, w: Any, v: Any) -> Any:
    return F.linear(F.linear(x, w).relu(), w).relu() + v


def one_input(name: str, what: str, target: Any, *more: Any, examples: Any, near_misses: Any) -> Horizontal:
    targets = {each: (PRODUCTS[each].input, PRODUCTS[each].weight) for each in (target, *more)}
    names = [PRODUCTS[each] for each in targets]
    return Horizontal(
        name=name,
        purpose=f"{what} on one input are one",
        operands=targets,
        problem=known_width,
        shared=(names[0].input,),
        free=tuple(dict.fromkeys(filter(None, (n for each in names for n in (each.weight, each.bias))))),
        write=side_by_side,
        numerics="rounded",
        layout="free",
        least=2,
        pays=one_input_pays,
        examples=examples,
        near_misses=near_misses,
    )


def one_weight(name: str, what: str, target: Any, *, examples: Any, near_misses: Any) -> Horizontal:
    names = PRODUCTS[target]
    return Horizontal(
        name=name,
        purpose=f"{what} with one weight are one",
        operands={target: (names.input, names.weight)},
        problem=known_rows,
        shared=tuple(filter(None, (names.weight, names.bias))),
        free=(names.input,),
        write=one_after_the_other,
        numerics="rounded",
        layout="free",
        least=2,
        pays=one_weight_pays,
        examples=examples,
        near_misses=near_misses,
    )


PARALLEL_RULES = (
    one_input(
        "parallel_linear",
        "linear layers",
        aten.linear.default,
        examples=(
            Case("the projections of attention", attention_inputs, trainable((2, 3, 4), *[(4, 4), (4,)] * 3), ALWAYS),
            Case(
                "biases here and there",
                layers(True, False, True),
                trainable((2, 3), (4, 3), (4,), (2, 3), (5, 3), (5,)),
                ALWAYS,
            ),
            Case("a single row, no bias", layers(False, False), trainable((3,), (4, 3), (2, 3)), ALWAYS),
            Case(
                "returned as they are",
                layers(False, False, then=lambda y: y),
                trainable((2, 3), (4, 3), (2, 3)),
                ALWAYS,
            ),
            Case("one and the same layer twice", tied, trainable((2, 3), (4, 3), (4,)), ALWAYS),
        ),
        near_misses=(
            Case("one layer", layers(True), trainable((2, 3), (4, 3), (4,)), ALWAYS),
            Case("by the model", layers(False, False), trainable((2, 3), (4, 3), (2, 3))),
            Case("a result is written to", one_is_written, trainable((2, 3), (4, 3), (2, 3)), ALWAYS),
            Case("no gradient reaches one of them", one_is_detached, trainable((2, 3), (4, 3), (2, 3)), ALWAYS),
        ),
    ),
    one_input(
        "parallel_matmul",
        "products",
        aten.matmul.default,
        aten.mm.default,
        examples=(
            Case(
                "as matmul",
                lambda x, a, b: ((x @ a).relu(), (x @ b).tanh()),
                trainable((2, 3, 4), (4, 2), (4, 5)),
                ALWAYS,
            ),
            Case("as mm", lambda x, a, b: (x.mm(a).relu(), x.mm(b).tanh()), trainable((3, 4), (4, 2), (4, 5)), ALWAYS),
        ),
        near_misses=(
            Case(
                "batches of matrices",
                lambda x, a, b: ((x @ a).relu(), (x @ b).tanh()),
                trainable((2, 3, 4), (2, 4, 2), (2, 4, 5)),
                ALWAYS,
            ),
        ),
    ),
    one_input(
        "parallel_addmm",
        "products with a bias",
        aten.addmm.default,
        examples=(
            Case(
                "two",
                lambda x, a, b, c, d: (torch.addmm(a, x, b).relu(), torch.addmm(c, x, d).tanh()),
                trainable((3, 4), (2,), (4, 2), (5,), (4, 5)),
                ALWAYS,
            ),
        ),
        near_misses=(
            Case(
                "scaled",
                lambda x, a, b, c, d: (torch.addmm(a, x, b, alpha=2).relu(), torch.addmm(c, x, d, alpha=2).tanh()),
                trainable((3, 4), (2,), (4, 2), (5,), (4, 5)),
                ALWAYS,
            ),
            Case(
                "a bias for each row",
                lambda x, a, b, c, d: (torch.addmm(a, x, b).relu(), torch.addmm(c, x, d).tanh()),
                trainable((3, 4), (3, 1), (4, 2), (3, 1), (4, 5)),
                ALWAYS,
            ),
        ),
    ),
    one_weight(
        "shared_linear",
        "linear layers",
        aten.linear.default,
        examples=(
            Case(
                "inputs of several ranks",
                lambda x, y, z, w, b: [F.linear(each, w, b).relu() for each in (x, y, z)],
                trainable((2, 3), (3,), (2, 2, 3), (4, 3), (4,)),
                ALWAYS,
            ),
            Case(
                "returned as they are",
                lambda x, y, w: [F.linear(each, w) for each in (x, y)],
                trainable((2, 3), (5, 3), (4, 3)),
                ALWAYS,
            ),
        ),
        near_misses=(
            Case("one after the other", chained, trainable((2, 3), (3, 3), (3,)), ALWAYS),
            Case(
                "by the model",
                lambda x, y, w: [F.linear(each, w).relu() for each in (x, y)],
                trainable((2, 3), (5, 3), (4, 3)),
            ),
            Case(
                "other biases",
                lambda x, y, w, b: (
                    F.linear(x, w, b).relu(),
                    F.linear(y, w).relu(),
                ),
                trainable((2, 3), (5, 3), (4, 3), (4,)),
                ALWAYS,
            ),
        ),
    ),
    one_weight(
        "shared_matmul",
        "products",
        aten.matmul.default,
        examples=(
            Case("two", lambda x, y, w: ((x @ w).relu(), (y @ w).tanh()), trainable((2, 3), (4, 2, 3), (3, 4)), ALWAYS),
        ),
        near_misses=(
            Case(
                "other weights",
                lambda x, y, w, v: ((x @ w).relu(), (y @ v).tanh()),
                trainable((2, 3), (2, 3), (3, 4), (3, 4)),
                ALWAYS,
            ),
        ),
    ),
)


@pre_grad_pass(rules=SUM_RULES)
def fuse_split_linear_add_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A sum of linear layers on the pieces of one input is one layer on that input."""
    return apply_rules(gm, SUM_RULES, context) if context.options.horizontal != "off" else 0


@pre_grad_pass(rules=PARALLEL_RULES)
def fuse_parallel_linear_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Linear layers on one input, or with one weight, are one layer."""
    return apply_rules(gm, PARALLEL_RULES, context) if context.options.horizontal != "off" else 0
