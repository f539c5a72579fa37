"""Layers on 8-bit integers: weights that are scaled behind the product, and packed layers that go on.

    mul(mm(x, to_bf16(w).t()), s)                       =>      _weight_int8pack_mm(x, w, s)
    relu(qlinear_pointwise(..., "none"))                =>      ferrite.qlinear_pointwise(..., "relu")
    qlinear_pointwise(..., "none") + o                  =>      ferrite.qlinear_pointwise_binary(o, ...)
    quantize(qlinear_pointwise(..., float32), s, z)     =>      ferrite.qlinear_pointwise(..., s, z, int8)

The first is rounded once where eager rounds twice. It reads a quarter of the bytes and makes no copy of the weight, and
took less time than eager at every size that was tried. The others compute what eager does, bit by bit. A layer and a
kernel of ours behind it take 0.9 of their time, and less than oneDNN's fused forms; so they run where the option
kernel_rewrites asks for them (`bench/results/kernel_rewrites-aarch64.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, same_sizes
from ferrite.passes.post_grad import cpu_ops
from ferrite.passes.post_grad.layers import (
    POST_OP_TARGETS,
    VIEWS,
    all_before,
    post_op_at,
    uses_of,
)
from ferrite.passes.post_grad.quantized import (
    DEQUANTIZE,
    EIGHT,
    QUANTIZE,
    QUANTIZED_RULES,
    dequantize,
    parameters,
    quantised,
    quantize,
)
from ferrite.passes.shared.facts import only_cast, transposed
from ferrite.passes.shared.kernel_rules import KernelRules
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, apply_rules, arguments_of, in_order

aten = torch.ops.aten
bfloat16 = torch.bfloat16

# The kernels read the inner dimension in blocks of 8 to 16 numbers and leave a rest out.
BLOCK = 32


# --- weight-only int8 -------------------------------------------------------------------------------------------------


def scaled_behind(site: Site) -> Any:
    left, right = site.arguments["self"], site.arguments["other"]
    outcome: Any = Refusal("no product with a weight of integers stands before it")
    for y, scale in ((left, right), (right, left)):
        if isinstance(y, torch.fx.Node) and isinstance(scale, torch.fx.Node) and y is not scale:
            outcome = int8_product(site, y, scale)
            if not isinstance(outcome, Refusal):
                return outcome
    return outcome


def int8_product(site: Site, y: torch.fx.Node, scale: torch.fx.Node) -> Any:
    view = y if y.target in VIEWS else None
    product: Any = in_order(y)[0] if view is not None else y
    if product.target not in (aten.mm.default, aten.bmm.default):
        return Refusal("no product stands before it")
    batched = product.target is aten.bmm.default
    x, factor = in_order(product)
    chain = weight_chain(in_order(factor)[0] if batched and factor.target is aten.expand.default else factor)
    if chain is None:
        return Refusal("the weight is no transposed cast of integers")
    between = (*dict.fromkeys((*([y] if view is not None else []), product, factor)), *chain[1:])
    problem = int8_problem(site.node, x, factor, chain[0], scale) or users_problem(between)
    if problem is not None:
        return problem
    site.through(*between)
    weight, sizes = chain[0], [plain_size(size) for size in fake_value(product).shape]
    if batched:
        if sizes.count(-1) > 1:
            return Refusal("two sizes of the batched product are symbolic")
        x = site.call(aten.reshape.default, x, [-1, plain_size(fake_value(weight).shape[1])])
    result = site.call(aten._weight_int8pack_mm.default, x, weight, scale)
    if batched:
        result = site.call(aten.reshape.default, result, sizes)
    return site.call(view.target, result, *in_order(view)[1:]) if view is not None else result


def plain_size(size: int | torch.SymInt) -> int:
    """A size that is a number, or -1 where it is symbolic."""
    if isinstance(size, int):
        return size
    expression = torch_api.expression(size)
    return int(expression) if expression.is_number else -1


def weight_chain(node: torch.fx.Node) -> tuple[torch.fx.Node, ...] | None:
    """A weight [out, in] of integers, and the nodes that cast and transpose it, in either order."""
    outer = transposed(node)
    inner = only_cast(outer) if outer is not None else only_cast(node)
    if inner is None or fake_value(inner).ndim != 2:
        return None
    if outer is not None:
        return inner, outer, node
    weight = transposed(inner)
    return (weight, inner, node) if weight is not None else None


def int8_problem(node: torch.fx.Node, x: Any, factor: Any, weight: Any, scale: Any) -> Refusal | None:
    values = [fake_value(each) for each in (node, x, weight, scale)]
    _, left, right, numbers = values
    if [value.dtype for value in values] != [bfloat16, bfloat16, torch.int8, bfloat16]:
        return Refusal("it is not bfloat16 with a weight of int8")
    if any(value.device.type != "cpu" for value in values):
        return Refusal("it is not all on a cpu")
    rows, inner = right.shape
    if numbers.ndim != 1 or not torch_api.known_equal(numbers.shape[0], rows):
        return Refusal("the scale is not provably one number for each row of the weight")
    if plain_size(inner) % BLOCK != 0:
        return Refusal(f"the inner size is not known to be a multiple of {BLOCK}")
    if not all(map(torch_api.known_equal, fake_value(factor).shape[-2:], (inner, rows))):
        return Refusal("the weight is spread over more rows or columns")
    if not all(map(torch_api.known_equal, (*right.stride(), left.stride(-1)), (inner, 1, 1))):
        return Refusal("an operand does not lie row by row")
    return None


def users_problem(nodes: tuple[torch.fx.Node, ...]) -> Refusal | None:
    return next((Refusal(f"{node.name} has another user") for node in nodes if uses_of(node) != 1), None)


# --- packed layers ----------------------------------------------------------------------------------------------------

FLOATS = (torch.float32, bfloat16)
OURS = {operator: layer for layer in cpu_ops.QUANTIZED_LAYERS.values() for operator in (layer.pointwise, layer.binary)}


def packed_layer(node: Any) -> tuple[cpu_ops.QuantizedLayer, dict[str, Any]] | Refusal:
    """One of torch's packed layers, in floating point and without a post-op, and its arguments."""
    if not isinstance(node, torch.fx.Node) or node.target not in cpu_ops.QUANTIZED_LAYERS:
        return Refusal("no packed layer of integers stands before it")
    layer, given = cpu_ops.QUANTIZED_LAYERS[node.target], arguments_of(node)
    if given["output_dtype"] != fake_value(node).dtype:
        return Refusal(f"{node.name} says another dtype than it has")
    if given["output_dtype"] not in FLOATS:
        return Refusal(f"{node.name} is rounded to integers")
    if given[layer.names[-3]] != "none":
        return Refusal(f"{node.name} goes on with {given[layer.names[-3]]} already")
    return layer, given


