"""Passes, pipelines, and the pass manager that runs them.

In: a GraphModule and a pipeline, which is a tuple of passes and so the documentation of their order. Out: the same
module, rewritten in place, and one record per pass. The pass manager alone times, counts, verifies, skips, rolls back
and spends fuel; a pass knows only its own work.
"""

from ferrite.pipeline.context import Fuel, PassContext, PassRecord, Times, no_times
from ferrite.pipeline.failed_pass import warn_at, warn_of_failed_pass, warn_once_about
from ferrite.pipeline.pass_manager import PassFailure, devices_in, run_pipeline
from ferrite.pipeline.passes import GraphPass, Pipeline, StageName, graph_pass
from ferrite.pipeline.undo import copy_graph

__all__ = [
    "Fuel",
    "GraphPass",
    "PassContext",
    "PassFailure",
    "PassRecord",
    "Pipeline",
    "StageName",
    "Times",
    "copy_graph",
    "devices_in",
    "graph_pass",
    "no_times",
    "run_pipeline",
    "warn_at",
    "warn_of_failed_pass",
    "warn_once_about",
]
