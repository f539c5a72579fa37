"""From the graph Dynamo captured to functional ATen graphs, one per direction.

In: an FX graph of torch calls with example inputs. Out: `CapturedGraph`s (forward, backward or inference) handed to a
compiler, and one callable over the compiled results. What comes out is functional except for trailing copy_ nodes
that write mutated inputs back; every node has a fake value; the backward graph comes later, from an autograd thread.
"""

from ferrite.capture.aot import CapturedGraph, GraphKind, Partition, capture, mark_inputs_written_after
from ferrite.capture.calls_as_data import CallDescriber
from ferrite.capture.edits import Before, make
from ferrite.capture.parameters import Parameter
from ferrite.capture.product_libraries import (
    has_arm_compute_library,
    uses_mkl_with_wide_vectors,
)
from ferrite.capture.python_numbers import as_python_hands_them_over
from ferrite.capture.shared_inputs import where_inputs_lay
from ferrite.capture.torch_api import check_torch_version, span
from ferrite.capture.torch_operators import (
    begins_its_storage,
    decomposition,
    every_operator,
    functional_twin,
    is_operator,
    is_random,
    is_view,
    known_contiguous,
    overloads,
    register_fake,
    schema,
    written_arguments,
)
from ferrite.capture.torch_state import (
    gradients_of_pointwise_weights_lie_as_images,
    on_real_tensors,
    outside_of_modes,
)

__all__ = [
    "Before",
    "CallDescriber",
    "CapturedGraph",
    "GraphKind",
    "Parameter",
    "Partition",
    "as_python_hands_them_over",
    "begins_its_storage",
    "capture",
    "check_torch_version",
    "decomposition",
    "every_operator",
    "functional_twin",
    "gradients_of_pointwise_weights_lie_as_images",
    "has_arm_compute_library",
    "is_operator",
    "is_random",
    "is_view",
    "known_contiguous",
    "make",
    "mark_inputs_written_after",
    "on_real_tensors",
    "outside_of_modes",
    "overloads",
    "register_fake",
    "schema",
    "span",
    "uses_mkl_with_wide_vectors",
    "where_inputs_lay",
    "written_arguments",
]
