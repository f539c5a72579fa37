"""Freezing: inference graphs whose parameters have become constants.

`inline_parameters` makes the constants, `FREEZE` is what is done with them, in this order.
"""

from __future__ import annotations

import torch

from ferrite.options import Options
from ferrite.passes.freezing.binary import binary_folding
from ferrite.passes.freezing.cleanup import merge_equal_calls, remove_same_casts
from ferrite.passes.freezing.fold import constant_fold, drop_unused_constants
from ferrite.passes.freezing.inline import Inlined, inline_parameters, inlined_with_record
from ferrite.passes.freezing.layouts import lay_out_weights, note_parameters
from ferrite.passes.freezing.panels import store_weights_in_panels
from ferrite.passes.freezing.siblings import merge_siblings
from ferrite.passes.shared.run_stage import run_aten_stage
from ferrite.pipeline import Pipeline

__all__ = ["FREEZE", "Inlined", "freezing_passes", "inline_parameters", "inlined_with_record"]

FREEZE = Pipeline(
    "freeze",
    (
        note_parameters,
        remove_same_casts,
        merge_equal_calls,
        constant_fold,
        binary_folding,
        merge_siblings,
        store_weights_in_panels,
        lay_out_weights,
        drop_unused_constants,
    ),
)


def freezing_passes(gm: torch.fx.GraphModule, options: Options | None = None) -> torch.fx.GraphModule:
    """Run the whole stage on a graph that reads its weights by itself, in place. One of torch calls is brought to ATen
    first."""
    return run_aten_stage(FREEZE, gm, True, options, "freezing_passes")
