"""Facts about FX graphs that several stages ask for.

In: an FX graph, as Dynamo or AOTAutograd made it. Out: where a node came from in the user's model, what its value
looks like, and the graph as Python that runs by itself. Nothing here changes a graph.
"""

from ferrite.errors import ModelLine
from ferrite.graph.aliases import (
    Aliases,
    Storage,
    apart_in_memory,
    input_storages,
    storages_in,
    storages_of,
    tensor_storages,
)
from ferrite.graph.as_python import module_source
from ferrite.graph.attributes import attribute, is_stored
from ferrite.graph.autocast import note_autocast
from ferrite.graph.facts import (
    INDEX_INSIDE,
    SHORT_NAMES,
    WRITES_UNSAID,
    argument,
    attribute_of,
    body_of,
    describe_value,
    fake_value,
    innermost_first,
    is_known_operator,
    leaves,
    note_for_another,
    produces_value,
    schema_of,
    storage_bytes,
    stream_of,
)
from ferrite.graph.gradients import Gradients, says_so
from ferrite.graph.order import PLACE, stable_topological_sort, users_in_order
from ferrite.graph.places import Place, PlaceIndex, Places
from ferrite.graph.regions import WRITTEN_AFTER, Regions, has_effect, is_random, mutates
from ferrite.graph.scatters import VIEW_SCATTERS, eager_refuses
from ferrite.graph.source import TORCH_FOLDER, first_model_line, model_line
from ferrite.graph.torch_calls import OPERATORS, aten_name, bound_arguments, is_barrier, is_torch_function, signature
from ferrite.graph.updater import MetadataUpdater
from ferrite.graph.values import (
    SYMBOLIC,
    CannotRun,
    MissingValue,
    Values,
    alias_class,
    compute,
    empty_view,
    fingerprint,
    keep_names,
    leaving_no_symbols,
    mode_of,
    no_guards,
    runs_on_values,
    same_metadata,
    same_number,
    same_sizes,
)
from ferrite.graph.verify import Snapshot, guards_in, verify_graph

__all__ = [
    "INDEX_INSIDE",
    "OPERATORS",
    "PLACE",
    "SHORT_NAMES",
    "SYMBOLIC",
    "TORCH_FOLDER",
    "VIEW_SCATTERS",
    "WRITES_UNSAID",
    "WRITTEN_AFTER",
    "Aliases",
    "CannotRun",
    "Gradients",
    "MetadataUpdater",
    "MissingValue",
    "ModelLine",
    "Place",
    "PlaceIndex",
    "Places",
    "Regions",
    "Snapshot",
    "Storage",
    "Values",
    "alias_class",
    "apart_in_memory",
    "argument",
    "aten_name",
    "attribute",
    "attribute_of",
    "body_of",
    "bound_arguments",
    "compute",
    "describe_value",
    "eager_refuses",
    "empty_view",
    "fake_value",
    "fingerprint",
    "first_model_line",
    "guards_in",
    "has_effect",
    "innermost_first",
    "input_storages",
    "is_barrier",
    "is_known_operator",
    "is_random",
    "is_stored",
    "is_torch_function",
    "keep_names",
    "leaves",
    "leaving_no_symbols",
    "mode_of",
    "model_line",
    "module_source",
    "mutates",
    "no_guards",
    "note_autocast",
    "note_for_another",
    "produces_value",
    "runs_on_values",
    "same_metadata",
    "same_number",
    "same_sizes",
    "says_so",
    "schema_of",
    "signature",
    "stable_topological_sort",
    "storage_bytes",
    "storages_in",
    "storages_of",
    "stream_of",
    "tensor_storages",
    "users_in_order",
    "verify_graph",
]
