"""The passes about splits and joins once more: under the names they have on graphs of ATen operators, and again.

Inside the stage every call is an ATen operator, so the rules are the same. With `pre_grad_level="aten"` the twins run
in place of the passes they are named after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.passes.pre_grad import chunk_reshape, concats, split_cat, splits, unbind_stack
from ferrite.passes.pre_grad.canonical import normalization_pass
from ferrite.passes.pre_grad.runs import cancel
from ferrite.passes.pre_grad.split_cat_cases import floats
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import GraphPass, PassContext
from ferrite.rewrite import AnyRule, Case, NodeRule

aten = torch.ops.aten


def split(x: Any, sizes: Sequence[int]) -> Any:
    return aten.split_with_sizes.default(x, sizes, -1)


def joined(pick: Callable[[Any], list[Any]], sizes: Sequence[int] = (1, 2, 1)) -> Callable[..., Any]:
    return lambda x: aten.mul.Tensor(aten.cat.default(pick(split(x, sizes)), -1), 2)


def stacked(pick: Callable[[Any], list[Any]]) -> Callable[..., Any]:
    return lambda x: aten.mul.Tensor(aten.stack.default(pick(aten.unbind.int(x, -1)), 1), 2)


def taken_apart(function: Any, dim: int = 0) -> Callable[..., Any]:
    """A function of a stack, which is then taken apart."""

    def run(x: Any) -> Any:
        parts = aten.unbind.int(function(aten.stack.default([x, aten.sin.default(x)])), dim)
        return aten.mul.Tensor(parts[0], parts[1])

    return run


def split_of_item(sizes: Sequence[int], dim: int) -> Callable[..., Any]:
    def run(x: Any) -> Any:
        parts = aten.split_with_sizes.default(split(x, (1, 2, 1))[1], sizes, dim)
        return aten.add.Tensor(parts[0], parts[1])

    return run


def beside(pick: Callable[[Any], list[Any]]) -> Callable[..., Any]:
    """A join of items of a split, and its last item."""

    def run(x: Any) -> Any:
        parts = split(x, (1, 1, 2))
        return aten.mul.Tensor(aten.cat.default(pick(parts), 1), parts[2])

    return run


# For each rule what its twin fires on, and what it leaves.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "remove_split_with_size_one_pass": (
        lambda x: aten.neg.default(split(x, [4])[0]),
        lambda x: aten.neg.default(split(x, [1, 3])[0]),
    ),
    "merge_splits_pass": (split_of_item([1, 1], 1), split_of_item([1, 1], 0)),
    "merge_getitem_cat_pass": (beside(lambda p: [p[0], p[1]]), beside(lambda p: [p[1], p[0]])),
    "mutate_cat_pass": (joined(lambda p: [p[0], p[1]]), joined(lambda p: [p[1], p[0]])),
    "split_cat_pass": (
        joined(lambda p: [aten.sin.default(p[0]), p[1], p[2]]),
        joined(lambda p: [p[2], p[1], aten.sin.default(p[0])]),
    ),
    "split_squeeze_pass": (
        lambda x: aten.neg.default(aten.squeeze.dim(split(x, [1] * 4)[1], 1)),
        lambda x: aten.neg.default(aten.squeeze.dim(split(x, [1, 3])[1], 1)),
    ),
    "unbind_stack_pass": (stacked(lambda p: [p[1], p[2]]), stacked(lambda p: [p[2], p[1]])),
    "merge_stack_tahn_unbind_pass": (taken_apart(aten.tanh.default), taken_apart(aten.tanh.default, 1)),
    "merge_stack_relu_unbind_pass": (taken_apart(aten.relu.default), taken_apart(aten.relu.default, 1)),
}


def twin_rule(rule: NodeRule) -> NodeRule:
    fires, leaves = CASES[rule.name]
    return dataclasses.replace(
        rule,
        name=f"{rule.name}_aten",
        examples=(Case("ATen operators", fires, floats(2, 4)),),
        near_misses=(Case("ATen operators", leaves, floats(2, 4)),),
    )


def twin_of(step: GraphPass) -> GraphPass:
    rules = tuple(map(twin_rule, step.rules))

    def run(gm: torch.fx.GraphModule, context: PassContext) -> int:
        return cancel(gm, rules, context, twin=True)

    run.__doc__ = f"{step.purpose} (On graphs of ATen operators.)"
    made: GraphPass = pre_grad_pass(run, name=f"{step.name}_aten", rules=rules)
    return made


@pre_grad_pass(keeps_values=True)
def normalization_pass_aten(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """What passes before wrote gets its one form, too. (On graphs of ATen operators.)"""
    return (normalization_pass.function(gm, context) or 0) if context.options.pre_grad_level == "aten" else 0


# The whole family, in its order; a twin stands behind the pass it is named after.
WITH_TWINS = (
    split_cat.remove_split_with_size_one_pass,
    split_cat.merge_splits_pass,
    unbind_stack.merge_stack_tahn_unbind_pass,
    split_cat.mutate_cat_pass,
    split_cat.merge_getitem_cat_pass,
    split_cat.split_cat_pass,
    unbind_stack.unbind_stack_pass,
)
TWINS = tuple(map(twin_of, WITH_TWINS))
SPLIT_CAT_PASSES: tuple[GraphPass, ...] = (
    normalization_pass_aten,
    concats.stack_to_unsqueeze_pass,
    concats.merge_concats_pass,
    *(step for both in zip(WITH_TWINS, TWINS, strict=True) for step in both),
    split_cat.split_cat_to_slices_pass,
    unbind_stack.unbind_cat_to_view_pass,
    split_cat.split_stack_to_cats_pass,
    unbind_stack.unbind_stack_to_slices_pass,
    chunk_reshape.move_reshape_out_of_split_stack_pass,
    chunk_reshape.fuse_chunk_reshape_concat_pass,
    chunk_reshape.fuse_chunk_reshape_unsqueeze_concat_pass,
    chunk_reshape.fuse_chunk_squeeze_cat_pass,
    chunk_reshape.fuse_split_getitem_squeeze_cat,
    concats.unsqueeze_to_stack_pass,
    concats.join_to_copy_pass,
    unbind_stack.einsum_to_pointwise_pass,
)

# Batches are made in between, where a call on a stack is what was wanted.
ONCE = (
    *(normalization_pass_aten, *TWINS),
    *(unbind_stack.merge_stack_tahn_unbind_pass, unbind_stack.einsum_to_pointwise_pass),
)
# Of a split whose other items went in between, a single item may be left.
AGAIN: tuple[tuple[str, tuple[AnyRule, ...]], ...] = tuple(
    (step.name, step.rules) for step in (*SPLIT_CAT_PASSES, splits.remove_split_ops_pass) if step not in ONCE
)


@pre_grad_pass(rules=tuple(rule for _, rules in AGAIN for rule in rules))
def split_cat_again_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Splits and joins that passes in between have made are cancelled by the same rules; what is skipped stays out."""
    skipped = set(context.options.skip)
    return sum(cancel(gm, rules, context) for name, rules in AGAIN if skipped.isdisjoint({name, f"{name}_aten"}))