def packed_with_post_op(site: Site) -> Any:
    found = post_op_at(site.node)
    if isinstance(found, Refusal):
        return found
    packed = packed_layer(found.of)
    if isinstance(packed, Refusal):
        return packed
    attr, scalars, algorithm, parts, wide = found.arguments
    if wide:
        return Refusal("it is computed in single precision and rounded")
    layer, given = packed
    site.through(*found.through, found.of)
    own = [given[name] for name in layer.names[:-3]]
    return site.call(layer.pointwise, *own, attr, scalars, algorithm, parts)


def packed_with_second_operand(site: Site) -> Any:
    left, right = site.arguments["self"], site.arguments["other"]
    if site.arguments["alpha"] != 1:
        return Refusal("the second operand is scaled")
    outcome: Any = Refusal("both operands are one")
    for y, other in ((left, right), (right, left)) if left is not right else ():
        packed = packed_layer(y)
        outcome = packed if isinstance(packed, Refusal) else packed_sum(site, y, other, *packed)
        if not isinstance(outcome, Refusal):
            return outcome
    return outcome


def packed_sum(site: Site, y: torch.fx.Node, other: Any, layer: cpu_ops.QuantizedLayer, given: dict[str, Any]) -> Any:
    value, result = fake_value(other) if isinstance(other, torch.fx.Node) else None, fake_value(y)
    if not isinstance(value, torch.Tensor) or (value.dtype, value.device) != (result.dtype, result.device):
        return Refusal("the second operand is no tensor of the same dtype and device")
    if not same_sizes(value.shape, result.shape):
        return Refusal("the operands are not provably of one shape")
    if uses_of(y) != 1:
        return Refusal(f"{y.name} has another user")
    extra: tuple[Any, ...] = (other, 1.0, 0)
    found = parameters(other) if other.target in DEQUANTIZE else None
    if found is not None and value.dtype == torch.float32 and fake_value(in_order(other)[0]).dtype in EIGHT:
        extra = (in_order(other)[0], found.scale, found.zero_point)
    elif layer.is_convolution:
        return Refusal("what is added to a convolution is not dequantised from integers")
    if extra[0] in y.all_input_nodes:
        return Refusal(f"{extra[0].name} is an operand of {y.name} itself")
    readers = {*extra[0].users, *other.users} - {site.node, other}
    if not all_before(readers, y):
        return Refusal(f"{extra[0].name} is read by what does not come before {y.name}")
    site.through(y, *([other] if extra[0] is not other else []))
    return site.call(layer.binary, *extra, *(given[name] for name in layer.names))


