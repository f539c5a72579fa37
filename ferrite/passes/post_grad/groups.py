"""Rules that run only when asked for: named groups, and rules whose result needs a kernel of its own.

The second kind is off until those kernels are compiled: `ferrite::prepare_softmax_online` and its kin have an eager
kernel that is right, but not faster than what it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ferrite.errors import UserError, nearest
from ferrite.options import Options
from ferrite.passes.post_grad import batch_fusion
from ferrite.passes.post_grad.b2b_gemm import B2B_GEMM_RULES
from ferrite.passes.post_grad.products import AUTOTUNE_RULES, INT_MM_RULES
from ferrite.passes.post_grad.scatters import PARTITIONED_SCATTER_RULES, SCATTER_RULES
from ferrite.passes.post_grad.softmax import SOFTMAX_RULES
from ferrite.passes.post_grad.split_cat import SPLIT_CAT_GROUPS
from ferrite.passes.post_grad.thin_products import THIN_PRODUCT_GROUPS
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, apply_rules

GROUPS: Mapping[str, tuple[AnyRule, ...]] = {**SPLIT_CAT_GROUPS, **THIN_PRODUCT_GROUPS}
KERNEL_RULES = (*SOFTMAX_RULES, *SCATTER_RULES, *AUTOTUNE_RULES, *INT_MM_RULES)


def check_fusions(options: Options) -> None:
    """Every name in `post_grad_fusions` is a group or a batch fusion."""
    known = [*GROUPS, *batch_fusion.BY_NAME]
    for name in options.post_grad_fusions:
        if name not in known:
            raise UserError(
                f"option 'post_grad_fusions' names {name!r}",
                {"did you mean": nearest(name, known), "possible": ", ".join(known)},
            )


@graph_pass(stage="post_grad", rules=KERNEL_RULES)
def kernel_patterns(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Forms that want a kernel of their own, with the option kernel_rewrites: one-pass softmax, sums of products."""
    return apply_rules(gm, KERNEL_RULES, context) if context.options.kernel_rewrites else 0


@graph_pass(stage="post_grad", rules=PARTITIONED_SCATTER_RULES)
def partitioned_scatter(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Many writes into few places go to several copies first, with the option kernel_rewrites."""
    return apply_rules(gm, PARTITIONED_SCATTER_RULES, context) if context.options.kernel_rewrites else 0


@graph_pass(stage="post_grad", rules=[rule for rules in GROUPS.values() for rule in rules])
def post_grad_fusions(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """The groups of rules that the option post_grad_fusions names, in that order."""
    chosen = [GROUPS[name] for name in context.options.post_grad_fusions if name in GROUPS]
    return sum(apply_rules(gm, rules, context) for rules in chosen)


@graph_pass(stage="post_grad", rules=B2B_GEMM_RULES)
def b2b_gemm_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Two products with pointwise work between become one, with the option kernel_rewrites."""
    return apply_rules(gm, B2B_GEMM_RULES, context) if context.options.kernel_rewrites else 0
