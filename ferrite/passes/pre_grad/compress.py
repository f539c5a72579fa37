"""Compression of embeddings: products that mix the rows of each sample. Off unless the option `compress` asks for them.

    LCE(X; W, b) = W @ X + b[:, None]           X [B, N, D], W [K, N]: "linear compression of embeddings"

is written `W @ X (+ b)`, as an einsum, or as a linear layer between two transposes, of which the second may be missing.
X is joined if it is a cat or stack along the rows that nobody else reads. A dot compression is (X @ Y.mT) @ W.

    lce-first       several on one X become one with the rows of all weights; the others see that one
    lce-parts       on a joined X: one operator that reads the parts, so that the concat is never written
    lce-matmul      on a joined X: a sum of products with the parts, without an operator of its own
    lce-simple      any: one operator
    dot-compress    one operator that multiplies from the right, where that takes fewer operations
    auto            all of them, each where it pays: see `compress_worth`
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.options import Options
from ferrite.passes.pre_grad import compress_cases as cases
from ferrite.passes.pre_grad import compress_ops as compress_ops  # defines torch.ops.ferrite
from ferrite.passes.pre_grad import compress_worth as worth
from ferrite.passes.pre_grad.compress_forms import ROOTS, Lce, joined_parts, lce_of, product_of_products
from ferrite.passes.pre_grad.horizontal import hints
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.batching import UNLIMITED, Fusion, Settings
from ferrite.pipeline import PassContext
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, Writer, apply_rules, inherit

aten, own = torch.ops.aten, torch.ops.ferrite
FEW_PARTS = 4  # a sum of more products costs more than writing the concat


# --- one operator -----------------------------------------------------------------------------------------------------


def to_operator(site: Site) -> Any:
    found = lce_of(site.node)
    if isinstance(found, Refusal):
        return found
    if (problem := worth.simple_problem(site, found)) is not None:
        return problem
    site.through(*found.inner)
    return found.turned(site, site.call(own.lce.default, found.x, found.weight, found.bias))


def to_parts(site: Site) -> Any:
    found = lce_of(site.node)
    parts = joined_parts(found) if isinstance(found, Lce) else found
    if isinstance(parts, Refusal) or isinstance(found, Refusal):
        return parts
    if (problem := worth.parts_problem(site)) is not None:
        return problem
    site.through(*found.inner, found.x)
    return found.turned(site, site.call(own.lce_parts.default, parts.written(site), found.weight, found.bias))


def to_products(site: Site) -> Any:
    """A sum of products with the parts, if there are few; otherwise the plain product with the concat."""
    found = lce_of(site.node)
    parts = joined_parts(found) if isinstance(found, Lce) else found
    if isinstance(parts, Refusal) or isinstance(found, Refusal):
        return parts
    if (problem := worth.products_problem(site, found, parts)) is not None:
        return problem
    if len(parts.nodes) > FEW_PARTS:
        if found.form == "product":
            return Refusal("it has many parts, and is a plain product already")
        site.through(*found.inner)
        return found.turned(site, with_bias(site, site.call(aten.matmul.default, found.weight, found.x), found.bias))
    if len(parts.nodes) > 1 and fake_value(found.x).element_size() < 4:
        return Refusal("each part of the sum would be rounded")
    site.through(*found.inner, found.x)
    total: Any = None
    start = 0
    for part, width in zip(parts.written(site), parts.widths, strict=True):
        block = site.call(aten.narrow.default, found.weight, 1, start, width)
        product = site.call(aten.matmul.default, block, part)
        total = with_bias(site, product, found.bias) if total is None else site.call(aten.add.Tensor, total, product)
        start += width
    return found.turned(site, total)


def with_bias(site: Site | Writer, product: Any, bias: torch.fx.Node | None) -> Any:
    if bias is None:
        return product
    return site.call(aten.add.Tensor, product, site.call(aten.unsqueeze.default, bias, 1))


def from_the_right(site: Site) -> Any:
    """(X @ Y.mT) @ W as X @ (Y.mT @ W), where that is fewer multiplications."""
    found = product_of_products(site.node)
    if isinstance(found, Refusal):
        return found
    (n, d), (m, k) = hints(fake_value(found.x).shape[1:]), hints(fake_value(found.weight).shape[-2:])
    if not d * k * (m + n) < n * m * (d + k):
        return Refusal("it takes no fewer operations from the right")
    if (problem := worth.dot_problem(site, found)) is not None:
        return problem
    site.through(*found.inner)
    return site.call(own.dot_compress.default, found.x, found.y, found.weight)


# --- several on one input ---------------------------------------------------------------------------------------------


def same_first_input(graph: torch.fx.Graph) -> Callable[[torch.fx.Node], Hashable | Refusal]:
    """What first-level compressions share is their input; one behind another compression is not of the first level."""
    found = {node: lce_of(node) for node in graph.nodes if node.op == "call_function" and node.target in ROOTS}
    lces = {node: lce for node, lce in found.items() if isinstance(lce, Lce)}
    inside = {inner for lce in lces.values() for inner in lce.inner}
    behind: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if any(operand in lces or operand in behind for operand in node.all_input_nodes):
            behind.add(node)

    def kin(node: torch.fx.Node) -> Hashable | Refusal:
        lce = found[node]
        if isinstance(lce, Refusal):
            return lce
        if node in inside:
            return Refusal("it is part of a larger form")
        return Refusal("it lies behind another compression") if lce.x in behind else lce.x

    return kin


def with_all_rows(
    fusion: Fusion, writer: Writer, members: Sequence[torch.fx.Node], settings: Settings
) -> list[torch.fx.Node]:
    found = [lce for lce in map(lce_of, members) if isinstance(lce, Lce)]
    weight = writer.call(aten.cat.default, [lce.weight for lce in found])
    widths = [fake_value(lce.weight).shape[0] for lce in found]
    bias = None
    if any(lce.bias is not None for lce in found):
        blocks = [
            lce.bias if lce.bias is not None else writer.call(aten.new_zeros.default, lce.weight, [width])
            for lce, width in zip(found, widths, strict=True)
        ]
        bias = writer.call(aten.cat.default, blocks)
    whole = with_bias(writer, writer.call(aten.matmul.default, weight, found[0].x), bias)
    split = writer.call(aten.split_with_sizes.default, whole, widths, 1)
    results = []
    for index, (lce, member) in enumerate(zip(found, members, strict=True)):
        part = writer.call(operator.getitem, split, index)
        inherit(part, member)
        results.append(lce.turned(writer, part))
        inherit(results[-1], member)
    return results


def nothing_more(arguments: Any, values: Any) -> Refusal | None:
    return None


@dataclasses.dataclass(frozen=True)
class FirstLevel(Fusion):
    """There is no cost model: it was never measured to lose."""

    def settings(self, context: PassContext) -> Settings:
        return Settings(depth=UNLIMITED, min_members=2)


# --- the rules --------------------------------------------------------------------------------------------------------

FIRST_RULES = (
    FirstLevel(
        name="lce_on_one_input",
        purpose="compressions of one input are one with all their rows",
        operands=dict.fromkeys(ROOTS, ()),
        problem=nothing_more,
        kinship=same_first_input,
        write=with_all_rows,
        numerics="rounded",
        layout="free",
        before_autograd=True,
        copies_returned=True,
        examples=cases.FIRST,
        near_misses=cases.NOT_FIRST,
    ),
)


def lce_rule(
    name: str,
    purpose: str,
    rewrite: Callable[[Site], Any],
    fires: tuple[Case, ...],
    leaves: tuple[Case, ...],
    targets: tuple[Any, ...] = ROOTS,
) -> tuple[NodeRule]:
    by_the_model = cases.NOT_BY_THE_MODEL[name.replace("_", "-")]
    rule = NodeRule(name, purpose, targets, rewrite, fires, (*leaves, *by_the_model), "free", "rounded")
    return (rule,)


PARTS_RULES = lce_rule(
    "lce_parts", "the compression of a concat reads its parts", to_parts, cases.JOINED, cases.NOT_JOINED
)
MATMUL_RULES = lce_rule(
    "lce_matmul",
    "the compression of a concat is a sum of products with its parts",
    to_products,
    cases.JOINED,
    cases.NOT_JOINED,
)
SIMPLE_RULES = lce_rule(
    "lce_simple", "a compression of rows is one operator", to_operator, cases.SIMPLE, cases.NOT_SIMPLE
)
DOT_RULES = lce_rule(
    "dot_compress",
    "products of rows that are compressed are never written",
    from_the_right,
    cases.DOT,
    cases.NOT_DOT,
    (aten.matmul.default, aten.bmm.default),
)


# --- the passes -------------------------------------------------------------------------------------------------------

Refresh = Callable[[torch.fx.GraphModule], object]


def run_if_asked(gm: torch.fx.GraphModule, rules: Sequence[AnyRule], form: str, context: PassContext) -> int:
    return apply_rules(gm, rules, context) if worth.way(context.options, form) != "off" else 0


def run_refreshed(
    gm: torch.fx.GraphModule, rules: Sequence[AnyRule], shape_prop: Refresh, context: PassContext | None
) -> int:
    shape_prop(gm)
    return apply_rules(gm, rules, context or PassContext(Options()))


@pre_grad_pass(rules=FIRST_RULES)
def use_matmul_fuse_lce_replace_first_LCE(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Compressions of one input become one, with `lce-first` in the option compress."""
    return run_if_asked(gm, FIRST_RULES, "lce-first", context)


