"""Elementwise calls in a better place.

nan_to_num(relu(x))                =>   relu(nan_to_num(x)), so that the two always stand in one order
nan_to_num(nan_to_num(x))          =>   nan_to_num(x)
relu(view(cat([a, b])))            =>   view(cat([relu(a), relu(b)]))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.pre_grad.horizontal import copy_outweighs
from ferrite.passes.pre_grad.noops import DONE_TWICE
from ferrite.passes.pre_grad.predicates import (
    ELEMENTWISE,
    EXACT,
    ROUNDED,
    Concat,
    concat_view,
    is_elementwise_unary,
    is_plain,
    is_shape_view,
    sole_user,
)
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import PassContext
from ferrite.rewrite import AnyRule, Case, Match, NodeRule, Rule, Site, apply_rules, arguments_of

aten = torch.ops.aten

# --- relu and nan_to_num ----------------------------------------------------------------------------------------------
#
# relu lets NaN and +inf pass and makes 0 of -inf, so in nan_to_num(relu(x)) only the replacements of NaN and +inf
# count. In front of relu they give the same if relu keeps them. Where x is NaN or infinite the gradient is zero either
# way, if the one that comes in is finite.


def survive_relu(match: Match) -> Refusal | None:
    for name in ("nan", "posinf"):
        value = match[name]
        if value is not None and not (type(value) in (int, float) and math.copysign(1, value) > 0 and value >= 0):
            return Refusal(f"relu would change {name}, or it is not known")
    value = match["neginf"]
    return None if value is None or type(value) in (int, float) else Refusal("neginf is not known")


def on_floats(match: Match) -> Refusal | None:
    value = match.value("x")
    return (
        None if is_plain(value) and value.is_floating_point() else Refusal("it is given no ordinary tensor of floats")
    )


def relu_behind(x: Any, nan: Any, posinf: Any, neginf: Any) -> Any:
    return aten.relu.default(aten.nan_to_num.default(x, nan, posinf, neginf if neginf and neginf < 0 else None))


def finite_already(site: Site) -> Any:
    operand = site.arguments["self"]
    inner = operand.args[0] if getattr(operand, "target", None) is aten.relu.default else operand
    if getattr(inner, "target", None) is not aten.nan_to_num.default:
        return Refusal("its operand may be infinite")
    given, dtype = arguments_of(inner), site.value(inner).dtype
    if not is_plain(site.value(inner)) or not dtype.is_floating_point:
        return Refusal("it is given no ordinary tensor of floats")
    for name in ("nan", "posinf", "neginf"):
        if not is_finite(given[name], dtype) and not (name == "neginf" and inner is not operand and below(given[name])):
            return Refusal(f"{name} is not finite, or not known")
    return operand


def is_finite(value: Any, dtype: torch.dtype) -> bool:
    """In that dtype: 1e5 is none of the finite numbers of float16."""
    if value is None:
        return True
    return type(value) in (int, float) and bool(torch.tensor(value, dtype=dtype).isfinite())


def below(value: Any) -> bool:
    return type(value) in (int, float) and value < 0


def special() -> list[Any]:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, 3e38, -3e38])
    return [x.requires_grad_()]


def nan_to_num(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda x: torch.nan_to_num(x, *args, **kwargs)


NAN_TO_NUM: tuple[AnyRule, ...] = (
    NodeRule(
        name="finite_already",
        purpose="numbers that nan_to_num has seen are finite",
        targets=(aten.nan_to_num.default,),
        rewrite=finite_already,
        examples=(
            Case("twice", lambda x: nan_to_num(2.0)(nan_to_num(1.0)(x)) * 2, special),
            Case("relu between", lambda x: nan_to_num(-3.0)(nan_to_num(1.0)(x).relu()) * 2, special),
            Case("relu makes 0 of -inf", lambda x: nan_to_num()(nan_to_num(neginf=-math.inf)(x).relu()) * 2, special),
            Case("the first read elsewhere", lambda x: (lambda y: nan_to_num()(y) + y)(nan_to_num(1.0)(x)), special),
        ),
        near_misses=(
            Case("the first gives NaN", lambda x: nan_to_num()(nan_to_num(math.nan)(x)) * 2, special),
            Case("the first gives -inf", lambda x: nan_to_num()(nan_to_num(neginf=-math.inf)(x)) * 2, special),
            Case("the first gives inf behind relu", lambda x: nan_to_num()(nan_to_num(0.0, 9e99)(x).relu()), special),
            Case("of anything", lambda x: nan_to_num()(x.exp()) * 2, special),
        ),
    ),
    Rule(
        name="relu_behind_nan_to_num",
        purpose="nan_to_num(relu(x)) is relu(nan_to_num(x))",
        before=lambda x, nan, posinf, neginf: aten.nan_to_num.default(aten.relu.default(x), nan, posinf, neginf),
        after=relu_behind,
        when=(on_floats, survive_relu),
        examples=(
            Case("defaults", lambda x: nan_to_num()(x.relu()), special),
            Case("replacements", lambda x: nan_to_num(1.0, 2.0, -3.0)(x.relu()), special),
            Case("-inf by something positive", lambda x: nan_to_num(neginf=3.0)(x.relu()), special),
        ),
        near_misses=(
            Case("NaN by something negative", lambda x: nan_to_num(-3.0)(x.relu()), special),
            Case("inf by something negative", lambda x: nan_to_num(0.0, -1.0)(x.relu()), special),
            Case("-0.0, of which relu may make 0.0", lambda x: nan_to_num(-0.0)(x.relu()), special),
            Case("relu read elsewhere", lambda x: (lambda y: nan_to_num()(y) + y)(x.relu()), special),
            Case("integers", lambda x: nan_to_num()(x.relu()), lambda: [torch.arange(3) - 1]),
        ),
    ),
    DONE_TWICE,
)


@pre_grad_pass(rules=NAN_TO_NUM)
def relu_nan_to_num(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """relu and nan_to_num stand in one order, each once."""
    return apply_rules(gm, NAN_TO_NUM, context)


# --- elementwise calls in front of concats ----------------------------------------------------------------------------
#
# Profit: alone, n small calls cost more than one large one. They pay where the concat is taken apart right behind the
# call, so that it goes away, if it is of few or copies much; and where one of them can be part of the kernel that
# computes its operand, as products will with templates: until then only where the option kernel_rewrites asks for it.
# As it is that gains nothing: 1.0 to 1.4 of the time in eager, by `python -m bench.passes rewrites`, and 1.2 compiled.
# Without the concat it takes 0.3 to 0.7, of sixteen tiny operands 1.1.

FEW_OPERANDS = 4  # as many calls as a concat, the call on it, and the split
PRODUCERS = frozenset(
    {
        *(aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default),
        *(aten.addmm.default, aten.baddbmm.default),
        *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
        *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
        *(aten.batch_norm.default, aten.layer_norm.default, aten.group_norm.default),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(target for target in ELEMENTWISE if target is not aten.to.dtype),
    }
)


def in_front_of_the_concat(site: Site, *, exact: bool) -> Any:
    unary = is_elementwise_unary(site.node)
    if unary is None or unary.exact is not exact:
        return Refusal("an argument is not known" if unary is None else "another rule is for this operator")
    views: list[torch.fx.Node] = []
    node = unary.operand
    while is_shape_view(node):
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    concat = concat_view(node)
    if concat is None:
        return Refusal("it is not done on a concat")
    problem = operand_problem(concat, site.value(node)) or shared(views, node) or no_profit(site, node, concat, views)
    if problem is not None:
        return problem
    site.through(*views, node)
    rest, named = site.node.args[1:], site.node.kwargs
    done = [site.call(site.node.target, operand, *rest, **named) for operand in concat.operands]
    result = site.call(node.target, done, concat.dim)
    for view in reversed(views):
        result = site.call(view.target, result, *view.args[1:], **view.kwargs)
    return result


def operand_problem(concat: Concat, value: Any) -> Refusal | None:
    operands = [fake_value(operand) for operand in concat.operands]
    if len(operands) == 1 or len(set(concat.operands)) != len(operands):
        return Refusal("it concatenates one value, or one several times")
    if not all(is_plain(operand) and operand.dtype == value.dtype for operand in operands):
        return Refusal("the operands are of several dtypes, or no ordinary tensors")
    return None


def shared(views: Sequence[torch.fx.Node], concat: torch.fx.Node) -> Refusal | None:
    several = next((node for node in (*views, concat) if sole_user(node) is None), None)
    return None if several is None else Refusal(f"{several.name} is read elsewhere too")


def no_profit(site: Site, concat: torch.fx.Node, parts: Concat, views: Sequence[torch.fx.Node]) -> Refusal | None:
    if not views and any(splits_again(user, parts) for user in site.node.users):
        few = len(parts.operands) <= FEW_OPERANDS or site.options.kernel_rewrites == "always"
        if few or copy_outweighs(site.value(concat), len(parts.operands) - FEW_OPERANDS):
            return None
        return Refusal("the calls for each operand cost more than the concat")
    if not any(part.target in PRODUCERS and sole_user(part) is concat for part in parts.operands):
        return Refusal("nothing is gained: no operand can be computed together with it, and the concat stays")
    return None if site.options.kernel_rewrites == "always" else Refusal("no producer takes pointwise work along yet")


def splits_again(user: torch.fx.Node, concat: Concat) -> bool:
    if user.target not in (aten.split_with_sizes.default, aten.unbind.int):
        return False
    given = arguments_of(user)
    if given["dim"] != concat.dim or (user.target is aten.unbind.int) != (concat.kind == "stack"):
        return False
    sizes = [fake_value(part).shape[concat.dim] for part in concat.operands] if concat.kind == "cat" else []
    return concat.kind == "stack" or list(given["split_sizes"]) == sizes


def two(first: tuple[int, ...] = (2, 3), second: tuple[int, ...] = (2, 3)) -> Callable[[], list[Any]]:
    return lambda: [torch.randn(first).requires_grad_(), torch.randn(second).requires_grad_()]


def joined(unary: Callable[[Any], Any], **concat: Any) -> Callable[..., Any]:
    return lambda a, b: unary(torch.cat([a * 2, b + 1], **concat))


def operand_written(a: Any, b: Any) -> Any:
    c = a * 2
    both = torch.cat([c, b + 1])
    c.add_(1)
    return both.relu() + c.sum()


def result_written(a: Any, b: Any) -> Any:
    both = torch.cat([a * 2, b + 1])
    both.add_(1)
    return both.relu()


def bits_as_floats(a: Any, b: Any) -> Any:
    return torch.cat([(a * 2).view(torch.int32) * 2, b.view(torch.int32)]).view(torch.float32).relu()


def many_split_again(count: int) -> Callable[..., Any]:
    """relu of so many that are joined for it."""

    def function(x: Any) -> Any:
        parts = torch.relu(torch.cat([x * number for number in range(1, count + 1)])).split(x.shape[0])
        return [part * 2 for part in parts]

    return function


F = torch.nn.functional
FUSED = {"kernel_rewrites": "always"}
SINKING = (
    NodeRule(
        name="sink_cat_exact",
        purpose="what selects or rounds each element of a concat does so to the operands",
        targets=tuple(EXACT),
        rewrite=functools.partial(in_front_of_the_concat, exact=True),
        examples=(
            Case("relu", joined(torch.relu, dim=1), two(), FUSED),
            Case("by name, on the axis", joined(lambda x: torch.relu(input=x), axis=1), two(), FUSED),
            Case("two views", joined(lambda x: x.view(-1).unsqueeze(0).clamp(0, 1)), two(), FUSED),
            Case("stack", lambda a, b: torch.stack([a.sin(), b], -1).abs(), two(), FUSED),
            Case("split again", lambda a, b: sum(p.sum() for p in torch.cat([a, b]).relu().split([2, 2])), two()),
            Case("many large ones split again", many_split_again(6), lambda: [torch.randn(256, 128)]),
            Case("a cast", lambda a, b: torch.cat([a * 2, b]).to(torch.float64), two(), FUSED),
        ),
        near_misses=(
            Case("read elsewhere", lambda a, b: (lambda y: y.relu() + y)(torch.cat([a * 2, b])), two(), FUSED),
            Case("one value twice", lambda a, b: (lambda y: torch.cat([y, y]).relu())(a * 2), two(), FUSED),
            Case("nothing gained", lambda a, b: torch.cat([a, b]).relu(), two(), FUSED),
            Case("nothing fuses", joined(torch.relu, dim=1), two()),
            Case("many tiny ones split again", many_split_again(6), lambda: [torch.randn(2, 3)]),
            Case("an operand is written between", operand_written, two(), FUSED),
            Case("the concat is written", result_written, two(), FUSED),
            Case("the concat is returned", lambda a, b: (lambda y: (y, y.relu()))(torch.cat([a * 2, b])), two(), FUSED),
            Case("joined bits read as floats", bits_as_floats, two(), FUSED),
            Case("as another dtype", joined(lambda x: x.view(torch.int32).abs()), two(), FUSED),
            Case("dtypes differ", lambda a, b: torch.cat([a * 2, b.double()]).relu(), two(), FUSED),
        ),
    ),
    NodeRule(
        name="sink_cat_rounded",
        purpose="what computes a function of each element of a concat does so to the operands",
        targets=tuple(ROUNDED),
        rewrite=functools.partial(in_front_of_the_concat, exact=False),
        examples=(
            Case("tanh", joined(torch.tanh), two(), FUSED),
            Case("gelu, with its argument", joined(lambda x: F.gelu(x, approximate="tanh"), dim=-1), two(), FUSED),
            Case("under a view", joined(lambda x: x.view(3, 4).sigmoid()), two(), FUSED),
        ),
        near_misses=(
            Case("dtypes differ", lambda a, b: torch.cat([(a * 2).double(), b]).tanh(), two(), FUSED),
            Case("a copy between", joined(lambda x: x.t().reshape(-1).tanh()), two(), FUSED),
        ),
        numerics="rounded",
    ),
)


@pre_grad_pass(rules=SINKING)
def sink_cat_after_pointwise(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Elementwise calls on a concat are done on its operands, where that lets them fuse or the concat go."""
    total = 0
    while count := apply_rules(gm, SINKING, context):  # of two in a row the first has to go first
        total += count
    return total
