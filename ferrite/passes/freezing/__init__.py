"""Freezing: inference graphs whose parameters have become constants.

`inline_parameters` makes the constants, `FREEZE` is what is done with them, in this order. Weights in layouts that
kernels of our own like better belong behind it; they come with those kernels.
"""

from __future__ import annotations

import torch

from ferrite.options import Options, resolve
from ferrite.passes.freezing.binary import binary_folding
from ferrite.passes.freezing.cleaning import merge_equal_calls, remove_same_casts
from ferrite.passes.freezing.fold import constant_fold, drop_unused_constants
from ferrite.passes.freezing.inline import Inlined, inline_parameters
from ferrite.passes.freezing.siblings import merge_siblings
from ferrite.passes.to_aten import to_aten
from ferrite.pipeline import Fuel, PassContext, Pipeline, run_pipeline

__all__ = ["FREEZE", "Inlined", "freezing_passes", "inline_parameters"]

FREEZE = Pipeline(
    "freeze",
    (
        remove_same_casts,
        merge_equal_calls,
        constant_fold,
        binary_folding,
        merge_siblings,
        drop_unused_constants,
    ),
)


def freezing_passes(gm: torch.fx.GraphModule, options: Options | None = None) -> torch.fx.GraphModule:
    """Run the whole stage on a graph that reads its weights by itself, in place. One of torch calls is brought to ATen
    first."""
    options = options or resolve()
    to_aten(gm)
    run_pipeline(FREEZE, gm, PassContext(options, True, Fuel(options.fuel)))
    return gm
