"""Conversions on the way to another: the detour goes.

    to(to(x, float32), bfloat16)        =>      to(x, bfloat16)         x in float16: the first loses nothing
    to(to(x, float32), bfloat16)        =>      x                       x in bfloat16
    to(to(x, float32), float16)         =>      to(x, float16)          x in float64: rounded once instead of twice

A detour over a dtype that holds fewer digits or a smaller range than the result stays: it is there to round.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, arguments_of

aten, prims = torch.ops.aten, torch.ops.prims
CONVERTS = (prims.convert_element_type.default, aten._to_copy.default)
# Digits and exponents: one dtype holds all values of another where it has no fewer of both.
PRECISION = {torch.float16: (11, 5), torch.bfloat16: (8, 8), torch.float32: (24, 8), torch.float64: (53, 11)}


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    return all(mine >= theirs for mine, theirs in zip(PRECISION[wide], PRECISION[narrow], strict=True))


def converted(node: Any) -> tuple[torch.fx.Node, torch.dtype] | None:
    """What a call converts and to which dtype, if that is all it does."""
    if not isinstance(node, torch.fx.Node) or node.target not in CONVERTS:
        return None
    given = arguments_of(node)
    start, dtype = given.get("a", given.get("self")), given["dtype"]
    if not isinstance(start, torch.fx.Node) or dtype not in PRECISION:
        return None
    # What torch writes itself may name the layout and the device that the operand has.
    same = {"layout": fake_value(start).layout, "device": fake_value(start).device}
    others = {name: value for name, value in given.items() if name not in ("self", "a", "dtype")}
    return (start, dtype) if all(not value or value == same.get(name) for name, value in others.items()) else None


def chain(site: Site) -> tuple[torch.fx.Node, torch.dtype, torch.dtype] | Refusal:
    """Where two conversions begin, and the dtypes they go to."""
    last = converted(site.node)
    first = converted(last[0]) if last is not None else None
    if last is None or first is None:
        return Refusal("it is not two conversions between floating-point dtypes")
    if site.value(first[0]).dtype not in PRECISION:
        return Refusal("the operand is no floating-point tensor")
    return first[0], first[1], last[1]


def direct(site: Site, start: torch.fx.Node, dtype: torch.dtype) -> Any:
    site.through(site.node.all_input_nodes[0])
    if site.value(start).dtype == dtype:
        return start
    return site.call(site.node.target, start, dtype=dtype)


def without_lossless(site: Site) -> Any:
    found = chain(site)
    if isinstance(found, Refusal):
        return found
    start, middle, last = found
    if not holds(middle, site.value(start).dtype):
        return Refusal("the first conversion rounds")
    return direct(site, start, last)


def rounded_once(site: Site) -> Any:
    found = chain(site)
    if isinstance(found, Refusal):
        return found
    start, middle, last = found
    if holds(middle, site.value(start).dtype):
        return Refusal("the first conversion loses nothing")
    if middle == last or not holds(middle, last):
        return Refusal("the first conversion is the coarser one")
    return direct(site, start, last)


def through(first: torch.dtype, second: torch.dtype) -> Any:
    """Both spellings of a conversion, one of each."""
    convert, copy = prims.convert_element_type.default, aten._to_copy.default
    return lambda x: copy(convert(x, first), dtype=second).float().sin()


def detour(first: torch.dtype, second: torch.dtype) -> Any:
    convert = prims.convert_element_type.default
    return lambda x: convert(convert(x, first), second).float().sin()


def numbers(dtype: torch.dtype) -> Any:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 70000.0, 3.3e38, 1e-45], dtype=torch.float64)
    return lambda: [torch.cat([special, torch.randn(24, dtype=torch.float64)]).to(dtype)]


f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

POINTLESS_CONVERT = NodeRule(
    name="pointless_convert",
    purpose="a conversion that loses nothing is left out before another",
    targets=CONVERTS,
    rewrite=without_lossless,
    layout="free",
    examples=(
        Case("half by way of single", through(f32, bf16), numbers(f16)),
        Case("one spelling", detour(f32, bf16), numbers(f16)),
        Case("there and back", detour(f32, bf16), numbers(bf16)),
        Case("wider and wider", detour(f32, f64), numbers(f16)),
        Case("single by way of double", detour(f64, f16), numbers(f32)),
    ),
    near_misses=(
        Case("the first rounds", detour(f16, f32), numbers(f32)),
        Case("half is not in bfloat16", detour(bf16, f32), numbers(f16)),
        Case("integers", lambda x: prims.convert_element_type.default(x.to(f64), f32).sin(), lambda: [torch.arange(5)]),
        Case("to integers", lambda x: x.to(f64).to(torch.int32), lambda: [torch.rand(5)]),
        Case(
            "another device on the way",
            lambda x: aten._to_copy.default(
                aten._to_copy.default(x, dtype=f32, device=torch.device("meta")), dtype=bf16
            ),
            numbers(f16),
        ),
    ),
)

ROUNDED_ONCE = NodeRule(
    name="pointless_convert_rounded",
    purpose="two conversions to fewer and fewer digits round once",
    targets=CONVERTS,
    rewrite=rounded_once,
    layout="free",
    numerics="rounded",
    examples=(
        Case("double by way of single", detour(f32, f16), numbers(f64)),
        Case("to bfloat16", through(f32, bf16), numbers(f64)),
    ),
    near_misses=(
        Case("strict numerics", detour(f32, f16), numbers(f64), {"numerics": "strict"}),
        Case("the range is the smaller one", detour(f16, bf16), numbers(f32)),
        Case("the first is the coarser one", detour(f16, f32), numbers(f64)),
        Case("the first loses nothing", detour(f32, bf16), numbers(f16)),
    ),
)

CONVERT_RULES: tuple[AnyRule, ...] = (POINTLESS_CONVERT, ROUNDED_ONCE)