def rounded_to_integers(site: Site) -> Any:
    found = quantised(site)
    if isinstance(found, Refusal):
        return found
    y, wanted = found
    if (wanted.low, wanted.high) != EIGHT[wanted.dtype]:
        return Refusal("quantising clamps to a part of the integers")
    if y.target in OURS:
        layer, target, given = OURS[y.target], y.target, arguments_of(y)
    else:
        packed = packed_layer(y)
        if isinstance(packed, Refusal):
            return packed
        layer, given = packed
        target, given = layer.pointwise, {**given, "parts": False}
    if (given["output_scale"], given["output_zero_point"], given["output_dtype"]) != (1, 0, torch.float32):
        return Refusal(f"{y.name} is not plain float32")
    given.update(output_scale=wanted.scale, output_zero_point=wanted.zero_point, output_dtype=wanted.dtype)
    site.through(y)
    return site.call(target, *given.values())


# --- rules ------------------------------------------------------------------------------------------------------------


def product(x: Any, w: Any) -> Any:
    return aten.mm.default(x, aten.permute.default(aten._to_copy.default(w, dtype=bfloat16), [1, 0]))


def reshaped(x: Any, w: Any) -> Any:
    return aten.view.default(product(aten.view.default(x, [6, 32]), w), [2, 3, 5])


def expanded(x: Any, w: Any) -> Any:
    factor = aten.permute.default(aten._to_copy.default(w, dtype=bfloat16), [1, 0])
    return aten.bmm.default(x, aten.expand.default(factor, [2, 32, 5]))


def cast_of_transpose(x: Any, w: Any) -> Any:
    return aten.mm.default(x, aten._to_copy.default(aten.permute.default(w, [1, 0]), dtype=bfloat16))


