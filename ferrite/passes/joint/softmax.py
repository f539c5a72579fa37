"""The shift of a softmax, taken before the scale instead of behind it.

    y = x * s; y - amax(y)        =>      (x' - amax(x')) * |s|,   x' = x or -x, as s is positive or negative
    softmax(x * s)                =>      softmax((x' - amax(x')) * |s|)

The product y is rounded, and the shift then takes away the leading digits: the error stays. On the right the difference
is exact or nearly so, and rounded behind. Where the left side is not finite (rows with inf or nan, a product that
overflows), or the right side is not, the left side's own number is taken; so both are calculated, which only a kernel
of its own does at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, same_sizes
from ferrite.passes.joint.constant_folding import PRODUCTS, QUOTIENTS
from ferrite.passes.shared.converts import converted
from ferrite.passes.shared.facts import has_elements_along
from ferrite.passes.shared.kernel_rules import KernelRules
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules, arguments_of

aten = torch.ops.aten
NAMES = {PRODUCTS: "mul_softmax_pattern", QUOTIENTS: "div_softmax_pattern"}


def reduced(site: Site) -> tuple[torch.fx.Node, torch.fx.Node, list[int]] | None:
    """What is shifted, the node of its maximum, and the dimensions of that; None if it is another difference."""
    if site.node.target is aten.sub.Tensor:
        return reduced_by_amax(site)
    operand, dim = site.arguments["self"], site.arguments["dim"]
    if not has_elements_along(site.value(operand), dim):
        return None
    along = [dim % site.value(operand).ndim]
    return operand, site.call(aten.amax.default, operand, along, True), along


def reduced_by_amax(site: Site) -> tuple[torch.fx.Node, torch.fx.Node, list[int]] | None:
    """The same for a difference that is written out."""
    shifted, largest = site.arguments["self"], site.arguments["other"]
    if site.arguments["alpha"] != 1 or not all(isinstance(item, torch.fx.Node) for item in (shifted, largest)):
        return None
    if largest.target is not aten.amax.default:
        return None
    given, rank = arguments_of(largest), fake_value(shifted).ndim
    if given["self"] is not shifted or given["keepdim"] is not True or rank == 0:
        return None
    dims = [dim % rank for dim in given["dim"]]
    return shifted, largest, dims or list(range(rank))


def scaled(node: torch.fx.Node, targets: Sequence[Any], dims: Sequence[int]) -> tuple[torch.fx.Node, Any] | str:
    """x and s of x * s or x / s, or why it is none; s is the same for all that is reduced together."""
    if node.target not in targets:
        return "what is shifted is not scaled in this way"
    given, shape = arguments_of(node), fake_value(node).shape
    both = [(given["self"], given["other"])]
    if node.target is aten.mul.Tensor:
        both.append((given["other"], given["self"]))
    for x, scale in both:
        if not isinstance(x, torch.fx.Node) or not isinstance(fake_value(x), torch.Tensor):
            continue
        if same_sizes(fake_value(x).shape, shape) and is_constant_along(scale, dims, len(shape)):
            return x, scale
    return "the scale varies along what is reduced"


def is_constant_along(scale: Any, dims: Sequence[int], rank: int) -> bool:
    if isinstance(scale, (int, float)):
        return not isinstance(scale, bool)
    value = fake_value(scale) if isinstance(scale, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    missing = rank - value.ndim  # dimensions in front that it does not have
    return all(dim < missing or torch_api.known_equal(value.shape[dim - missing], 1) for dim in dims)


def shift_first(targets: tuple[Any, ...]) -> Callable[[Site], Any]:
    def rewrite(site: Site) -> Any:
        found = reduced(site)
        if found is None:
            return Refusal("it is no difference to the maximum along dimensions that stay")
        if site.node.meta.get("rewritten", ("",))[0] in NAMES.values():
            return Refusal("it is what the other form falls back to")
        shifted, largest, dims = found
        value = site.value(shifted)
        if not value.is_floating_point():
            return Refusal("it is of integers")
        cast = converted(shifted)
        inner = cast[0] if cast is not None else shifted
        parts = scaled(inner, targets, dims)
        if isinstance(parts, str):
            return Refusal(parts)
        x, scale = parts
        if not site.value(x).is_floating_point():
            return Refusal("the operand is of integers")
        as_before = site.call(aten.sub.Tensor, shifted, largest)
        better = shifted_then_scaled(site, x, scale, value, dims, targets)
        finite = [
            site.call(aten.lt.Scalar, site.call(aten.abs.default, item), torch.inf) for item in (as_before, better)
        ]
        chosen = site.call(aten.where.self, site.call(aten.logical_and.default, *finite), better, as_before)
        if site.node.target is aten.sub.Tensor:
            return chosen
        return site.call(site.node.target, chosen, dims[0], site.arguments["half_to_float"])

    return rewrite


def shifted_then_scaled(
    site: Site, x: torch.fx.Node, scale: Any, look: torch.Tensor, dims: list[int], targets: tuple[Any, ...]
) -> Any:
    """In the dtype of the result. The sign goes to x, so that its largest element is the largest of the product."""
    wide = x if site.value(x).dtype == look.dtype else site.call(aten._to_copy.default, x, dtype=look.dtype)
    size: Any
    if isinstance(scale, torch.fx.Node):
        size = site.call(aten.abs.default, scale)
        negative = site.call(aten.lt.Scalar, scale, 0)
        signed = site.call(aten.where.self, negative, site.call(aten.neg.default, wide), wide)
    else:
        size, signed = abs(scale), (site.call(aten.neg.default, wide) if scale < 0 else wide)
    difference = site.call(aten.sub.Tensor, signed, site.call(aten.amax.default, signed, dims, True))
    result = site.call(aten.mul.Tensor if targets is PRODUCTS else aten.div.Tensor, difference, size)
    same = site.value(result).dtype == look.dtype
    return result if same else site.call(aten._to_copy.default, result, dtype=look.dtype)


def difference_to_largest(y: Any, dim: int = -1, keepdim: bool = True) -> Any:
    return aten.sub.Tensor(y, aten.amax.default(y, [dim], keepdim))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(shape).to(dtype)]


def special_rows() -> list[torch.Tensor]:
    rows = torch.randn(7, 5)
    rows[0, 1], rows[1, 2], rows[2, 3], rows[3] = torch.inf, -torch.inf, torch.nan, -torch.inf
    rows[4], rows[5, 0], rows[6, 0] = -3e38, 3e38, 1e-45
    return [rows]


def with_scale(*shape: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(4, 5), torch.randn(shape)]


def scale_rule(targets: tuple[Any, ...], by: Callable[[Any, Any], Any]) -> NodeRule:
    return NodeRule(
        name=NAMES[targets],
        purpose="a softmax takes the shift before the scale",
        targets=(aten.sub.Tensor, aten._softmax.default, aten._log_softmax.default),
        rewrite=shift_first(targets),
        numerics="rounded",
        examples=(
            Case("a number", lambda x: difference_to_largest(by(x, 0.3)), numbers(4, 5)),
            Case("a negative number", lambda x: difference_to_largest(by(x, -0.3)), numbers(4, 5)),
            Case("infinities, nan and overflow", lambda x: difference_to_largest(by(x, 3.0)), special_rows),
            Case("overflow by the shift", lambda x: difference_to_largest(by(x, 1e-3)), special_rows),
            Case("zero", lambda x: difference_to_largest(by(x, 0.0)), special_rows),
            Case("one per row", lambda x, s: difference_to_largest(by(x, s)), with_scale(4, 1)),
            Case("one for all", lambda x, s: difference_to_largest(by(x, s)), with_scale()),
            Case("one per column, along columns", lambda x, s: difference_to_largest(by(x, s), 0), with_scale(5)),
            Case("softmax", lambda x: torch.softmax(by(x, 0.3), -1), numbers(4, 5)),
            Case("log-softmax of infinities and nan", lambda x: torch.log_softmax(by(x, -3.0), 1), special_rows),
            Case("softmax in half precision", lambda x: torch.softmax(by(x, 3.0), 0), numbers(4, 5, dtype=torch.half)),
            Case("softmax, one per row", lambda x, s: torch.softmax(by(x, s), -1), with_scale(4, 1)),
        ),
        near_misses=(
            Case("one per column", lambda x, s: difference_to_largest(by(x, s)), with_scale(5)),
            Case("not scaled", lambda x: difference_to_largest(x.sin()), numbers(4, 5)),
            Case("the dimension goes", lambda x: difference_to_largest(by(x, 2.0), 0, False), numbers(4, 5)),
            Case("another maximum", lambda x: by(x, 2.0) - aten.amax.default(by(x, 3.0), [1], True), numbers(4, 5)),
            Case("softmax, one per column", lambda x, s: torch.softmax(by(x, s), -1), with_scale(5)),
            Case("softmax of empty rows", lambda x: torch.softmax(by(x, 2.0), -1), numbers(4, 0)),
            Case("softmax of a number", lambda x: torch.softmax(by(x, 2.0), -1), numbers()),
            Case("strict", lambda x: difference_to_largest(by(x, 2.0)), numbers(4, 5), {"numerics": "strict"}),
        ),
    )


SCALED_SOFTMAX_RULES = (
    scale_rule(PRODUCTS, lambda x, s: x * s),
    scale_rule(QUOTIENTS, lambda x, s: x / s),
)
# Both forms are calculated: where memory is the limit, as on a GPU, that is free; on one core of a CPU it took
# six times as long.
KERNEL_RULES = KernelRules(accelerators=SCALED_SOFTMAX_RULES)


@graph_pass(stage="joint", rules=SCALED_SOFTMAX_RULES, after="fuse_attention")
def scaled_softmax(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A softmax takes its shift before the scale, in kernels of GPUs."""
    return apply_rules(gm, KERNEL_RULES.wanted(context.options), context)
