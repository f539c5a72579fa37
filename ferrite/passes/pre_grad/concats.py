"""Concats of concats, and stacks spelled as concats.

cat([a, cat([b, c], d), e], d)          =>   cat([a, b, c, e], d)
cat([a, b], d), cat([a, b], d)          =>   one of them
stack([a, b], d)                        <=>  cat([unsqueeze(a, d), unsqueeze(b, d)], d)
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.pre_grad.piece_runs import CONCATS
from ferrite.passes.pre_grad.pieces import gets_axis
from ferrite.passes.pre_grad.predicates import concat_view, sole_user
from ferrite.rewrite import Case, NodeRule, Site

aten = torch.ops.aten
MAX_OPERANDS = 1024  # of one concat that is made of several

# --- concats of concats -----------------------------------------------------------------------------------------------


def flattened(site: Site) -> Any:
    """Operands that are concats along the same dimension give their own operands."""
    concat, rank = concat_view(site.node), site.value(site.node).dim()
    if concat is None:
        return Refusal("its operands are not written out")
    reasons = {operand: reason_to_keep(operand, concat.dim, rank) for operand in concat.operands}
    inner = [operand for operand, reason in reasons.items() if reason is None]
    if not inner:
        return next(iter(reasons.values())) or Refusal("it concatenates nothing")
    operands = [part for operand in concat.operands for part in parts_of(operand, operand in inner)]
    if len(operands) > MAX_OPERANDS:
        return Refusal(f"it would have more than {MAX_OPERANDS} operands")
    site.through(*inner)
    return site.call(aten.cat.default, operands, *([concat.dim] if concat.dim else []))


def parts_of(operand: torch.fx.Node, apart: bool) -> tuple[torch.fx.Node, ...]:
    inner = concat_view(operand) if apart else None
    return inner.operands if inner is not None else (operand,)


def reason_to_keep(operand: torch.fx.Node, dim: int, rank: int) -> Refusal | None:
    inner = concat_view(operand)
    if inner is None or inner.kind != "cat" or fake_value(operand).dim() != rank:
        return Refusal(f"{operand.name} is no concat")
    if inner.dim != dim:
        return Refusal(f"{operand.name} is joined along another dimension")
    if sole_user(operand) is None:
        return Refusal(f"{operand.name} is read elsewhere too")
    dtype = fake_value(operand).dtype
    if any(fake_value(each).dtype != dtype for each in inner.operands):
        return Refusal(f"{operand.name} widens an operand, which rounds it before the outer concat widens again")
    return None


def joined_before(site: Site) -> Any:
    """The first concat of the same operands along the same dimension."""
    concat = concat_view(site.node)
    if concat is None:
        return Refusal("its operands are not written out")
    for other in sorted(concat.operands[0].users):
        if other is site.node:
            break
        if other.target is site.node.target and concat_view(other) == concat:
            site.through(other)
            return other
    return Refusal("nothing before it concatenates the same")


def nested(inner: Any, read: Any = None) -> Any:
    """A concat inside a concat; `inner` says what is joined first."""

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


NESTED = (
    NodeRule(
        name="merge_concats_pass",
        purpose="a concat of a concat is one concat",
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
            Case("twice in one concat", inner_twice, grads),
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
        targets=CONCATS,
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


# --- stacks as concats ------------------------------------------------------------------------------------------------


def as_cat(site: Site) -> Any:
    """A stack that is concatenated with others along its own dimension: one cat can do both, without a copy between."""
    concat, outer = concat_view(site.node), concat_view(sole_user(site.node))
    if concat is None:
        return Refusal("its operands are not written out")
    if outer is None or outer.kind != "cat" or outer.dim != concat.dim:
        return Refusal("no concat along its dimension reads it, and nothing else")
    dtype = site.value(site.node).dtype
    if any(site.value(operand).dtype != dtype for operand in concat.operands):
        return Refusal("it widens an operand, which rounds it before the outer concat widens again")
    lifted = [site.call(aten.unsqueeze.default, operand, concat.dim) for operand in concat.operands]
    return site.call(aten.cat.default, lifted, *([concat.dim] if concat.dim else []))


def as_stack(site: Site) -> Any:
    concat = concat_view(site.node)
    if concat is None or not all(gets_axis(operand, concat.dim) for operand in concat.operands):
        return Refusal("not every operand is given the dimension it is joined along")
    if any(sole_user(operand) is None for operand in concat.operands):
        return Refusal("an operand is read elsewhere too")
    site.through(*concat.operands)
    operands = [operand.args[0] for operand in concat.operands]
    return site.call(aten.stack.default, operands, *([concat.dim] if concat.dim else []))


TO_CATS = (
    NodeRule(
        name="stack_to_unsqueeze_pass",
        purpose="a stack that is joined again is a concat of operands that were given its dimension",
        targets=(aten.stack.default,),
        rewrite=as_cat,
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
        purpose="a concat of operands that were given its dimension is a stack",
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