def scaled(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda x, w, s: aten.mul.Tensor(function(x, w), s)


def operands(
    x: tuple[int, ...] = (3, 32), scale: tuple[int, ...] = (5,), inner: int = 32
) -> Callable[[], list[torch.Tensor]]:
    return lambda: [
        torch.randn(x).to(bfloat16),
        torch.randint(-128, 128, (5, inner), dtype=torch.int8),
        torch.rand(scale).to(bfloat16),
    ]


WEIGHT_ONLY_INT8 = NodeRule(
    name="weight_only_int8",
    purpose="a product with a weight of integers is scaled before it is rounded",
    targets=(aten.mul.Tensor,),
    rewrite=scaled_behind,
    numerics="rounded",
    examples=(
        Case("plain", scaled(product), operands()),
        Case("through reshapes", scaled(reshaped), operands((2, 3, 32))),
        Case("expanded for a batch", scaled(expanded), operands((2, 3, 32))),
        Case("transposed, then cast", scaled(cast_of_transpose), operands()),
        Case("the scale on the left", lambda x, w, s: aten.mul.Tensor(s, product(x, w)), operands()),
        Case("no rows", scaled(product), operands((0, 32))),
    ),
    near_misses=(
        Case("one number", scaled(product), operands(scale=())),
        Case("one number in a list", scaled(product), operands(scale=(1,))),
        Case("a row", scaled(product), operands(scale=(1, 5))),
        Case("a column", scaled(product), operands(scale=(3, 1))),
        Case("a scalar", lambda x, w, s: aten.mul.Tensor(product(x, w), 2.0), operands()),
        Case("an inner size of another kind", scaled(product), operands((3, 33), inner=33)),
        Case(
            "not transposed",
            lambda x, w, s: aten.mul.Tensor(aten.mm.default(x, aten._to_copy.default(w, dtype=bfloat16)), s),
            lambda: [torch.randn(3, 5).to(bfloat16), *operands(scale=(32,))()[1:]],
        ),
        Case("single precision", lambda x, w, s: scaled(product)(x, w, s.float()), operands()),
        Case(
            "the weight is read again",
            lambda x, w, s: (
                f := aten._to_copy.default(w, dtype=bfloat16),
                aten.mul.Tensor(aten.mm.default(x, aten.permute.default(f, [1, 0])), s),
            ),
            operands(),
        ),
        Case("columns of a wider tensor", lambda x, w, s: scaled(product)(x, w[:, :32], s), operands(inner=64)),
    ),
)

PACKED = torch_api.find_operator("onednn.qlinear_pointwise.default")


def packed(x: Any, w: Any, s: Any, dtype: torch.dtype = torch.float32, attr: str = "none") -> Any:
    zero_points = aten.zeros.default([8], dtype=torch.int64)
    weight = torch.ops.ferrite.pack_int8.default(w, 4)
    return PACKED(x, 0.1, 3, weight, s, zero_points, None, 1.0, 0, dtype, attr, [], "")


def packed_operands(*more: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    def make() -> list[torch.Tensor]:
        x = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
        weight = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
        return [x, weight, torch.rand(8), *(torch.randn(shape) for shape in more)]

    return make


SECOND = (4, 8)

QUANTIZED_POST_OP = NodeRule(
    name="quantized_post_op",
    purpose="a packed layer on integers and the activation behind it are one operator",
    targets=POST_OP_TARGETS,
    rewrite=packed_with_post_op,
    examples=(
        Case("relu", lambda x, w, s: aten.relu.default(packed(x, w, s)), packed_operands()),
        Case("by its parts", lambda x, w, s: cpu_ops.swish_parts(packed(x, w, s)), packed_operands()),
        Case("bfloat16", lambda x, w, s: aten.gelu.default(packed(x, w, s, bfloat16)), packed_operands()),
    ),
    near_misses=(
        Case("one already", lambda x, w, s: aten.sigmoid.default(packed(x, w, s, attr="relu")), packed_operands()),
        Case("read again", lambda x, w, s: aten.relu.default(y := packed(x, w, s)) * y, packed_operands()),
        Case("of integers", lambda x, w, s: aten.relu.default(packed(x, w, s, torch.int8)), packed_operands()),
    ),
)

QUANTIZED_BINARY = NodeRule(
    name="quantized_binary",
    purpose="a packed layer on integers and the sum with another tensor are one operator",
    targets=(aten.add.Tensor,),
    rewrite=packed_with_second_operand,
    examples=(
        Case("floats", lambda x, w, s, o: aten.add.Tensor(packed(x, w, s), o), packed_operands(SECOND)),
        Case(
            "integers",
            lambda x, w, s, o: aten.add.Tensor(dequantize(quantize(o)), packed(x, w, s)),
            packed_operands(SECOND),
        ),
    ),
    near_misses=(
        Case("scaled", lambda x, w, s, o: aten.add.Tensor(packed(x, w, s), o, alpha=2), packed_operands(SECOND)),
        Case("a row", lambda x, w, s, o: aten.add.Tensor(packed(x, w, s), o), packed_operands((1, 8))),
        Case("twice", lambda x, w, s: aten.add.Tensor(y := packed(x, w, s), y), packed_operands()),
        Case(
            "read later",
            lambda x, w, s, o: (aten.add.Tensor(packed(x, w, s), o), aten.neg.default(o)),
            packed_operands(SECOND),
        ),
        Case("a number", lambda x, w, s: aten.add.Tensor(packed(x, w, s), 1.0), packed_operands()),
    ),
)

QUANTIZED_OUTPUT = NodeRule(
    name="quantized_output",
    purpose="a packed layer on integers rounds its result itself",
    targets=QUANTIZE,
    rewrite=rounded_to_integers,
    examples=(Case("plain", lambda x, w, s: quantize(packed(x, w, s), 2.0), packed_operands()),),
    near_misses=(
        Case("clamped", lambda x, w, s: quantize(packed(x, w, s), 2.0, low=-100), packed_operands()),
        Case("read again", lambda x, w, s: (y := packed(x, w, s), quantize(y, 2.0)), packed_operands()),
        Case("another activation", lambda x, w, s: quantize(packed(x, w, s, attr="relu"), 2.0), packed_operands()),
    ),
)

LAYER_RULES: tuple[tuple[AnyRule, ...], ...] = ()
if PACKED in cpu_ops.QUANTIZED_LAYERS:
    LAYER_RULES = ((QUANTIZED_POST_OP, QUANTIZED_BINARY), (QUANTIZED_OUTPUT,))


@graph_pass(
    stage="post_grad",
    rules=[*QUANTIZED_RULES, WEIGHT_ONLY_INT8, *(rule for rules in LAYER_RULES for rule in rules)],
)
def quantized_fusion(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Work on 8-bit integers stays on integers; packed layers go on themselves where kernel_rewrites asks for it."""
    layers = [KernelRules(asked=rules).wanted(context.options) for rules in LAYER_RULES]
    return sum(apply_rules(gm, rules, context) for rules in (QUANTIZED_RULES, (WEIGHT_ONLY_INT8,), *layers) if rules)
