"""The parameters and buffers behind the inputs of a graph: Dynamo passes them as arguments like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api, torch_state
from ferrite.graph import attribute


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer: its path in the user's module, the tensor, and how Dynamo names it (None: not at all)."""

    path: tuple[str, ...]
    tensor: torch.Tensor
    source: Any = None

    def __str__(self) -> str:
        kind, owner = "parameter" if isinstance(self.tensor, torch.nn.Parameter) else "buffer", ".".join(self.path[:-1])
        return f"{kind} {self.path[-1]!r} of " + (f"module {owner!r}" if owner else "the module itself")


class Parameters:
    """The state among the arguments of a graph of torch calls, and what the graph's own module holds."""

    def __init__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.by_argument: dict[int, Parameter] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        returned = gm.graph.output_node().all_input_nodes  # AOTAutograd hands such an input back itself
        for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=False)):
            source = torch_state.source_of(node)
            path = torch_state.state_path(source)
            if path is not None and is_plain(value) and node not in returned:
                self.by_argument[position] = Parameter(path, value, source)

    def behind(self, graph: torch.fx.GraphModule) -> Mapping[int, Parameter]:
        """The parameters by position among the inputs of the functional graph that was made of the first one."""
        found = {}
        for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            origin = torch_state.input_origin(node)
            parameter = self.held(origin) if isinstance(origin, str) else self.by_argument.get(origin)  # type: ignore[arg-type]
            if parameter is not None:
                found[position] = parameter
        return found

    def held(self, name: str) -> Parameter | None:
        value = attribute(self.gm, name)
        return Parameter(tuple(name.split(".")), value) if is_plain(value) else None


def is_plain(value: object) -> bool:
    """Whether a value is an ordinary tensor: real, with memory of its own that changes can be told of."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    assert isinstance(value, torch.Tensor)
    strided = value.layout is torch.strided and not value.is_quantized and not value.is_meta
    return strided and not value.is_inference() and not torch_api.is_fake(value)
