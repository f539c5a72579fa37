"""Many small calls of one operator on tensors of one look: one call on the stack of them.

    a = tanh(x)                     s = stack([x, y, ...])
    b = tanh(y)            =>       t = tanh(s)
    ...                             a, b, ... = unbind(t)

`FUSIONS` says what the members of each are; `shared.batching` finds them: calls of one operator with equal
arguments, shapes, dtypes and device, all of which require gradients or none, with no write and no switch of a mode
between them. When it pays: see `horizontal`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ferrite.errors import Refusal
from ferrite.graph import HALVES, fake_value
from ferrite.machines import NEOVERSE_N1
from ferrite.passes.pre_grad.horizontal import Horizontal, never, saves_calls, saves_many_calls, saves_products
from ferrite.passes.pre_grad.products import known_width, one_input_pays, product_problem, side_by_side
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.batching import Fusion, Settings
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, Writer, apply_rules, arguments_of, inherit

aten = torch.ops.aten
MANY = NEOVERSE_N1.min_tiny_calls
Values = tuple[torch.Tensor, ...]


# --- how the one call is written --------------------------------------------------------------------------------------


def stack_of(writer: Writer, members: Sequence[torch.fx.Node], name: str) -> torch.fx.Node:
    return writer.call(aten.stack.default, [arguments_of(member)[name] for member in members])


def unbound(writer: Writer, whole: torch.fx.Node, members: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """The parts. Differentiated, an unbind is one stack; as many selects would be as many sums over the whole."""
    items = writer.call(aten.unbind.int, whole)
    parts = [writer.call(operator.getitem, items, index) for index in range(len(members))]
    for part, member in zip(parts, members, strict=True):
        inherit(part, member)
    return parts


def on_the_stack(
    fusion: Fusion, writer: Writer, members: Sequence[torch.fx.Node], settings: Settings
) -> list[torch.fx.Node]:
    """The members' own operator with their own arguments, wherever these stand in the call."""
    first = members[0]
    (name,) = fusion.operands[first.target]
    operand, stack = arguments_of(first)[name], stack_of(writer, members, name)
    args, kwargs = torch.fx.node.map_arg((first.args, first.kwargs), lambda n: stack if n is operand else n)
    return unbound(writer, writer.call(first.target, *args, **kwargs), members)


def batched_product(
    fusion: Fusion, writer: Writer, members: Sequence[torch.fx.Node], settings: Settings
) -> list[torch.fx.Node]:
    x = stack_of(writer, members, "input")
    weight = writer.call(aten.transpose.int, stack_of(writer, members, "weight"), 1, 2)
    if arguments_of(members[0])["bias"] is None:
        return unbound(writer, writer.call(aten.bmm.default, x, weight), members)
    bias = writer.call(aten.unsqueeze.default, stack_of(writer, members, "bias"), 1)
    if sizes_are_known(map(fake_value, (x, weight))):
        whole = writer.call(aten.baddbmm.default, bias, x, weight)
    else:  # torch cannot spread the bias over symbolic sizes inside baddbmm
        whole = writer.call(aten.add.Tensor, writer.call(aten.bmm.default, x, weight), bias)
    return unbound(writer, whole, members)


def sizes_are_known(values: Iterable[torch.Tensor]) -> bool:
    return all(isinstance(size, int) for value in values for size in value.shape)


def batched_norm(
    fusion: Fusion, writer: Writer, members: Sequence[torch.fx.Node], settings: Settings
) -> list[torch.fx.Node]:
    """A norm without weight and bias, which are applied behind it: each member has its own."""
    given = arguments_of(members[0])
    x = stack_of(writer, members, "input")
    whole = writer.call(
        aten.layer_norm.default, x, given["normalized_shape"], None, None, given["eps"], given["cudnn_enable"]
    )
    leading = fake_value(members[0]).dim() - len(given["normalized_shape"])
    for name, apply in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if given[name] is not None:
            factor = stack_of(writer, members, name)
            for _ in range(leading):
                factor = writer.call(aten.unsqueeze.default, factor, 1)
            whole = writer.call(apply, whole, factor)
    return unbound(writer, whole, members)


# --- what is no member ------------------------------------------------------------------------------------------------


def anything(arguments: Mapping[str, Any], values: Values) -> Refusal | None:
    held = (item for name, item in arguments.items() if name not in ("self", "input"))
    return Refusal("an argument is not known") if any(isinstance(item, torch.fx.Node) for item in held) else None


