"""Operators on lists of tensors: each element as the operator on one tensor, in the order of the list."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import schema, written_arguments
from ferrite.errors import NotLowered
from ferrite.ir import number
from ferrite.lower.apply import apply
from ferrite.lower.builder import Builder
from ferrite.lower.stores import write_into
from ferrite.lower.table import LOWERED, lowers
from ferrite.lower.value import Value

aten = torch.ops.aten

ONE_OPERAND = (
    "abs acos asin atan ceil clone copy cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
)
# The operator on one tensor that an overload stands for.
SEVERAL = {
    "add": {"Scalar": "add.Scalar", "ScalarList": "add.Scalar", "List": "add.Tensor", "Tensor": "add.Tensor"},
    "sub": {"Scalar": "sub.Scalar", "ScalarList": "sub.Scalar", "List": "sub.Tensor"},
    "mul": {"Scalar": "mul.Scalar", "ScalarList": "mul.Scalar", "List": "mul.Tensor", "Tensor": "mul.Tensor"},
    "div": {"Scalar": "div.Scalar", "ScalarList": "div.Scalar", "List": "div.Tensor", "Tensor": "div.Tensor"},
    "clamp_min": {"Scalar": "clamp_min", "ScalarList": "clamp_min", "List": "clamp_min.Tensor"},
    "clamp_max": {"Scalar": "clamp_max", "ScalarList": "clamp_max", "List": "clamp_max.Tensor"},
    "maximum": {"Scalar": "clamp_min", "ScalarList": "clamp_min", "List": "maximum"},
    "minimum": {"Scalar": "clamp_max", "ScalarList": "clamp_max", "List": "minimum"},
    "pow": {
        "Scalar": "pow.Tensor_Scalar",
        "ScalarList": "pow.Tensor_Scalar",
        "List": "pow.Tensor_Tensor",
        "ScalarAndTensor": "pow.Scalar",
    },
    "lerp": {"Scalar": "lerp.Scalar", "ScalarList": "lerp.Scalar", "List": "lerp.Tensor"},
    "addcmul": {"Scalar": "addcmul", "ScalarList": "addcmul", "Tensor": "addcmul"},
    "addcdiv": {"Scalar": "addcdiv", "ScalarList": "addcdiv", "Tensor": "addcdiv"},
}


def _foreach(overload: Any, single: Any) -> None:
    one = LOWERED[single]
    names = [argument.name for argument in schema(single).arguments]
    writes = bool(written_arguments(overload))

    @lowers(overload)
    def lower(ctx: Builder, **args: Any) -> list[Value] | None:
        count = max(len(value) for value in args.values() if isinstance(value, list))
        outs, results = ctx.out, []
        for place in range(count):
            given = [item(name, value, place) for name, value in args.items()]
            target = args["x"][place] if isinstance(args["x"], list) else None
            ctx.out = target.fake if writes and target is not None else outs[place]
            if ctx.out is None:
                raise NotLowered("a list of tensors that torch has no fake value of")
            value = one(ctx, **by_name(names, given, single))
            results.append(write_into(ctx, target, value) if writes and target is not None else value)
        ctx.out = outs
        return None if writes else results


def item(name: str, value: Any, place: int) -> Any:
    """What an argument holds for one element of the list; a tensor of `scalars` holds a number for each."""
    if name == "scalars" and isinstance(value, Value):
        return value.view((), [number(place)])
    return value[place] if isinstance(value, list) else value


def by_name(names: list[str], given: list[Any], single: Any) -> dict[str, Any]:
    """Arguments under the names that the operator on one tensor has for them, its defaults for the rest."""
    optional = [argument for argument in schema(single).arguments if argument.has_default_value()]
    bound = {argument.name: argument.default_value for argument in optional}
    bound.update(zip(names, given, strict=False))
    return {"x" if name == "self" else name: value for name, value in bound.items()}


def operator_named(path: str) -> Any:
    packet, _, overload = path.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _each_overload(name: str, singles: dict[str, str]) -> None:
    for overload, single in singles.items():
        for packet in (f"_foreach_{name}", f"_foreach_{name}_"):
            found = getattr(getattr(aten, packet, None), overload, None)
            if found is not None:
                _foreach(found, operator_named(single))


for _name in ONE_OPERAND.split():
    _each_overload(_name, {"default": _name})
for _name, _singles in SEVERAL.items():
    _each_overload(_name, _singles)


@lowers(aten._foreach_norm.Scalar)
def foreach_norm(ctx: Builder, x: list[Value], ord: Any, dtype: Any) -> list[Any]:
    norm = aten.linalg_vector_norm.default
    return [apply(ctx, norm, (item, ord), {"dtype": dtype}, out) for item, out in zip(x, ctx.out, strict=True)]


@lowers(aten._foreach_max.default)
def foreach_max(ctx: Builder, x: list[Value]) -> list[Any]:
    return [apply(ctx, aten.max.default, (item,), {}, out) for item, out in zip(x, ctx.out, strict=True)]
