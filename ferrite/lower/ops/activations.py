"""Activation functions and their gradients, in one rounding each, whatever the type."""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import arithmetic_type, cast, const, op
from ferrite.lower.builder import Builder
from ferrite.lower.formula import (
    Term,
    choose,
    exp,
    expm1,
    is_nan,
    larger,
    log1p,
    ndtr,
    pointwise,
    result,
    smaller,
    tanh,
    term,
    working_type,
)
from ferrite.lower.table import lowers
from ferrite.lower.value import Value

aten = torch.ops.aten


def logistic(x: Term) -> Term:
    return 1 / (1 + exp(-x))


# --- smooth -----------------------------------------------------------------------------------------------------------

CUBE = 0.044715
INNER = math.sqrt(2 / math.pi)


@lowers(aten.gelu.default)
def gelu(ctx: Builder, x: Value, approximate: str) -> Value:
    if approximate == "tanh":
        return pointwise(ctx, lambda x: 0.5 * x * (1 + tanh(INNER * (x + CUBE * x * x * x))), x, takes="float")
    return pointwise(ctx, lambda x: x * ndtr(x), x, takes="float")


@lowers(aten.gelu_backward.default)
def gelu_backward(ctx: Builder, grad_output: Value, x: Value, approximate: str) -> Value:
    def exact(grad: Term, x: Term) -> Term:
        density = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return grad * (ndtr(x) + x * density)

    def near(grad: Term, x: Term) -> Term:
        square = x * x
        height = tanh(INNER * (x + CUBE * square * x))
        slope = 0.5 * x * (1 - height * height) * (INNER * (1 + 3 * CUBE * square))
        return grad * (0.5 * (1 + height) + slope)

    return pointwise(ctx, near if approximate == "tanh" else exact, grad_output, x, takes="float")


@lowers(aten.silu.default)
def silu(ctx: Builder, x: Value) -> Value:
    return pointwise(ctx, lambda x: x / (1 + exp(-x)), x, takes="complex or float")


@lowers(aten.silu_backward.default)
def silu_backward(ctx: Builder, grad_output: Value, x: Value) -> Value:
    def slope(grad: Term, x: Term) -> Term:
        share = logistic(x)
        return grad * share * (1 + x * (1 - share))

    return pointwise(ctx, slope, grad_output, x, takes="complex or float")


@lowers(aten.mish.default)
def mish(ctx: Builder, x: Value) -> Value:
    return pointwise(ctx, lambda x: x * tanh(log1p(exp(x))), x, takes="float")


@lowers(aten.mish_backward.default)
def mish_backward(ctx: Builder, grad_output: Value, x: Value) -> Value:
    def slope(grad: Term, x: Term) -> Term:
        height = tanh(log1p(exp(x)))
        return grad * (height + x * logistic(x) * (1 - height * height))

    return pointwise(ctx, slope, grad_output, x, takes="float")


@lowers(aten.softplus.default)
def softplus(ctx: Builder, x: Value, beta: Any, threshold: Any) -> Value:
    def height(x: Term, beta: Term, threshold: Term) -> Term:
        scaled = x * beta
        return choose(scaled > threshold, x, log1p(exp(scaled)) / beta)

    return pointwise(ctx, height, x, takes="float", numbers=[beta, threshold])


@lowers(aten.softplus_backward.default)
def softplus_backward(ctx: Builder, grad_output: Value, x: Value, beta: Any, threshold: Any) -> Value:
    def slope(grad: Term, x: Term, beta: Term, threshold: Term) -> Term:
        scaled = x * beta
        grown = exp(scaled)
        return choose(scaled > threshold, grad, grad * grown / (grown + 1))

    return pointwise(ctx, slope, grad_output, x, takes="float", numbers=[beta, threshold])


@lowers(aten.elu.default)
def elu(ctx: Builder, x: Value, alpha: Any, scale: Any, input_scale: Any) -> Value:
    def height(x: Term, alpha: Term, scale: Term, inner: Term) -> Term:
        return choose(x < 0, expm1(x * inner) * (alpha * scale), x * scale)

    return pointwise(ctx, height, x, takes="float", numbers=[alpha, scale, input_scale])


@lowers(aten.elu_backward.default)
def elu_backward(
    ctx: Builder, grad_output: Value, alpha: Any, scale: Any, input_scale: Any, is_result: bool, self_or_result: Value
) -> Value:
    def slope(grad: Term, x: Term, alpha: Term, scale: Term, inner: Term) -> Term:
        depth = alpha * scale
        below = x + depth if is_result else depth * exp(x * inner)
        return choose(x <= 0, grad * inner * below, grad * scale)

    return pointwise(ctx, slope, grad_output, self_or_result, takes="float", numbers=[alpha, scale, input_scale])


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: Builder, grad_output: Value, output: Value) -> Value:
    def slope(grad: Term, y: Term) -> Term:
        return grad * ((1 - y) * y).call("conj") if y.dtype.is_complex else grad * (1 - y) * y

    return pointwise(ctx, slope, grad_output, output, takes="complex or float")


@lowers(aten.tanh_backward.default)
def tanh_backward(ctx: Builder, grad_output: Value, output: Value) -> Value:
    def slope(grad: Term, y: Term) -> Term:
        steep = 1 - y * y
        return grad * (steep.call("conj") if y.dtype.is_complex else steep)

    return pointwise(ctx, slope, grad_output, output, takes="complex or float")


