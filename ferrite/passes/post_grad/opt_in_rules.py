"""Rules that run only when asked for: named groups, and rules whose result needs a kernel of its own.

The option `post_grad_fusions` names groups in the order in which they run; a mapping gives settings as well, as in
`{"batch_aten_tanh": {"min_members": 3}, "decompose_mm_pass": {}}`. Batch fusions have a step of their own, which runs
before the other groups.

The second kind runs on the devices whose kernels it was made for: `ferrite.passes.shared.kernel_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrite.errors import warn_user
from ferrite.options import NoSettings, Options, check_choices, choice_of
from ferrite.passes.post_grad import batch_fusion, scatters, thin_products
from ferrite.passes.post_grad.b2b_gemm import B2B_GEMM_RULES
from ferrite.passes.post_grad.products import AUTOTUNE_RULES, INT_MM_RULES
from ferrite.passes.post_grad.scatters import PARTITIONED_SCATTER_RULES, ScatterCopies
from ferrite.passes.post_grad.softmax import PREPARE_SOFTMAX
from ferrite.passes.post_grad.split_cat import SPLIT_CAT_GROUPS, Runs
from ferrite.passes.post_grad.thin_products import THIN_PRODUCT_GROUPS, Thin
from ferrite.passes.shared.batching import Settings
from ferrite.passes.shared.const_scatter import SCATTER_UPON_CONSTANT
from ferrite.passes.shared.kernel_rules import KernelRules
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, apply_rules

GROUPS: Mapping[str, tuple[AnyRule, ...]] = {**SPLIT_CAT_GROUPS, **THIN_PRODUCT_GROUPS}
# A CPU finds the maximum and the sum of a row in two passes, as the row is near: `ferrite.schedule.cpu.prepare`.
KERNEL_RULES = KernelRules(
    everywhere=AUTOTUNE_RULES, accelerators=(PREPARE_SOFTMAX, SCATTER_UPON_CONSTANT), asked=INT_MM_RULES
)
# Names that belong to other steps or stages; users' lists of fusions may hold them.
NOT_HERE = (
    *("pad_aten_mm_pass", "shape_padding_multiplier"),
    *("activation_quantization_aten_pass", "inductor_autotune_lookup_table"),
)
# Every name that the option may hold, with the settings it takes.
SETTINGS: Mapping[str, type[Any] | None] = {
    **dict.fromkeys(batch_fusion.BY_NAME, Settings),
    **dict.fromkeys(GROUPS, NoSettings),
    "split_cat_aten_pass": Runs,
    thin_products.GROUP: Thin,
    scatters.GROUP: ScatterCopies,
    **dict.fromkeys(NOT_HERE, None),
}


def check_fusions(options: Options) -> None:
    """Every name in `post_grad_fusions`, and every setting beside it, is one that somebody reads."""
    check_choices("post_grad_fusions", options.post_grad_fusions, SETTINGS)


@graph_pass(stage="post_grad", rules=batch_fusion.RULES)
def group_batch_fusion_passes(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Many small calls of one operator become one call on a stack, for the fusions that the options name."""
    check_fusions(context.options)
    runnable = []
    for name in (choice.name for choice in context.options.post_grad_fusions):
        fusion = batch_fusion.BY_NAME.get(name)
        if fusion is None:
            continue
        settings = fusion.settings(context)
        refusal = batch_fusion.reason_to_refuse(fusion, settings)
        if refusal is None:
            runnable.append(fusion)
        elif not settings.external_lib:  # who sets it has said what to do without the library
            warn_user(f"the fusion {name!r} does nothing: {refusal.reason}")
    # What a fusion makes brings others' members nearer to each other: they go on until none finds anything.
    return apply_rules(gm, runnable, context) if runnable else 0


@graph_pass(stage="post_grad", rules=KERNEL_RULES.all)
def kernel_patterns(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Sums of two products; forms for kernels of GPUs: one-pass softmax, selections; scaled integers if asked for."""
    return apply_rules(gm, KERNEL_RULES.wanted(context.options), context)


@graph_pass(stage="post_grad", rules=PARTITIONED_SCATTER_RULES)
def partitioned_scatter(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Many writes into few places go to several copies first, where post_grad_fusions names it."""
    options = context.options
    named = choice_of(options.post_grad_fusions, scatters.GROUP) is not None
    rules = PARTITIONED_SCATTER_RULES if named else KernelRules(asked=PARTITIONED_SCATTER_RULES).wanted(options)
    return apply_rules(gm, rules, context)


@graph_pass(stage="post_grad", rules=[rule for rules in GROUPS.values() for rule in rules])
def post_grad_fusions(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """The groups of rules that the option post_grad_fusions names, in that order."""
    chosen = [GROUPS[choice.name] for choice in context.options.post_grad_fusions if choice.name in GROUPS]
    return sum(apply_rules(gm, rules, context) for rules in chosen)


@graph_pass(stage="post_grad", rules=B2B_GEMM_RULES)
def b2b_gemm_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Two products with pointwise work between become one call, where kernel_rewrites asks for it."""
    return apply_rules(gm, KernelRules(asked=B2B_GEMM_RULES).wanted(context.options), context)
