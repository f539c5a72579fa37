"""Two products with only pointwise operators between them: one kernel that keeps the tile between on the chip.

    mm(f(mm(a, b)), c)      =>      b2b_gemm(a, b, c, f, left=True)
    mm(a, f(mm(b, c)))      =>      b2b_gemm(a, b, c, f, left=False)

It pays where the loads it saves are more than those it repeats; `load_ratio` counts both for one size of tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, has_effect, is_elementwise
from ferrite.passes.post_grad.operators import write_pointwise
from ferrite.passes.shared.cases import on_accelerator
from ferrite.passes.shared.facts import on_cpu, only_cast
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, in_order

aten = torch.ops.aten
MAX_NODES_BETWEEN = 64  # nodes between the products: a longer chain is not worth a kernel of its own


# --- what lies between ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Between:
    """The inner product and the pointwise nodes that lead from it to an operand of the outer one, in order."""

    product: torch.fx.Node
    region: tuple[torch.fx.Node, ...]


def between(operand: torch.fx.Node, outer: torch.fx.Node) -> Between | Refusal:
    """Walk back from an operand of the outer product to the inner one."""
    region: set[torch.fx.Node] = set()
    products: set[torch.fx.Node] = set()
    waiting = [operand]
    while waiting:
        node = waiting.pop()
        if node in region or node in products:
            continue
        if node.target is aten.mm.default:
            products.add(node)
        elif (is_elementwise(node.target) or only_cast(node) is not None) and not has_effect(node):
            region.add(node)
            waiting += node.all_input_nodes
        else:
            return Refusal(f"{node.name} is neither pointwise nor a product")
        if len(region) > MAX_NODES_BETWEEN:
            return Refusal("there is too much between the products")
    if len(products) != 1:
        return Refusal("it does not lead back to one product")
    product = products.pop()
    for node in (product, *region):
        if any(user not in region and not (user is outer and node is operand) for user in node.users):
            return Refusal(f"{node.name} is read elsewhere, too")
    return Between(product, tuple(sorted(region)))


# --- what it costs ----------------------------------------------------------------------------------------------------

TILES = tuple(itertools.product((32, 64, 128), (16, 32, 64), (16, 32, 64), (16, 32, 64, 128)))
Sizes = tuple[int, int, int, int]


def load_ratio(left: bool, sizes: Sizes, tile: Sizes) -> float:
    """Elements loaded by two kernels for each that one loads: [m, n] by [n, o] by [o, p]."""
    (big_m, big_n, big_o, big_p), (m, n, o, p) = sizes, tile
    tiles_m, tiles_n, tiles_o, tiles_p = (math.ceil(size / part) for size, part in zip(sizes, tile, strict=True))
    if left:
        apart = big_m * big_n + big_n * big_o + big_m * big_o + big_o * big_p
        fused = tiles_m * tiles_p * tiles_o * (o * p + tiles_n * (m * n + n * o))
    else:
        apart = big_n * big_o + big_o * big_p + big_m * big_n + big_n * big_p
        fused = tiles_m * tiles_p * tiles_n * (m * n + tiles_o * (n * o + o * p))
    return apart / fused if fused else 0.0


def is_worth_it(left: bool, sizes: Sizes) -> bool:
    """Whether the three best tiles load less, in the geometric mean."""
    best = sorted((load_ratio(left, sizes, tile) for tile in TILES), reverse=True)[:3]
    return math.prod(best) > 1


# --- the rule ---------------------------------------------------------------------------------------------------------


def back_to_back(site: Site) -> Any:
    reasons = []
    for found in candidates(site):
        if not isinstance(found, Refusal):
            a, b, c, text, left, path = found
            site.through(path.product, *path.region)
            return site.call(torch.ops.ferrite.b2b_gemm.default, a, b, c, text, left)
        reasons.append(found.reason)
    return Refusal("; ".join(dict.fromkeys(reasons)))


def candidates(site: Site) -> Iterator[tuple[Any, Any, Any, str, bool, Between] | Refusal]:
    """The product as the outer one of a pair, with the inner one on its left and on its right."""
    operands = (site.arguments["self"], site.arguments["mat2"])
    if operands[0] is operands[1]:
        yield Refusal("both operands are one value")
        return
    if on_cpu(fake_value(site.node)):
        yield Refusal("it is on a cpu")
        return
    for left in (True, False):
        operand = operands[0] if left else operands[1]
        found = between(operand, site.node)
        if isinstance(found, Refusal):
            yield found
            continue
        inner = in_order(found.product)
        matrices = (*inner, operands[1]) if left else (operands[0], *inner)
        yield pair_problem(matrices, inner, left) or described(found, matrices, left)


def described(found: Between, matrices: Any, left: bool) -> tuple[Any, Any, Any, str, bool, Between] | Refusal:
    text = write_pointwise(found.product, found.region)
    return Refusal("what lies between cannot be written down") if text is None else (*matrices, text, left, found)


def pair_problem(matrices: Any, inner: Any, left: bool) -> Refusal | None:
    values = [fake_value(matrix) for matrix in matrices]
    if inner[0] is inner[1]:
        return Refusal("the inner product is of one value with itself")
    if len({(value.dtype, value.device) for value in values}) != 1 or not values[0].is_floating_point():
        return Refusal("the matrices are not of one floating-point dtype on one device")
    a, b, c = ([torch_api.size_hint(size) for size in value.shape] for value in values)
    if not is_worth_it(left, (a[0], b[0], c[0], c[1])):
        return Refusal("it would load more than two products do")
    return None


def left_of(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return on_accelerator(lambda a, b, c: aten.mm.default(function(aten.mm.default(a, b)), c))


def sizes(m: int = 1024, n: int = 16) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.rand(m, n), torch.rand(n, n), torch.rand(n, n)]


def two_branches(x: Any) -> Any:
    return aten.add.Tensor(aten.relu.default(x), aten.mul.Tensor(aten.sigmoid.default(x), 0.5))


B2B_GEMM = NodeRule(
    name="b2b_gemm",
    purpose="two products with only pointwise operators between them are one kernel",
    targets=(aten.mm.default,),
    rewrite=back_to_back,
    numerics="rounded",
    examples=(
        Case("nothing between", left_of(lambda x: x), sizes()),
        Case("relu between", left_of(aten.relu.default), sizes()),
        Case("two branches that meet again", left_of(two_branches), sizes()),
        Case("rounded between", left_of(lambda x: x.half().float()), sizes()),
        Case(
            "the inner product on the right",
            on_accelerator(
                lambda a, b, c: aten.mm.default(
                    aten.t.default(b), aten.relu.default(aten.mm.default(c, aten.t.default(a)))
                )
            ),
            sizes(),
        ),
    ),
    near_misses=(
        Case("on a cpu", lambda a, b, c: aten.mm.default(aten.mm.default(a, b), c), sizes()),
        Case(
            "something else is read between",
            on_accelerator(lambda a, b, c: aten.mm.default(aten.mm.default(a, b) + a, c)),
            sizes(),
        ),
        Case(
            "the value between is read elsewhere",
            on_accelerator(lambda a, b, c: aten.mm.default(p := aten.relu.default(aten.mm.default(a, b)), c) + p),
            sizes(),
        ),
        Case(
            "the value between on both sides",
            on_accelerator(lambda a, b, c: aten.mm.default(p := aten.mm.default(a, b), p)),
            sizes(16),
        ),
        Case("not pointwise", left_of(lambda x: x.cumsum(0)), sizes()),
        Case("too wide to pay", left_of(aten.relu.default), sizes(1024, 1024)),
        Case(
            "the inner product is a square",
            on_accelerator(lambda a, b, c: aten.mm.default(aten.mm.default(b, b), c)),
            sizes(),
        ),
    ),
)

B2B_GEMM_RULES: tuple[AnyRule, ...] = (B2B_GEMM,)