# --- with corners -----------------------------------------------------------------------------------------------------


@lowers(aten.leaky_relu.default)
def leaky_relu(ctx: Builder, x: Value, negative_slope: Any) -> Value:
    return pointwise(ctx, lambda x, slope: choose(x > 0, x, x * slope), x, takes="float", numbers=[negative_slope])


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(ctx: Builder, grad_output: Value, x: Value, negative_slope: Any, self_is_result: bool) -> Value:
    made = lambda grad, x, slope: choose(x > 0, grad, grad * slope)  # noqa: E731
    return pointwise(ctx, made, grad_output, x, takes="float", numbers=[negative_slope])


@lowers(aten._prelu_kernel.default)
def prelu(ctx: Builder, x: Value, weight: Value) -> Value:
    return pointwise(ctx, lambda x, slope: choose(x > 0, x, x * slope), x, weight, takes="float")


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(ctx: Builder, grad_output: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    dtype = arithmetic_type(working_type(ctx, grad_output, x, weight, takes="float"))
    grad, value, slope = (term(ctx, item, dtype) for item in (grad_output, x, weight))
    rising = value > 0
    return result(ctx, choose(rising, grad, slope * grad)), result(ctx, choose(rising, 0.0, value * grad))


@lowers(aten.threshold.default)
def threshold(ctx: Builder, x: Value, threshold: Any, value: Any) -> Value:
    return pointwise(ctx, lambda x, edge, new: choose(x <= edge, new, x), x, takes="number", numbers=[threshold, value])


@lowers(aten.threshold_backward.default)
def threshold_backward(ctx: Builder, grad_output: Value, x: Value, threshold: Any) -> Value:
    return pointwise(
        ctx, lambda grad, x, edge: choose(x <= edge, 0, grad), grad_output, x, takes="number", numbers=[threshold]
    )


@lowers(aten.hardtanh.default)
def hardtanh(ctx: Builder, x: Value, min_val: Any, max_val: Any) -> Value:
    return pointwise(
        ctx, lambda x, low, high: smaller(larger(x, low), high), x, takes="number", numbers=[min_val, max_val]
    )


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(ctx: Builder, grad_output: Value, x: Value, min_val: Any, max_val: Any) -> Value:
    made = lambda grad, x, low, high: choose((x <= low) | (x >= high), 0, grad)  # noqa: E731
    return pointwise(ctx, made, grad_output, x, takes="float", numbers=[min_val, max_val])


@lowers(aten.hardshrink.default)
def hardshrink(ctx: Builder, x: Value, lambd: Any) -> Value:
    return pointwise(ctx, lambda x, edge: choose((x >= -edge) & (x <= edge), 0, x), x, takes="float", numbers=[lambd])


@lowers(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(ctx: Builder, x: Value, lambd: Any, **grad: Value) -> Value:
    made = lambda grad, x, edge: choose((x >= -edge) & (x <= edge), 0, grad)  # noqa: E731
    return pointwise(ctx, made, *grad.values(), x, takes="float", numbers=[lambd])


@lowers(aten.softshrink.default)
def softshrink(ctx: Builder, x: Value, lambd: Any) -> Value:
    def shrunk(x: Term, edge: Term) -> Term:
        return choose(x > edge, x - edge, choose(x < -edge, x + edge, choose(is_nan(x), x, 0.0)))

    return pointwise(ctx, shrunk, x, takes="float", numbers=[lambd])


def ramp(x: Term) -> Term:
    """x + 3, from 0 to 6."""
    return smaller(larger(x + 3, 0), 6)


@lowers(aten.hardsigmoid.default)
def hardsigmoid(ctx: Builder, x: Value) -> Value:
    return pointwise(ctx, lambda x: ramp(x) / 6, x, takes="float")


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(ctx: Builder, grad_output: Value, x: Value) -> Value:
    return pointwise(ctx, lambda grad, x: choose((x > -3) & (x < 3), grad * (1 / 6), 0), grad_output, x, takes="float")


@lowers(aten.hardswish.default)
def hardswish(ctx: Builder, x: Value) -> Value:
    return pointwise(ctx, lambda x: x * ramp(x) / 6, x, takes="float")


@lowers(aten.hardswish_backward.default)
def hardswish_backward(ctx: Builder, grad_output: Value, x: Value) -> Value:
    def slope(grad: Term, x: Term) -> Term:
        return choose(x <= -3, 0, choose(x < 3, grad * (x / 3 + 0.5), grad))

    return pointwise(ctx, slope, grad_output, x, takes="float")


@lowers(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise(
    ctx: Builder, x: Value, noise: Value, lower: Any, upper: Any, training: bool, generator: Any
) -> tuple[Value, Value]:
    """In inference the slope is the middle of the range; in training it is drawn from torch's generator."""
    if training or not isinstance(lower, (int, float)) or not isinstance(upper, (int, float)):
        raise NotLowered("its random numbers are those of torch's generator")
    sizes, wide = x.sizes, arithmetic_type(x.dtype)
    value = cast(ctx.elements(x, sizes), wide)
    slope, zero = const((lower + upper) / 2, wide), const(0, wide)
    result = op("where", op("gt", value, zero, dtype=torch.bool), value, op("mul", value, slope), dtype=wide)
    return ctx.lazy(sizes, cast(result, x.dtype), x.device), noise
