"""Graphs on 8-bit integers: work between a dequantise and a quantise is done on the integers themselves.

    q = (scale, zero point, ...) of both sides is one and the same

    quantize(max_pool2d(dequantize(x, q)), q)           =>      qmaxpool2d(x)
    quantize(cat([dequantize(x, q), ...]), q)           =>      cat([x, ...])
    quantize(view(dequantize(x, q)), q)                 =>      view(x)
    quantize(dequantize(x, q), q)                       =>      x, where quantising was moved in front of the view
    mul(mm(x, to_bf16(w).t()), s)                       =>      _weight_int8pack_mm(x, w, s)
    relu(qlinear(...)), qlinear(...) + o                =>      one operator, where kernel_rewrites asks

The first three are exact to the integer: a dequantised integer is quantised to itself if the scale is no extreme and
no integer is clamped. So scales and zero points are compared for equality, not for likeness.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.post_grad import cpu_ops
from ferrite.passes.post_grad.layers import VIEWS, uses_of
from ferrite.passes.shared.constants import constant_of
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, arguments_of, in_order

aten = torch.ops.aten
decomposed: Any = torch_api.quantized_decomposed()

QUANTIZE = (
    ()
    if decomposed is None
    else tuple(getattr(decomposed.quantize_per_tensor, name) for name in decomposed.quantize_per_tensor.overloads())
)
DEQUANTIZE = (
    ()
    if decomposed is None
    else tuple(getattr(decomposed.dequantize_per_tensor, name) for name in decomposed.dequantize_per_tensor.overloads())
)
POOLS = (
    "aten.max_pool2d.default",
    "aten.max_pool2d_with_indices.default",
    "prims._low_memory_max_pool_with_offsets.default",
    "prims._low_memory_max_pool2d_with_offsets.default",
)
POOL_DEFAULTS: dict[str, Any] = {"kernel_size": None, "stride": [], "padding": 0, "dilation": 1, "ceil_mode": False}


# --- parameters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizationParameters:
    scale: float
    zero_point: int
    low: int
    high: int
    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether every integer comes back: the product with a scale in float32 is off by a few units in the last of
        24 bits, far less than half an integer, as long as it neither overflows nor vanishes."""
        return 2.0**-100 <= self.scale <= 2.0**100 and abs(self.zero_point) <= 2**15


def parameters(node: torch.fx.Node) -> QuantizationParameters | None:
    """How a node quantises or dequantises, if that is known now: numbers, or constants of the module."""
    given = arguments_of(node)
    numbers = [known_number(given[name]) for name in ("scale", "zero_point", "quant_min", "quant_max")]
    scale, zero_point, low, high = numbers
    if scale is None or zero_point is None or low is None or high is None:
        return None
    return QuantizationParameters(float(scale), int(zero_point), int(low), int(high), given["dtype"])


def known_number(item: Any) -> float | int | None:
    if isinstance(item, torch.fx.Node):
        found = constant_of(item)
        return found.item() if found is not None and found.numel() == 1 else None
    return item if isinstance(item, (int, float)) else None


def source_of(node: Any, wanted: QuantizationParameters) -> torch.fx.Node | Refusal:
    """The integers that a node dequantises, if quantising again with some parameters gives them back."""
    if not isinstance(node, torch.fx.Node) or node.target not in DEQUANTIZE:
        return Refusal("an operand is not dequantised")
    source: Any = in_order(node)[0]
    found = parameters(node)
    if found is None or (found.scale, found.zero_point, found.dtype) != (wanted.scale, wanted.zero_point, wanted.dtype):
        return Refusal("it is quantised with other parameters than it was dequantised with")
    if not found.exact:
        return Refusal("the scale or zero point is extreme")
    if fake_value(node).dtype != torch.float32 or fake_value(source).dtype != wanted.dtype:
        return Refusal("it is dequantised to another type than float32, or from another")
    limits = torch.iinfo(wanted.dtype)
    low, high = limits.min, limits.max
    if source.target in QUANTIZE and (before := parameters(source)) is not None:
        low, high = before.low, before.high
    return source if wanted.low <= low and high <= wanted.high else Refusal("quantising clamps")


