"""Drop assertions about dtype, shape and device of a tensor: the values that tracing left answer them now.

They compute nothing, and as one more reader of a tensor they would hide that the next operator could be fused with it.
Assertions about the contents of tensors or about sizes that only a run can tell are checks of the user's, and stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ferrite.graph import describe_value, fake_value, model_line

aten = torch.ops.aten
ASSERTION = aten._assert_tensor_metadata.default


class FalseAssertion(Exception):
    """A graph asserts of a tensor what its value contradicts: a pass before this one, or the trace, is wrong."""

    def __init__(self, node: torch.fx.Node, value: torch.Tensor, what: str, asserted: Any, found: Any) -> None:
        line = model_line(node)
        place = f" (from {line})" if line is not None else ""
        tensor = f"{node.args[0]}: {describe_value(value)}"
        super().__init__(f"{node.name}{place} asserts {what} {asserted} of {tensor}, which has {what} {found}")
        self.node = node


def remove_assert_ops(graph: torch.fx.Graph) -> int:
    """Erase the metadata assertions that hold; how many. If one is wrong, raise and leave the graph as it is."""
    found = graph.find_nodes(op="call_function", target=ASSERTION)
    held = [node for node in found if not node.users and holds(node)]
    for node in held:
        graph.erase_node(node)
    return len(held)


def holds(node: torch.fx.Node) -> bool:
    """Whether an assertion is true for certain. False if sizes are left to the run; an error if it is wrong."""
    names = [argument.name for argument in ASSERTION._schema.arguments]
    asserted: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    value = fake_value(asserted.pop("a"))
    if not isinstance(value, torch.Tensor):
        return True  # nothing is known of the tensor, hence nothing that contradicts
    decided = True
    for what, wanted in asserted.items():
        if wanted is None:
            continue
        actual = read(value, what)
        answer = compare(actual, torch.fx.node.map_arg(wanted, fake_value))
        if answer is False:
            raise FalseAssertion(node, value, what, wanted, actual)
        decided = decided and answer is True
    return decided


def read(value: torch.Tensor, what: str) -> Any:
    if what in ("size", "stride"):
        return list(value.size() if what == "size" else value.stride())
    return getattr(value, what)


def compare(actual: Any, wanted: Any) -> bool | None:
    """True or False where it is so for every binding of the symbols, None where that depends; adds no guard."""
    if isinstance(wanted, torch.device):
        same_index = wanted.index is None or actual.index is None or wanted.index == actual.index
        return bool(actual.type == wanted.type and same_index)
    if not isinstance(wanted, (list, tuple)):
        return bool(actual == wanted)
    if len(actual) != len(wanted) or any(statically_known_true(a != w) for a, w in zip(actual, wanted, strict=True)):
        return False
    return True if all(statically_known_true(a == w) for a, w in zip(actual, wanted, strict=True)) else None