@pre_grad_pass(rules=PARTS_RULES)
def use_triton_lce_replace_normal_LCE(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """The compression of a concat reads its parts, with `lce-parts` in the option compress."""
    return run_if_asked(gm, PARTS_RULES, "lce-parts", context)


def use_triton_lce_replace_normal_LCE_helper(
    gm: torch.fx.GraphModule, shape_prop: Refresh, context: PassContext | None = None
) -> int:
    """The rewrite itself, on a graph in the stage's form; `shape_prop(gm)` refreshes its metadata first."""
    return run_refreshed(gm, PARTS_RULES, shape_prop, context)


@pre_grad_pass(rules=MATMUL_RULES)
def use_matmul_lce_replace_normal_LCE(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """The compression of a concat is a sum of products, with `lce-matmul` in the option compress."""
    return run_if_asked(gm, MATMUL_RULES, "lce-matmul", context)


@pre_grad_pass(rules=SIMPLE_RULES)
def use_triton_lce_replace_simple_LCE(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A compression of rows is one operator, with `lce-simple` in the option compress."""
    return run_if_asked(gm, SIMPLE_RULES, "lce-simple", context)


def use_triton_lce_replace_simple_LCE_helper(
    gm: torch.fx.GraphModule, shape_prop: Refresh, context: PassContext | None = None
) -> int:
    """The same for compressions of rows."""
    return run_refreshed(gm, SIMPLE_RULES, shape_prop, context)


@pre_grad_pass(rules=DOT_RULES)
def use_triton_dot_compress(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Products of rows that are compressed become one operator, with `dot-compress` in the option compress."""
    return run_if_asked(gm, DOT_RULES, "dot-compress", context)