def dropout_problem(arguments: Mapping[str, Any], values: Values) -> Refusal | None:
    if arguments["train"] is not True:
        return Refusal("it drops nothing")
    return anything(arguments, values)


def linear_problem(arguments: Mapping[str, Any], values: Values) -> Refusal | None:
    if values[0].dim() != 2:
        return Refusal("it is no product of two matrices")
    if values[0].dtype in HALVES and arguments["bias"] is not None and not sizes_are_known(values):
        return Refusal("it would be rounded before its bias is added")
    return product_problem(arguments, values)


def wide_linear_problem(arguments: Mapping[str, Any], values: Values) -> Refusal | None:
    return Refusal("it is no product of two matrices") if values[0].dim() != 2 else known_width(arguments, values)


def norm_problem(arguments: Mapping[str, Any], values: Values) -> Refusal | None:
    (x,) = values
    scales = [arguments[name] for name in ("weight", "bias") if arguments[name] is not None]
    if any(fake_value(scale).dtype != x.dtype for scale in scales):
        return Refusal("its weight or bias has another dtype")
    if scales and x.dtype in HALVES:
        return Refusal("it would be rounded before its weight and bias are applied")
    return None


# --- the fusions ------------------------------------------------------------------------------------------------------

ALWAYS = {"horizontal": "always"}
CALLS, NATIVE = {"executor": "calls"}, {"executor": "native"}


def many(function: Callable[[Any], Any], then: Callable[[Any], Any] = torch.neg) -> Callable[..., Any]:
    return lambda *xs: [then(function(x)) for x in xs]


