"""Freezing: inference graphs whose parameters have become constants.

`inline_parameters` makes the constants, `FREEZE` is what is done with them, in this order.
"""

from __future__ import annotations

import torch

from ferrite.options import Options, resolve
from ferrite.passes.freezing.binary import binary_folding
from ferrite.passes.freezing.cleaning import merge_equal_calls, remove_same_casts
from ferrite.passes.freezing.fold import constant_fold, drop_unused_constants
from ferrite.passes.freezing.inline import Inlined, inline_parameters, inlined_with_record
from ferrite.passes.freezing.layouts import lay_out_weights, note_parameters
from ferrite.passes.freezing.siblings import merge_siblings
from ferrite.passes.to_aten import to_aten
from ferrite.pipeline import Fuel, PassContext, Pipeline, run_pipeline, warn_once_about

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
        lay_out_weights,
        drop_unused_constants,
    ),
)


def freezing_passes(gm: torch.fx.GraphModule, options: Options | None = None) -> torch.fx.GraphModule:
    """Run the whole stage on a graph that reads its weights by itself, in place. One of torch calls is brought to ATen
    first."""
    from ferrite.passes import checked_options  # which knows the passes of all stages

    options = checked_options(options or resolve())
    to_aten(gm)
    report = warn_once_about(gm, "freezing_passes(gm, ferrite.Options(strict=True))")
    run_pipeline(FREEZE, gm, PassContext(options, True, Fuel(options.fuel)), report)
    return gm
