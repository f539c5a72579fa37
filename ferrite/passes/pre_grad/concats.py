"""Joins of joins, and stacks spelled as joins.

cat([a, cat([b, c], d), e], d)          =>   cat([a, b, c, e], d)
cat([a, b], d), cat([a, b], d)          =>   one of them
stack([a, b], d)                        <=>  cat([unsqueeze(a, d), unsqueeze(b, d)], d)
cat([p[0], p[1]], d), p = split(x)      =>   clone(x), where the result must be memory of its own
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.pre_grad.pieces import gets_axis
from ferrite.passes.pre_grad.predicates import join_view, sole_user
from ferrite.passes.pre_grad.runs import JOINS, cancel, wanted
from ferrite.passes.pre_grad.split_cat_cases import (
    all_three,
    backwards,
    beside_foreign,
    first_two,
    floats,
    four,
    result_written,
    split_join,
    unbind_join,
    written_between,
)
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site

aten = torch.ops.aten
MOST_OPERANDS = 1024  # of one join that is made of several

# --- joins of joins ---------------------------------------------------------------------------------------------------


def flattened(site: Site) -> Any:
    """Operands that are joins along the same dimension give their own operands."""
    join, rank = join_view(site.node), site.value(site.node).dim()
    if join is None:
        return Refusal("its operands are not written out")
    reasons = {operand: reason_to_keep(operand, join.dim, rank) for operand in join.operands}
    inner = [operand for operand, reason in reasons.items() if reason is None]
    if not inner:
        return next(iter(reasons.values())) or Refusal("it joins nothing")
    operands = [part for operand in join.operands for part in parts_of(operand, operand in inner)]
    if len(operands) > MOST_OPERANDS:
        return Refusal(f"it would have more than {MOST_OPERANDS} operands")
    site.through(*inner)
    return site.call(aten.cat.default, operands, *([join.dim] if join.dim else []))


def parts_of(operand: torch.fx.Node, apart: bool) -> tuple[torch.fx.Node, ...]:
    inner = join_view(operand) if apart else None
    return inner.operands if inner is not None else (operand,)


def reason_to_keep(operand: torch.fx.Node, dim: int, rank: int) -> Refusal | None:
    inner = join_view(operand)
    if inner is None or inner.kind != "cat" or fake_value(operand).dim() != rank:
        return Refusal(f"{operand.name} is no join")
    if inner.dim != dim:
        return Refusal(f"{operand.name} is joined along another dimension")
    if sole_user(operand) is None:
        return Refusal(f"{operand.name} is read elsewhere too")
    dtype = fake_value(operand).dtype
    if any(fake_value(each).dtype != dtype for each in inner.operands):
        return Refusal(f"{operand.name} widens an operand, which rounds it before the outer join widens again")
    return None


def joined_before(site: Site) -> Any:
    """The first join of the same operands along the same dimension."""
    join = join_view(site.node)
    if join is None:
        return Refusal("its operands are not written out")
    for other in sorted(join.operands[0].users):
        if other is site.node:
            break
        if other.target is site.node.target and join_view(other) == join:
            site.through(other)
            return other
    return Refusal("nothing before it joins the same")


def nested(inner: Any, read: Any = None) -> Any:
    """A join inside a join; `inner` says what is joined first."""

    def function(a: Any, b: Any) -> Any:
        joined = torch.cat(inner(a, b), 1)
        return torch.cat([a, joined, b], 1) * 2 + (0 if read is None else read(joined))

    return function


def pair(first: torch.dtype = torch.float32, second: torch.dtype = torch.float32) -> Any:
    return lambda: [torch.rand(2, 2).to(first), torch.rand(2, 2).to(second)]


def grads() -> list[Any]:
    return [torch.rand(2, 2).requires_grad_(), torch.rand(2, 2).requires_grad_()]


def three_deep(a: Any, b: Any) -> Any:
    return torch.cat([torch.cat([a, torch.cat([b, a])]), torch.cat([b])]) * 2


def inner_twice(a: Any, b: Any) -> Any:
    inner = torch.cat([a, b])
    return torch.cat([inner, inner]) * 2


def written_since(a: Any, b: Any) -> Any:
    inner = torch.cat([a, b])
    a.add_(1)
    return torch.cat([inner, b]) * 2


def the_same_twice(read: Any) -> Any:
    return lambda a, b: read(torch.cat([a, b], 1), torch.cat([a, b], 1))


def written_once(p: Any, q: Any) -> Any:
    p.add_(1)
    return p * q


CONCATS = (
    NodeRule(
        name="merge_concats_pass",
        purpose="a join of a join is one join",
        targets=(aten.cat.default,),
        rewrite=flattened,
        examples=(
            Case("in the middle", nested(lambda a, b: [b, a]), grads),
            Case("three deep, one alone", three_deep, grads),
            Case("an old empty operand", nested(lambda a, b: [torch.empty(0), a]), grads),
            Case("wider outside", nested(lambda a, b: [a, a]), pair(torch.float16, torch.float32)),
        ),
        near_misses=(
            Case(
                "another dimension",
                lambda a, b: torch.cat([torch.cat([a, b]), torch.cat([b, a])], 1) * 2,
                grads,
            ),
            Case("read elsewhere", nested(lambda a, b: [a, b], read=lambda j: j.sum()), grads),
            Case("twice in one join", inner_twice, grads),
            Case(
                "widened inside",
                lambda a, b: torch.cat([torch.cat([a, b]), b.float()]) * 2,
                pair(torch.int64, torch.float16),
            ),
            Case("written since", written_since, pair()),
        ),
    ),
    NodeRule(
        name="merge_equal_concats_pass",
        purpose="what is joined twice is joined once",
        targets=JOINS,
        rewrite=joined_before,
        examples=(
            Case("joins", the_same_twice(lambda p, q: p * q.exp()), grads),
            Case("stacks", lambda a, b: torch.stack([a, b]).sum() + torch.stack([a, b]) * 2, grads),
        ),
        near_misses=(
            Case("another order", lambda a, b: torch.cat([a, b]) * torch.cat([b, a]), grads),
            Case("another dimension", lambda a, b: torch.cat([a, b]).sum() * torch.cat([a, b], 1), grads),
            Case("both returned", the_same_twice(lambda p, q: (p, q)), grads),
            Case("one is written", the_same_twice(written_once), pair()),
        ),
    ),
)


@pre_grad_pass(rules=CONCATS)
def merge_concats_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Joins of joins along one dimension are one join; equal joins are made once."""
    return cancel(gm, CONCATS, context)