def tensors(count: int, *shape: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [(torch.rand(shape) * 4 - 2).requires_grad_() for _ in range(count)]


def pointwise(name: str, target: Any, function: Callable[[Any], Any], other: Callable[[Any], Any], **facts: Any) -> Any:
    """`other`: a call of the same operator, or of none, that is no member."""

    def half_and_half(*xs: Any) -> Any:
        return [(function(x) if place % 2 else other(x)).neg() for place, x in enumerate(xs)]

    returned = Case("returned as they are", many(function, lambda y: y), tensors(5, 2, 3), ALWAYS)
    settings: dict[str, Any] = {
        "purpose": f"{name.removeprefix('batch_')} of many tensors of one look is one call on their stack",
        "operands": {target: (target._schema.arguments[0].name,)},
        "problem": anything,
        "pays": saves_calls,
        "examples": (Case("five", many(function), tensors(5, 2, 3), ALWAYS), returned),
        "near_misses": (
            Case("four", many(function), tensors(4, 2, 3), ALWAYS),
            Case("of six every other is different", half_and_half, tensors(6, 2, 3), ALWAYS),
            Case("by the model", many(function), tensors(6, 2, 3)),
        ),
    }
    return Horizontal(name=name, write=on_the_stack, **{**settings, **facts})


def members_of(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Calls on the operands of each member: those of all first operands come first, and so on."""
    return lambda *xs: [torch.neg(function(*xs[i::count])) for i in range(count)]


def operands(count: int, *shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [(torch.rand(shape) - 0.5).requires_grad_() for shape in shapes for _ in range(count)]


def norm(x: Any, *scales: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], *scales)


def on_one(x: Any, *weights: Any) -> Any:
    return [F.linear(x, weight).relu() for weight in weights]


def dropping(p: float, training: bool = True) -> Callable[[Any], Any]:
    return lambda x: F.dropout(x, p, training)


FUSIONS = (
    Horizontal(
        name="batch_linear_lhs",
        purpose="many linear layers on one matrix are one",
        operands={aten.linear.default: ("input", "weight")},
        problem=wide_linear_problem,
        shared=("input",),
        free=("weight", "bias"),
        write=side_by_side,
        numerics="rounded",
        layout="free",
        pays=one_input_pays,
        examples=(Case("five", on_one, operands(1, (2, 3), *[(4, 3)] * 5), ALWAYS),),
        near_misses=(
            Case("four", on_one, operands(1, (2, 3), *[(4, 3)] * 4), ALWAYS),
            Case("on a stack of matrices", on_one, operands(1, (2, 2, 3), *[(4, 3)] * 5), ALWAYS),
        ),
    ),
    Horizontal(
        name="batch_linear",
        purpose="many linear layers of one size are one batched product",
        operands={aten.linear.default: ("input", "weight")},
        optional=("bias",),
        problem=linear_problem,
        write=batched_product,
        numerics="rounded",
        pays=saves_products,
        examples=(
            Case("six with biases", members_of(F.linear, 6), operands(6, (2, 3), (4, 3), (4,)), ALWAYS),
            Case("five without", members_of(F.linear, 5), operands(5, (2, 3), (4, 3)), ALWAYS),
            Case(
                "many tiny ones, by the model",
                members_of(F.linear, MANY),
                operands(MANY, (2, 3), (4, 3)),
            ),
        ),
        near_misses=(
            Case("four", members_of(F.linear, 4), operands(4, (2, 3), (4, 3)), ALWAYS),
            Case("a bias of one element", members_of(F.linear, 5), operands(5, (2, 3), (4, 3), (1,)), ALWAYS),
            Case("by the model", members_of(F.linear, 6), operands(6, (2, 3), (4, 3))),
        ),
    ),
    Horizontal(
        name="batch_layernorm",
        purpose="many layer norms of one shape are one norm",
        operands={aten.layer_norm.default: ("input",)},
        optional=("weight", "bias"),
        problem=norm_problem,
        write=batched_norm,
        numerics="rounded",
        pays=saves_many_calls,
        examples=(
            Case("five with weights and biases", members_of(norm, 5), operands(5, (2, 3, 4), (4,), (4,)), ALWAYS),
            Case("six plain ones", members_of(norm, 6), operands(6, (3, 4)), ALWAYS),
            Case("five with weights", members_of(norm, 5), operands(5, (3, 4), (4,)), ALWAYS),
            Case(
                "many tiny ones, by the model",
                members_of(norm, MANY),
                operands(MANY, (3, 4), (4,)),
                CALLS,
            ),
        ),
        near_misses=(
            Case(
                "many tiny ones that are kernels",
                members_of(norm, MANY),
                operands(MANY, (3, 4), (4,)),
                NATIVE,
            ),
            Case("four", members_of(norm, 4), operands(4, (3, 4)), ALWAYS),
            Case("by the model", members_of(norm, 6), operands(6, (3, 4))),
        ),
    ),
    pointwise("batch_tanh", aten.tanh.default, torch.tanh, torch.sigmoid, numerics="rounded"),
    pointwise("batch_sigmoid", aten.sigmoid.default, torch.sigmoid, torch.tanh, numerics="rounded"),
    # relu and clamp keep the sign of -0.0 or not, depending on where in a tensor it stands: that counts as rounding
    pointwise("batch_relu", aten.relu.default, torch.relu, torch.tanh, numerics="rounded"),
    pointwise(
        "batch_detach",
        aten.detach.default,
        torch.detach,
        torch.tanh,
        copies_returned=False,
        pays=never,
        examples=(Case("five", many(torch.detach), tensors(5, 2, 3), ALWAYS),),
    ),
    pointwise(
        "batch_nan_to_num",
        aten.nan_to_num.default,
        lambda x: torch.nan_to_num(x, 7.0),
        lambda x: torch.nan_to_num(x, 8.0),
    ),
    pointwise("batch_clamp", aten.clamp.default, lambda x: x.clamp(0, 1), lambda x: x.clamp(0, 2), numerics="rounded"),
    pointwise(
        "batch_dropout",
        aten.dropout.default,
        dropping(0.5),
        dropping(0.5, False),
        problem=dropout_problem,
        numerics="redrawn",
        # what is drawn does not matter where everything is dropped, or nothing
        examples=(
            Case("five", many(dropping(1.0)), tensors(5, 2, 3), ALWAYS),
            Case("by keyword", many(lambda x: F.dropout(input=x, training=True, p=0.0)), tensors(6, 2, 3), ALWAYS),
        ),
        near_misses=(
            Case("four", many(dropping(1.0)), tensors(4, 2, 3), ALWAYS),
            Case("while nothing is trained", many(dropping(0.5, False)), tensors(6, 2, 3), ALWAYS),
        ),
    ),
)


@pre_grad_pass(rules=FUSIONS)
def group_batch_fusion_passes(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Many small calls of one operator become one call on a stack."""
    return apply_rules(gm, FUSIONS, context) if context.options.horizontal != "off" else 0