def quantised(site: Site) -> tuple[torch.fx.Node, QuantizationParameters] | Refusal:
    """What a node quantises, read by it alone, and how."""
    operand, found = in_order(site.node)[0], parameters(site.node)
    if found is None or found.dtype not in cpu_ops.INTEGERS:
        return Refusal("the scale or zero point is not known, or the result is not of 8 bits")
    assert isinstance(operand, torch.fx.Node)
    if uses_of(operand) != 1:
        return Refusal(f"{operand.name} has another user")
    return operand, found


# --- between a dequantise and a quantise ------------------------------------------------------------------------------


def pooled_integers(site: Site) -> Any:
    found = quantised(site)
    if isinstance(found, Refusal):
        return found
    values, wanted = found
    pool: Any = values.args[0] if values.target is operator.getitem else values
    if str(pool.target) not in POOLS:
        return Refusal("no max-pool stands before it")
    items = [user for user in pool.users if user is not site.node]
    if any(item is not values and item.users for item in items) or (items and values.args[1] != 0):
        return Refusal("the indices are used, or the values again")
    given = arguments_of(pool)
    operand = in_order(pool)[0]
    source = source_of(operand, wanted)
    if isinstance(source, Refusal):
        return source
    site.through(values, *items, pool, operand)
    *sizes, ceil_mode = (given.get(name, default) for name, default in POOL_DEFAULTS.items())
    lists = [[size] if isinstance(size, int) else list(size) for size in sizes]
    return site.call(torch.ops.ferrite.qmaxpool2d.default, source, *lists, ceil_mode)


def joined_integers(site: Site) -> Any:
    found = quantised(site)
    if isinstance(found, Refusal):
        return found
    joined, wanted = found
    if joined.target is not aten.cat.default:
        return Refusal("no cat stands before it")
    given = arguments_of(joined)
    sources = [source_of(item, wanted) for item in given["tensors"]]
    refusal = next((source for source in sources if isinstance(source, Refusal)), None)
    if refusal is not None:
        return refusal
    site.through(joined, *given["tensors"])
    return site.call(aten.cat.default, sources, given["dim"])


def reshaped_integers(site: Site) -> Any:
    found = quantised(site)
    if isinstance(found, Refusal):
        return found
    view, wanted = found
    reshaped = view.target in VIEWS
    if not reshaped and view.target not in DEQUANTIZE:
        return Refusal("no reshape stands before it")
    operand, *size = in_order(view) if reshaped else [view]
    source = source_of(operand, wanted)
    if isinstance(source, Refusal):
        return source
    site.through(*dict.fromkeys((view, operand)))
    return site.call(aten.reshape.default, source, *size) if reshaped else source


# --- rules ------------------------------------------------------------------------------------------------------------

EIGHT = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


def dequantize(x: Any, scale: float = 0.1, zero_point: int = 3, dtype: torch.dtype = torch.int8, **more: Any) -> Any:
    return decomposed.dequantize_per_tensor.default(x, scale, zero_point, *EIGHT[dtype], dtype, **more)


def quantize(
    y: Any, scale: float = 0.1, zero_point: int = 3, dtype: torch.dtype = torch.int8, low: int | None = None
) -> Any:
    least, most = EIGHT[dtype]
    return decomposed.quantize_per_tensor.default(y, scale, zero_point, least if low is None else low, most, dtype)


def integers(*shapes: tuple[int, ...], dtype: torch.dtype = torch.int8) -> Any:
    low, high = EIGHT[dtype]
    return lambda: [torch.randint(low, high + 1, shape).to(dtype) for shape in shapes]


def channels_last() -> list[torch.Tensor]:
    return [integers((2, 3, 12, 12))()[0].contiguous(memory_format=torch.channels_last)]


def pool(y: Any, *more: Any) -> Any:
    return aten.max_pool2d_with_indices.default(y, [2, 2], *more)[0]


def pooled_with_indices(x: Any) -> Any:
    values, indices = aten.max_pool2d_with_indices.default(dequantize(x), [2, 2])
    return quantize(values), indices


IMAGE = (2, 3, 6, 6)
PAIR = ((2, 3), (2, 4))