# --- stacks as joins --------------------------------------------------------------------------------------------------


def as_join(site: Site) -> Any:
    """A stack that is joined with others along its own dimension: then one join can do both, without a copy between."""
    join, outer = join_view(site.node), join_view(sole_user(site.node))
    if join is None:
        return Refusal("its operands are not written out")
    if outer is None or outer.kind != "cat" or outer.dim != join.dim:
        return Refusal("no join along its dimension reads it, and nothing else")
    dtype = site.value(site.node).dtype
    if any(site.value(operand).dtype != dtype for operand in join.operands):
        return Refusal("it widens an operand, which rounds it before the outer join widens again")
    lifted = [site.call(aten.unsqueeze.default, operand, join.dim) for operand in join.operands]
    return site.call(aten.cat.default, lifted, *([join.dim] if join.dim else []))


def as_stack(site: Site) -> Any:
    join = join_view(site.node)
    if join is None or not all(gets_axis(operand, join.dim) for operand in join.operands):
        return Refusal("not every operand is given the dimension it is joined along")
    if any(sole_user(operand) is None for operand in join.operands):
        return Refusal("an operand is read elsewhere too")
    site.through(*join.operands)
    operands = [operand.args[0] for operand in join.operands]
    return site.call(aten.stack.default, operands, *([join.dim] if join.dim else []))


