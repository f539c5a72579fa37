"""A linear layer or a convolution on the CPU, and the pointwise work right behind it, become one operator.

    gelu(addmm(b, x, w.t()))                    =>      linear_pointwise(x, w, b, ..., "gelu", ...)
    gelu(view(addmm(b, x, w.t()), s))           =>      view(linear_pointwise(...), s)
    convolution(x, w, b, ...) - o               =>      convolution_pointwise_binary(o, x, w, b, ..., "sub", "none")
    relu(convolution(x, w, b, ...) + o)         =>      convolution_pointwise_binary(o, x, w, b, ..., "add", "relu")

The result is functional. `reinplace_inplaceable_ops` knows the twin of the binary operators that writes into o, and
uses it where nobody needs o any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.post_grad import cpu_ops, layers
from ferrite.passes.post_grad.layers import POST_OP_TARGETS, VIEWS, Layer, layer_of, post_op_at, uses_of
from ferrite.passes.shared.kernel_rules import KernelRules
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, apply_rules, arguments_of, in_order

aten = torch.ops.aten

POINTWISE = {
    "linear": torch.ops.ferrite.linear_pointwise.default,
    "convolution": torch.ops.ferrite.convolution_pointwise.default,
}
BINARY = {
    "linear": torch.ops.ferrite.linear_pointwise_binary.default,
    "convolution": torch.ops.ferrite.convolution_pointwise_binary.default,
}
SUMS: dict[Any, str] = {aten.add.Tensor: "add", aten.sub.Tensor: "sub"}


# --- one operand ------------------------------------------------------------------------------------------------------


def with_post_op(site: Site) -> Any:
    found = post_op_at(site.node)
    if isinstance(found, Refusal):
        return found
    y = found.of
    # A linear layer on more than two dimensions is a product between two views.
    view = y if y.target in VIEWS else None
    layer = layer_of(in_order(y)[0] if view is not None else y)
    if isinstance(layer, Refusal):
        return layer
    if view is not None and (layer.kind != "linear" or uses_of(layer.node) != 1):
        return Refusal(f"a view lies between, and {layer.node.name} has another user or is a convolution")
    site.through(*found.through, y)
    result = site.call(POINTWISE[layer.kind], *layer.write(site), *found.arguments)
    return site.call(view.target, result, *in_order(view)[1:]) if view is not None else result


# --- a second operand -------------------------------------------------------------------------------------------------


def with_second_operand(site: Site) -> Any:
    found = layer_and_other(site.node)
    if isinstance(found, Refusal):
        return found
    layer, other = found
    kind = SUMS[site.node.target]
    return site.call(BINARY[layer.kind], other, *layer.write(site), kind, "none")


def with_second_operand_and_relu(site: Site) -> Any:
    total = site.arguments["self"]
    if not isinstance(total, torch.fx.Node) or total.target not in SUMS:
        return Refusal("no sum stands before it")
    if uses_of(total) != 1:
        return Refusal(f"{total.name} has another user")
    found = layer_and_other(total)
    if isinstance(found, Refusal):
        return found
    layer, other = found
    if layer.kind != "convolution":
        return Refusal("the layer is no convolution")
    site.through(total)
    return site.call(BINARY[layer.kind], other, *layer.write(site), SUMS[total.target], "relu")


def layer_and_other(total: torch.fx.Node) -> tuple[Layer, torch.fx.Node] | Refusal:
    """Of a sum or difference, the operand that is a layer nobody else reads, and the other one."""
    given = arguments_of(total)
    left, right = given["self"], given["other"]
    if given["alpha"] != 1:
        return Refusal("the second operand is scaled")
    if left is right:
        return Refusal("both operands are one")
    refusal = Refusal("no layer stands before it")
    for y, other in ((left, right), (right, left))[: 2 if SUMS[total.target] == "add" else 1]:
        layer = layer_of(y)
        problem = layer if isinstance(layer, Refusal) else other_problem(layer, other)
        if problem is None:
            assert isinstance(layer, Layer)
            return layer, other
        refusal = problem
    return refusal


def other_problem(layer: Layer, other: Any) -> Refusal | None:
    if uses_of(layer.node) != 1:
        return Refusal(f"{layer.node.name} has another user")
    value, result = fake_value(other) if isinstance(other, torch.fx.Node) else None, fake_value(layer.node)
    if not isinstance(value, torch.Tensor):
        return Refusal("the second operand is no tensor")
    if (value.dtype, value.device) != (result.dtype, result.device):
        return Refusal("the second operand has another dtype or is elsewhere")
    if other in layer.inputs:
        return Refusal(f"{other.name} is an operand of {layer.node.name} itself")
    return (
        None
        if spreads(layer.kind, value.shape, result.shape)
        else Refusal("the second operand does not provably spread")
    )


def spreads(kind: str, shape: Any, whole: Any) -> bool:
    """Whether a second operand has the shape of the result, or one of those that spread over it: a row for a linear
    layer; for a convolution a number for each channel, for all images or each, or one number."""
    if len(shape) != len(whole):
        return False
    same = [torch_api.known_equal(size, wanted) for size, wanted in zip(shape, whole, strict=True)]
    one = [torch_api.known_equal(size, 1) for size in shape]
    if all(same):
        return True
    if kind == "linear":
        return all(one[:-1]) and same[-1]
    return all(one) or (all(one[2:]) and same[1] and (same[0] or one[0]))


# --- rules ------------------------------------------------------------------------------------------------------------


def linear(x: Any, w: Any, b: Any) -> Any:
    return aten.addmm.default(b, x, aten.permute.default(w, [1, 0]))


def conv(x: Any, w: Any, b: Any, transposed: bool = False) -> Any:
    return aten.convolution.default(x, w, b, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)


def to(x: Any, dtype: torch.dtype) -> Any:
    return aten._to_copy.default(x, dtype=dtype)


def after_linear(u: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, w, b: u(linear(x, w, b))


def in_half(u: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, w, b: to(u(to(linear(x, w, b), torch.float32)), torch.bfloat16)


def rows(dtype: torch.dtype = torch.float32, *other: int) -> Callable[[], list[torch.Tensor]]:
    """Operands of a linear layer, and one more where its shape is given."""
    shapes = ((3, 4), (5, 4), (5,), *((other,) if other else ()))
    return lambda: [torch.randn(shape).to(dtype) for shape in shapes]


def images(*other: int) -> Callable[[], list[torch.Tensor]]:
    shapes = ((2, 3, 5, 5), (4, 3, 3, 3), (4,), *((other,) if other else ()))
    return lambda: [torch.randn(shape) for shape in shapes]


def images_for_transposed() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 5, 5), torch.randn(3, 4, 3, 3), torch.randn(4)]


UNARY_POST_OP = NodeRule(
    name="unary_post_op",
    purpose="a layer and the activation behind it are one operator",
    targets=POST_OP_TARGETS,
    rewrite=with_post_op,
    examples=(
        Case("relu", after_linear(aten.relu.default), rows()),
        Case("convolution", lambda x, w, b: aten.relu.default(conv(x, w, b)), images()),
        Case(
            "transposed convolution",
            lambda x, w, b: aten.sigmoid.default(conv(x, w, b, True)),
            images_for_transposed,
        ),
        Case("gelu by its parts", after_linear(cpu_ops.gelu_parts), rows()),
        Case("gelu by tanh, by its parts", after_linear(cpu_ops.gelu_tanh_parts), rows()),
        Case("swish by its parts", after_linear(cpu_ops.swish_parts), rows()),
        Case("hardswish in steps", after_linear(layers.hardswish_in_steps), rows()),
        Case("with a slope", after_linear(lambda y: aten.leaky_relu.default(y, 0.2)), rows()),
        Case("between bounds", after_linear(lambda y: aten.hardtanh.default(y, 0, 6)), rows()),
        Case(
            "a weight that is not transposed",
            lambda x, w: aten.tanh.default(aten.mm.default(x, w)),
            lambda: [torch.randn(3, 4), torch.randn(4, 5)],
        ),
        Case(
            "through a view",
            after_linear(lambda y: cpu_ops.swish_parts(aten.view.default(y, [3, 5, 1]))),
            rows(),
        ),
        Case("half precision, computed in single", in_half(cpu_ops.swish_parts), rows(torch.bfloat16)),
        Case("half precision, one operator", after_linear(aten.gelu.default), rows(torch.bfloat16)),
    ),
    near_misses=(
        Case("the layer is read again", lambda x, w, b: aten.relu.default(y := linear(x, w, b)) * y, rows()),
        Case("returned too", lambda x, w, b: (y := linear(x, w, b), aten.relu.default(y)), rows()),
        Case(
            "the bias is scaled",
            lambda x, w, b: aten.relu.default(aten.addmm.default(b, x, aten.t.default(w), beta=2)),
            rows(),
        ),
        Case("another constant", after_linear(lambda y: cpu_ops.gelu_parts(y, 0.25)), rows()),
        Case("only one bound", after_linear(lambda y: aten.clamp.default(y, 0)), rows()),
        Case("parts in half precision", after_linear(cpu_ops.swish_parts), rows(torch.bfloat16)),
        Case("tanh in half precision", after_linear(aten.tanh.default), rows(torch.bfloat16)),
        Case(
            "cast to another half precision",
            lambda x, w, b: to(cpu_ops.swish_parts(to(linear(x, w, b), torch.float32)), torch.float16),
            rows(torch.bfloat16),
        ),
        Case("no layer", lambda x: aten.relu.default(aten.neg.default(x)), lambda: [torch.randn(3)]),
        Case("integers", lambda x, w: aten.relu.default(aten.mm.default(x.int(), w.int().t())), lambda: rows()()[:2]),
    ),
)


def plus(x: Any, w: Any, b: Any, o: Any) -> Any:
    return aten.add.Tensor(linear(x, w, b), o)


def conv_plus(x: Any, w: Any, b: Any, o: Any) -> Any:
    return aten.add.Tensor(conv(x, w, b), o)


BINARY_POST_OP = NodeRule(
    name="binary_post_op",
    purpose="a layer and the sum or difference with another tensor are one operator",
    targets=tuple(SUMS),
    rewrite=with_second_operand,
    examples=(
        Case("linear, of its shape", plus, rows(torch.float32, 3, 5)),
        Case("linear, a row", plus, rows(torch.float32, 1, 5)),
        Case("on the right", lambda x, w, b, o: aten.add.Tensor(o, linear(x, w, b)), rows(torch.float32, 3, 5)),
        Case("minus", lambda x, w, b, o: aten.sub.Tensor(linear(x, w, b), o), rows(torch.float32, 3, 5)),
        Case("convolution, of its shape", conv_plus, images(2, 4, 5, 5)),
        Case("convolution, for each image and channel", conv_plus, images(2, 4, 1, 1)),
        Case("convolution, for each channel", conv_plus, images(1, 4, 1, 1)),
        Case("convolution, one number", conv_plus, images(1, 1, 1, 1)),
        Case("half precision", plus, rows(torch.bfloat16, 3, 5)),
        Case(
            "two layers",
            lambda x, w, b, v: aten.add.Tensor(linear(x, w, b), linear(x, v, b)),
            rows(torch.float32, 5, 4),
        ),
    ),
    near_misses=(
        Case("scaled", lambda x, w, b, o: aten.add.Tensor(linear(x, w, b), o, alpha=2), rows(torch.float32, 3, 5)),
        Case("a number", lambda x, w, b: aten.add.Tensor(linear(x, w, b), 1.0), rows()),
        Case("subtracted", lambda x, w, b, o: aten.sub.Tensor(o, linear(x, w, b)), rows(torch.float32, 3, 5)),
        Case("the layer twice", lambda x, w, b: aten.add.Tensor(y := linear(x, w, b), y), rows()),
        Case(
            "its own input",
            lambda x, w, b: aten.add.Tensor(linear(x, w, b), x),
            lambda: [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)],
        ),
        Case("another dtype", lambda x, w, b, o: plus(x, w, b, o.double()), rows(torch.float32, 3, 5)),
        Case("a column", plus, rows(torch.float32, 3, 1)),
        Case("of fewer dimensions", plus, rows(torch.float32, 5)),
        Case("larger than the result", plus, rows(torch.float32, 2, 3, 5)),
        Case("along the width", conv_plus, images(1, 1, 1, 5)),
        Case(
            "the layer is read again",
            lambda x, w, b, o: aten.add.Tensor(y := linear(x, w, b), o) * y,
            rows(torch.float32, 3, 5),
        ),
    ),
)

BINARY_RELU_POST_OP = NodeRule(
    name="binary_relu_post_op",
    purpose="a convolution, the sum with another tensor and a relu are one operator",
    targets=(aten.relu.default,),
    rewrite=with_second_operand_and_relu,
    examples=(
        Case("plus", lambda x, w, b, o: aten.relu.default(conv_plus(x, w, b, o)), images(2, 4, 5, 5)),
        Case(
            "minus",
            lambda x, w, b, o: aten.relu.default(aten.sub.Tensor(conv(x, w, b), o)),
            images(1, 4, 1, 1),
        ),
    ),
    near_misses=(
        Case("a linear layer", lambda x, w, b, o: aten.relu.default(plus(x, w, b, o)), rows(torch.float32, 3, 5)),
        Case(
            "the sum is read again",
            lambda x, w, b, o: aten.relu.default(y := conv_plus(x, w, b, o)) * y,
            images(2, 4, 5, 5),
        ),
        Case("no sum", lambda x, w, b: aten.relu.default(conv(x, w, b)), images()),
    ),
)

POST_OP_RULES: tuple[AnyRule, ...] = (BINARY_RELU_POST_OP, UNARY_POST_OP, BINARY_POST_OP)


@graph_pass(stage="post_grad", rules=POST_OP_RULES)
def mkldnn_fusion(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Layers on the CPU take along the pointwise work behind them, where kernel_rewrites asks for it. By itself that
    work is a kernel of ours, in place of the layer's result: that takes 0.8 to 1.0 of the time of one call."""
    return apply_rules(gm, KernelRules(asked=POST_OP_RULES).wanted(context.options), context)
