"""An operator of a library as a candidate for one of torch's: taken where it was measured to be faster.

    mine = ferrite.candidate(torch.ops.aten.mm.default, torch.ops.mylib.mm.default, when=lambda a, b: len(a) <= 16)
    torch.compile(model, backend="ferrite", mode="max-autotune", options={"passes": (mine,)})

It is a post-grad pass of the user's like any other: it belongs to a compile, and what it is made of is part of the key
of whatever is cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.errors import Refusal, UserError
from ferrite.graph import SHORT_NAMES, fake_value
from ferrite.pipeline import GraphPass, PassContext
from ferrite.rewrite import NodeRule, Site, apply_rules
from ferrite.tune import MAX_RATIO, CallProblem

Taken = Literal["measured", "always"]


def candidate(
    operator: Any,
    other: Any,
    *,
    when: Callable[..., bool] | None = None,
    taken: Taken = "measured",
    name: str = "",
) -> GraphPass:
    """A pass that calls `other` in place of `operator`, both overloads of operators (`torch.ops.aten.mm.default`).

    `when` is given what the call is given, tensors without contents, and says whether the other one is for that.
    `taken`: where it was measured to be faster (with `max_autotune`, or by a record, the option `tuning`), or always.
    """
    for each in (operator, other):
        if not torch_operators.is_operator(each):
            facts = {"expected": "an overload of an operator, such as torch.ops.aten.mm.default"}
            raise UserError(f"{each} is no operator that could be a candidate, or have one", facts)
    if taken not in ("measured", "always"):
        raise UserError(f"cannot read {taken!r}", {"expected": "taken='measured' or taken='always'"})
    function = functools.partial(replace_calls, operator=operator, other=other, when=when, taken=taken)
    called = name or f"candidate_{str(other).replace('.', '_')}"
    purpose = f"{other} where it is faster than {operator}"
    before = ("own_products",)
    return GraphPass(called, "post_grad", function, purpose, before=before, original=replace_calls)


def replace_calls(
    gm: torch.fx.GraphModule,
    context: PassContext,
    *,
    operator: Any,
    other: Any,
    when: Callable[..., bool] | None,
    taken: Taken,
) -> int:
    def rewritten(site: Site) -> Any:
        args, kwargs = torch.fx.node.map_arg((site.node.args, site.node.kwargs), fake_value)
        if when is not None and not when(*args, **kwargs):
            return Refusal("the candidate is not for such operands")
        if taken == "measured" and (refusal := reason_to_leave(site, problem_of(operator, other, args, kwargs))):
            return refusal
        return site.call(other, *site.node.args, **site.node.kwargs)

    rule = NodeRule(str(other), f"{other} for {operator}", (operator,), rewritten, numerics="rounded")
    return apply_rules(gm, (rule,), context)


def reason_to_leave(site: Site, problem: CallProblem | Refusal) -> Refusal | None:
    if isinstance(problem, Refusal):
        return problem
    found = site.times(problem)
    if found is None:
        return Refusal("nothing was measured: max_autotune or a record decides")
    if found.ours < MAX_RATIO * found.torch:
        return None
    return Refusal(f"the candidate takes {found.ours:.1f} us, and torch's operator {found.torch:.1f}")


def problem_of(operator: Any, other: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallProblem | Refusal:
    texts = [*map(operand_text, args)]
    for name, value in kwargs.items():
        text = operand_text(value)
        texts.append(text if isinstance(text, Refusal) else f"{name}={text}")
    names = [torch_api.operator_name(each) for each in (other, operator)]
    operands = []
    for text in texts:
        if isinstance(text, Refusal):
            return text
        operands.append(text)
    return CallProblem(str(names[0]), str(names[1]), tuple(operands))


def operand_text(value: Any) -> str | Refusal:
    """What an operand looks like, as `ferrite.targets.call_trials` makes one of it.

    >>> operand_text(torch.empty(8, 64).t()), operand_text(2.5)
    ('f32[64, 8] strides (1, 64)', '2.5')
    """
    if isinstance(value, torch.Tensor):
        if value.dtype not in SHORT_NAMES or value.layout is not torch.strided:
            return Refusal("an operand of another type or layout cannot be made to measure with")
        if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return Refusal("its sizes are not known")
        strides = "" if value.is_contiguous() else f" strides ({', '.join(map(str, value.stride()))})"
        return f"{SHORT_NAMES[value.dtype]}[{', '.join(map(str, value.shape))}]{strides}"
    plain = (type(None), bool, int, float)
    if type(value) in plain or (isinstance(value, (list, tuple)) and all(type(item) in plain for item in value)):
        return repr(list(value) if isinstance(value, (list, tuple)) else value)
    return Refusal("an operand that is no tensor and no number cannot be made to measure with")