TO_JOINS = (
    NodeRule(
        name="stack_to_unsqueeze_pass",
        purpose="a stack that is joined again is a join of operands that were given its dimension",
        targets=(aten.stack.default,),
        rewrite=as_join,
        examples=(
            Case("in front", lambda a, b: torch.cat([torch.stack([a, b]), a.exp().unsqueeze(0)]), grads),
            Case("from the end", lambda a, b: torch.cat([torch.stack([a, b], -1), a.unsqueeze(2)], -1), grads),
            Case("one operand", lambda a, b: torch.cat([torch.stack([a], 1), b.unsqueeze(1)], 1), grads),
            Case("of numbers", lambda a, b: torch.cat([torch.stack([a.sum(), b.sum()]), a[0]]), grads),
        ),
        near_misses=(
            Case("not joined", lambda a, b: torch.stack([a, b]) * 2, grads),
            Case("along another dimension", lambda a, b: torch.cat([torch.stack([a, b]), a.expand(2, 2, 2)], 1), grads),
            Case("read elsewhere", lambda a, b: torch.cat([(c := torch.stack([a, b])), a[None]]) * c.sum(), grads),
            Case(
                "widened",
                lambda a, b: torch.cat([torch.stack([a, b]), b.float().unsqueeze(0)]),
                pair(torch.int64, torch.float16),
            ),
        ),
    ),
)
TO_STACKS = (
    NodeRule(
        name="unsqueeze_to_stack_pass",
        purpose="a join of operands that were given its dimension is a stack",
        targets=(aten.cat.default,),
        rewrite=as_stack,
        examples=(
            Case("in front", lambda a, b: torch.cat([a.unsqueeze(0), b.unsqueeze(0)]), grads),
            Case("at the end", lambda a, b: torch.cat([a.unsqueeze(-1), b.unsqueeze(2)], 2) * 2, grads),
        ),
        near_misses=(
            Case("given another", lambda a, b: torch.cat([a.unsqueeze(0), b.unsqueeze(0)], 1), grads),
            Case("not all", lambda a, b: torch.cat([a.unsqueeze(0), b.reshape(1, 2, 2)]), grads),
            Case("read elsewhere", lambda a, b: torch.cat([(c := a.unsqueeze(0)), b.unsqueeze(0)]) * c, grads),
        ),
    ),
)


@pre_grad_pass(rules=TO_JOINS)
def stack_to_unsqueeze_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Stacks that are joined with others are spelled as joins, so that both become one."""
    return cancel(gm, TO_JOINS, context)


@pre_grad_pass(rules=TO_STACKS, after="stack_to_unsqueeze_pass")
def unsqueeze_to_stack_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Joins of operands that were all given the dimension of the join are stacks."""
    return cancel(gm, TO_STACKS, context)


# --- where the result must be memory of its own -----------------------------------------------------------------------

ALL_FORMS = wanted(
    *("stretch", "slices joined", "slices stacked", "selects joined", "selects stacked", "reshaped"),
    alone=True,
    copied=True,
)
COPIES = (
    NodeRule(
        name="join_to_copy_pass",
        purpose="pieces of one tensor, joined in their order, are a copy of it",
        targets=JOINS,
        rewrite=ALL_FORMS,
        examples=(
            Case("joined and returned", split_join(all_three, read=lambda y: y), floats(2, 4)),
            Case("some of them", split_join(first_two, read=lambda y: y), floats(2, 4)),
            Case("stacked and returned", split_join(four, (1,) * 4, 1, 0, torch.stack, lambda y: y), floats(2, 4)),
            Case("items stacked and returned", unbind_join(all_three, 1, 1, read=lambda y: y), floats(2, 3)),
            Case(
                "in channels last",
                lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
                lambda: [torch.rand(2, 4, 3, 3).to(memory_format=torch.channels_last)],
            ),
        ),
        near_misses=(
            Case("reversed", split_join(backwards, read=lambda y: y), floats(2, 4)),
            Case("with another", split_join(beside_foreign, read=lambda y: y), floats(2, 4)),
            Case("a copy as it is", split_join(four, (1,) * 4, 1, 0, read=lambda y: y), floats(2, 4)),
            Case("the result is written", result_written, floats(2, 4)),
            Case("written between", written_between, lambda: [torch.rand(2, 4)]),
        ),
    ),
)


@pre_grad_pass(rules=COPIES)
def join_to_copy_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A join that undoes a split, but must have memory of its own, is one copy."""
    return cancel(gm, COPIES, context)
