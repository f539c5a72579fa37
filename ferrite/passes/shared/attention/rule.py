"""The rules: attention that is written out becomes one call."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ferrite.errors import NotApplied, Refusal
from ferrite.passes.shared.attention.cases import (
    DROPOUT_EXAMPLES,
    DROPOUT_NEAR_MISSES,
    EXAMPLES,
    NEAR_MISSES,
    TRAINING_NEAR_MISSES,
)
from ferrite.passes.shared.attention.find import find_attention
from ferrite.passes.shared.attention.write import AttentionWriter
from ferrite.rewrite import AnyRule, NodeRule, Site

aten = torch.ops.aten
# The last product, or the view that gives the result of a flattened one its shape back.
ROOTS = (
    *(aten.matmul.default, aten.bmm.default, aten.mm.default, aten.einsum.default),
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
)


def without_dropout(site: Site) -> Any:
    return rewritten(site, drops=False)


def with_dropout(site: Site) -> Any:
    if site.options.rng == "eager":
        return Refusal("it draws other random numbers, and the option rng is eager")
    return rewritten(site, drops=True)


def rewritten(site: Site, drops: bool) -> Any:
    if site.options.attention == "off":
        return Refusal("the option attention is off")
    try:
        found = find_attention(site.node)
        if bool(found.dropout) != drops:
            raise NotApplied("weights are dropped" if found.dropout else "no weights are dropped")
        site.through(*found.inside)
        return AttentionWriter(site, found).write()
    except NotApplied as problem:
        return problem.refusal


SFDP = NodeRule(
    name="sfdp",
    purpose="attention that is written out is one call",
    targets=ROOTS,
    rewrite=without_dropout,
    examples=EXAMPLES,
    near_misses=(*NEAR_MISSES, *TRAINING_NEAR_MISSES),
    layout="free",
    numerics="rounded",
)
SFDP_DROPOUT = NodeRule(
    name="sfdp_dropout",
    purpose="the same where weights are dropped: others are",
    targets=ROOTS,
    rewrite=with_dropout,
    examples=DROPOUT_EXAMPLES,
    near_misses=DROPOUT_NEAR_MISSES,
    layout="free",
    numerics="redrawn",
)

SFDP_INFERENCE = dataclasses.replace(
    SFDP, name="sfdp_inference", purpose="the same in ATen, where products are flattened", near_misses=NEAR_MISSES
)

BEFORE_AUTOGRAD: tuple[AnyRule, ...] = (SFDP, SFDP_DROPOUT)
FOR_INFERENCE: tuple[AnyRule, ...] = (SFDP_INFERENCE,)