QMAXPOOL2D = NodeRule(
    name="qmaxpool2d",
    purpose="the largest of dequantised integers, quantised again, is the largest integer",
    targets=QUANTIZE,
    rewrite=pooled_integers,
    examples=(
        Case("plain", lambda x: quantize(pool(dequantize(x))), integers(IMAGE)),
        Case("stride and padding", lambda x: quantize(pool(dequantize(x), [2, 2], [1, 1])), integers(IMAGE)),
        Case(
            "all arguments",
            lambda x: quantize(pool(dequantize(x), [2, 1], [0, 1], [2, 2], True)),
            integers(IMAGE),
        ),
        Case(
            "without a sign",
            lambda x: quantize(pool(dequantize(x, dtype=torch.uint8)), dtype=torch.uint8),
            integers(IMAGE, dtype=torch.uint8),
        ),
        Case("channels last", lambda x: quantize(pool(dequantize(x))), channels_last),
    ),
    near_misses=(
        Case("another scale", lambda x: quantize(pool(dequantize(x)), 0.2), integers(IMAGE)),
        Case("nearly the same scale", lambda x: quantize(pool(dequantize(x)), 0.1000001), integers(IMAGE)),
        Case("another zero point", lambda x: quantize(pool(dequantize(x)), 0.1, 4), integers(IMAGE)),
        Case("a negative scale", lambda x: quantize(pool(dequantize(x, -0.1)), -0.1), integers(IMAGE)),
        Case("the indices are used", pooled_with_indices, integers(IMAGE)),
        Case("clamped", lambda x: quantize(pool(dequantize(x)), low=-100), integers(IMAGE)),
        Case(
            "through half precision",
            lambda x: quantize(pool(dequantize(x, out_dtype=torch.float16)).float()),
            integers(IMAGE),
        ),
    ),
)

QCAT = NodeRule(
    name="qcat",
    purpose="integers that are joined as floats and quantised again are joined as integers",
    targets=QUANTIZE,
    rewrite=joined_integers,
    examples=(
        Case("two", lambda x, y: quantize(aten.cat.default([dequantize(x), dequantize(y)], 1)), integers(*PAIR)),
        Case("one twice", lambda x: quantize(aten.cat.default([y := dequantize(x), y])), integers((2, 3))),
        Case(
            "what was clamped before",
            lambda x: quantize(aten.cat.default([dequantize(quantize(x, low=-5))]), low=-5),
            lambda: [torch.randn(4, 3)],
        ),
    ),
    near_misses=(
        Case(
            "scales nearly equal",
            lambda x, y: quantize(aten.cat.default([dequantize(x), dequantize(y, 0.1000001)], 1)),
            integers(*PAIR),
        ),
        Case(
            "zero points differ",
            lambda x, y: quantize(aten.cat.default([dequantize(x), dequantize(y, 0.1, 2)], 1)),
            integers(*PAIR),
        ),
        Case(
            "quantised with another scale",
            lambda x, y: quantize(aten.cat.default([dequantize(x), dequantize(y)], 1), 0.3),
            integers(*PAIR),
        ),
        Case(
            "one is not dequantised",
            lambda x, y: quantize(aten.cat.default([dequantize(x), y.float()], 1)),
            integers(*PAIR),
        ),
        Case(
            "the joined floats are read again",
            lambda x: (y := aten.cat.default([dequantize(x)]), quantize(y)),
            integers((2, 3)),
        ),
        Case("an extreme scale", lambda x: quantize(aten.cat.default([dequantize(x, 1e-38)]), 1e-38), integers((2, 3))),
    ),
)

QRESHAPE = NodeRule(
    name="qreshape",
    purpose="integers that are reshaped as floats, if at all, and quantised again are reshaped as integers",
    targets=QUANTIZE,
    rewrite=reshaped_integers,
    examples=(
        Case("view", lambda x: quantize(aten.view.default(dequantize(x), [3, 2])) + 1, integers((2, 3))),
        Case("reshape", lambda x: quantize(aten.reshape.default(dequantize(x), [-1])) + 1, integers((2, 3))),
        Case("nothing between", lambda x: quantize(dequantize(x)) + 1, integers((2, 3))),
    ),
    near_misses=(
        Case("another scale", lambda x: quantize(aten.view.default(dequantize(x), [6]), 0.2) + 1, integers((2, 3))),
        Case(
            "nearly the same scale",
            lambda x: quantize(aten.view.default(dequantize(x), [6]), 0.1000001) + 1,
            integers((2, 3)),
        ),
        Case("returned", lambda x: quantize(aten.view.default(dequantize(x), [6])), integers((2, 3))),
        Case("no reshape", lambda x: quantize(aten.neg.default(dequantize(x))), integers((2, 3))),
    ),
)

QUANTIZED_RULES: tuple[AnyRule, ...] = (QMAXPOOL2D, QCAT, QRESHAPE) if decomposed is not None else ()
