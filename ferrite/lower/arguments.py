"""Values as arguments of a call: tensors in memory, numbers and other literals as text, objects by name."""

from __future__ import annotations

import cmath
import math
from functools import partial
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.ir import Expr, Index, Number
from ferrite.ir.program import CallArgument, Constant, Literal, Ref, Scalar, Size
from ferrite.ir.program import arguments as host
from ferrite.lower.builder import Builder
from ferrite.lower.memory import buffer_of
from ferrite.lower.scalars import on_the_host, read
from ferrite.lower.value import Value


def argument(ctx: Builder, value: Any) -> CallArgument:
    """A value as an argument of a call: tensors in memory, as eager would have them."""
    match value:
        case Value():
            return Ref(buffer_of(ctx, value, strided_fake(value)))
        case Number():
            return Literal(str(value.value))
        case Index():
            return Size(value)
        case Expr():
            return Scalar(on_the_host(ctx, value))
        case Constant():
            return value
        case torch.SymInt():
            return argument(ctx, ctx.sizes.index(value))
        case torch.SymFloat() | torch.SymBool():
            return Scalar(on_the_host(ctx, read(ctx, value)))
        case list() | tuple():
            items = tuple(map(partial(argument, ctx), value))
            return host.Sequence("list" if isinstance(value, list) else "tuple", items)  # type: ignore[arg-type]
        case dict():
            pairs = tuple((literal_text(key) or repr(key), argument(ctx, item)) for key, item in value.items())
            return host.Mapping(pairs)  # type: ignore[arg-type]
    text = literal_text(value)
    return Literal(text) if text is not None else named_object(ctx, value, type(value).__name__)


def strided_fake(value: Value) -> torch.Tensor | None:
    """Eager's strides for an argument, where they are known: calls may depend on them."""
    fake = value.fake
    return fake if fake is not None and fake.layout is torch.strided else None


def named_object(ctx: Builder, value: Any, hint: str) -> Constant:
    for name, named in ctx.objects.items():
        if named is value:
            return Constant(name)
    name = f"object{len(ctx.objects)}_{hint}" if hint.isidentifier() else f"object{len(ctx.objects)}"
    ctx.objects[name] = value
    return Constant(name)


def literal_text(value: Any) -> str | None:
    """Python source that makes an equal value; None where there is none.

    >>> literal_text(float("-inf")), literal_text(-0.0), literal_text(torch.float32)
    ("float('-inf')", '-0.0', 'torch.float32')
    """
    kind = type(value)
    if value is None or value is Ellipsis or kind in (bool, int, str):
        return "..." if value is Ellipsis else repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if kind is complex:
        if cmath.isfinite(value):
            return repr(value)
        return f"complex({literal_text(value.real)}, {literal_text(value.imag)})"
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return str(value)
    if kind is torch.device:
        return f"torch.device({str(value)!r})"
    name = torch_api.operator_name(value)
    return f"torch.ops.{name}" if name is not None else None
