"""Between floats and small integers: a scale, a zero point, and bounds, for a tensor or for each of its channels."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotLowered
from ferrite.ir import ZERO, Index, arithmetic_type, is_integer
from ferrite.lower.builder import Builder
from ferrite.lower.formula import Term, choose, larger, result, smaller, term
from ferrite.lower.ops.views import dim_of
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
decomposed: Any = torch_api.quantized_decomposed()
F32, F64 = torch.float32, torch.float64


def one_element(ctx: Builder, value: Any, dtype: torch.dtype) -> Term:
    """A number, or the only element of a tensor of any shape."""
    return Term(value.at([ZERO] * value.rank)).to(dtype) if isinstance(value, Value) else term(ctx, value, dtype)


def of_channel(x: Value, values: Value, axis: int) -> Term:
    """The value of the channel that an element of x belongs to."""
    place: Index = own_axes(x.sizes)[dim_of(axis, x.rank)]
    return Term(values.at([place]))


def rounded(made: Term, dtype: torch.dtype) -> Term:
    """In a type, and wide again."""
    return made.to(dtype).to(arithmetic_type(dtype))


def promoted_op(left: Term, right: Term, name: str) -> Term:
    """An operator on two tensors' elements, in the type that both are promoted to."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    wide = arithmetic_type(dtype)
    return left.to(wide).call(name, right.to(wide)).to(dtype)


def check(x: Value, quant_min: Any, quant_max: Any, dtype: torch.dtype) -> None:
    """What eager refuses is left to it."""
    if x.dtype not in (F32, torch.float16, torch.bfloat16):
        raise NotLowered(f"elements of type {x.dtype}, which eager refuses")
    if not (isinstance(quant_min, int) and isinstance(quant_max, int)) or not is_integer(dtype):
        raise NotLowered("bounds that eager looks at first")
    if quant_min < torch.iinfo(dtype).min or quant_max > torch.iinfo(dtype).max or dtype is torch.bool:
        raise NotLowered("bounds that eager refuses")


def quantize(
    ctx: Builder, x: Value, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: torch.dtype
) -> Value:
    """The factor is the reciprocal of the scale, taken in double precision, as a Python number is."""
    check(x, quant_min, quant_max, dtype)
    factor = (1 / one_element(ctx, scale, F64)).to(F32)
    steps = (term(ctx, x, F32) * factor).call("round") + one_element(ctx, zero_point, F32)
    return result(ctx, smaller(larger(steps, quant_min), quant_max))


def dequantize(
    ctx: Builder,
    x: Value,
    scale: Any,
    zero_point: Any,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
    out_dtype: Any,
) -> Value:
    if x.dtype != dtype or not is_integer(dtype):
        raise NotLowered(f"elements of type {x.dtype}, which eager looks at first")
    to = out_dtype or F32
    wide = arithmetic_type(to)
    shifted = rounded(rounded(Term(ctx.elements(x, x.sizes)), to) - one_element(ctx, zero_point, wide), to)
    return result(ctx, shifted * one_element(ctx, scale, wide))


def quantize_channels(
    ctx: Builder,
    x: Value,
    scales: Value,
    zero_points: Value,
    axis: int,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
) -> Value:
    check(x, quant_min, quant_max, dtype)
    scale = of_channel(x, scales, axis)
    wide = arithmetic_type(scale.dtype)
    factor = (1 / scale.to(wide)).to(scale.dtype)
    steps = promoted_op(term(ctx, x, F32), factor, "mul").call("round")
    moved = promoted_op(steps, of_channel(x, zero_points, axis), "add")
    return result(ctx, smaller(larger(moved, quant_min), quant_max))


def dequantize_channels(
    ctx: Builder,
    x: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
    out_dtype: Any,
) -> Value:
    if x.dtype != dtype or not is_integer(dtype) or scales.dtype != F32:
        raise NotLowered(f"elements of type {x.dtype}, which eager looks at first")
    value = Term(ctx.elements(x, x.sizes))
    if zero_points is not None:
        value = promoted_op(value, of_channel(x, zero_points, axis), "sub")
    return result(ctx, promoted_op(value, of_channel(x, scales, axis), "mul").to(out_dtype or F32))


if decomposed is not None:
    lowers(decomposed.quantize_per_tensor.default, decomposed.quantize_per_tensor.tensor)(quantize)
    lowers(
        decomposed.dequantize_per_tensor.default,
        decomposed.dequantize_per_tensor.tensor,
        decomposed.dequantize_per_tensor.tensor2,
    )(dequantize)
    lowers(decomposed.quantize_per_channel.default)(quantize_channels)
    lowers(decomposed.dequantize_per_channel.default)(dequantize_channels)


# --- and back at once: what training for small integers sees ----------------------------------------------------------


def rounded_trip(
    ctx: Builder, x: Value, scale: Term, zero: Term, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    """Elements as they come back from small integers, and whether the bounds left them where they were."""
    value, mask = ctx.out
    if x.dtype not in (F32, torch.float16, torch.bfloat16):
        raise NotLowered(f"elements of type {x.dtype}")
    steps = zero + (term_of(ctx, x) * (1 / scale)).call("round")
    inside = (steps >= quant_min) & (steps <= quant_max)
    back = (steps.call("fmax", quant_min).call("fmin", quant_max) - zero) * scale
    return (
        ctx.lazy(x.sizes, back.to(value.dtype).expr, x.device),
        ctx.lazy(x.sizes, inside.to(mask.dtype).expr, x.device),
    )


def term_of(ctx: Builder, x: Value) -> Term:
    return Term(ctx.elements(x, x.sizes)).to(F32)


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize(
    ctx: Builder, x: Value, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    return rounded_trip(ctx, x, one_element(ctx, scale, F32), one_element(ctx, zero_point, F32), quant_min, quant_max)


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_tensors(
    ctx: Builder, x: Value, scale: Value, zero_point: Value, fake_quant_enabled: Value, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    """Where it is switched off, the elements stay, and all count."""
    value, mask = fake_quantize(ctx, x, scale, zero_point, quant_min, quant_max)
    on = one_element(ctx, fake_quant_enabled, torch.bool)
    made, kept = (Term(ctx.elements(item, x.sizes)) for item in (value, mask))
    plain = Term(ctx.elements(x, x.sizes)).to(made.dtype)
    return (
        ctx.lazy(x.sizes, choose(on, made, plain).expr, x.device),
        ctx.lazy(x.sizes, choose(on, kept, True).expr, x.device),
    )


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_channels(
    ctx: Builder, x: Value, scale: Value, zero_point: Value, axis: int, quant_min: int, quant_max: int
) -> tuple[Value, Value]:
    scales, zeros = (of_channel(x, item, axis).to(F32) for item in (scale, zero_point))
    return rounded_trip(ctx, x, scales, zeros, quant_min, quant_max)
