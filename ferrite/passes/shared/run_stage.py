"""One stage run on any graph, as users may: `ferrite.passes.post_grad_passes(gm)`."""

from __future__ import annotations

import torch

from ferrite.options import Options, resolve
from ferrite.passes.shared.to_aten import to_aten
from ferrite.pipeline import Fuel, PassContext, Pipeline, run_pipeline, warn_once_about


def checked(options: Options | None) -> Options:
    """The options that were given, or the environment's, with every name of a pass or a rule looked up."""
    from ferrite.passes import checked_options  # which knows the passes of all stages

    return checked_options(options or resolve())


def run_aten_stage(
    pipeline: Pipeline, gm: torch.fx.GraphModule, is_inference: bool, options: Options | None, door: str
) -> torch.fx.GraphModule:
    """Run a stage of ATen operators on a graph, in place. One of torch calls is brought to ATen first.

    `door` is what the user called: a pass that fails is skipped, with a warning that says how to see the whole error.
    """
    options = checked(options)
    to_aten(gm)
    report = warn_once_about(gm, f"{door}(gm, options=ferrite.Options(strict=True))")
    run_pipeline(pipeline, gm, PassContext(options, is_inference, Fuel(options.fuel)), report)
    return gm
