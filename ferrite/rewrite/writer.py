"""Write nodes into a graph, each with its fake value, and take them back."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ferrite.graph import compute, note_for_another

# What a node that a rewrite makes has from the one it stands for. `custom` holds the execution stream, among others.
INHERITED = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "seq_nr",
    "partitioner_tag",
    "recompute",
    "custom",
)


def inherit(made: torch.fx.Node, origin: torch.fx.Node) -> None:
    """Hand on where a node came from; what the new node has already stays."""
    for key in INHERITED:
        if key in origin.meta:
            made.meta.setdefault(key, note_for_another(origin.meta[key]))


class Writer(torch.fx.proxy.GraphAppendingTracer):
    """Writes nodes into the graph, each with its fake value, and can take them back."""

    def __init__(self, graph: torch.fx.Graph, fake_mode: Any) -> None:
        super().__init__(graph)
        self.fake_mode = fake_mode
        self.made: list[torch.fx.Node] = []
        self.registered: list[str] = []  # names of constants that the module did not have before

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        self.made.append(node)
        node.meta["val"], bindings = compute(node, self.fake_mode)
        if bindings:
            node.meta["unbacked_bindings"] = bindings
        return node

    def proxies(self, value: Any) -> Any:
        """A bound argument with a proxy for each node in it, so that calling operators on it writes nodes."""
        if isinstance(value, torch.fx.Node):
            return torch.fx.Proxy(value, self)
        if isinstance(value, (list, tuple)):
            items = [self.proxies(item) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> torch.fx.Node:  # one of `kwargs` may be `self`
        return self.create_node("call_function", target, args, kwargs)

    def constant(self, name: str, value: torch.Tensor) -> torch.fx.Node:
        """A node that reads a tensor which the module is to keep.

        It is registered under a name that the module does not have yet; one that is registered already stays one.
        """
        module = self.graph.owning_module
        assert module is not None
        names = (f"_{name}_{number}" for number in itertools.count())
        kept = next(each for each in names if getattr(module, each, value) is value)  # free, or this very tensor's
        if not hasattr(module, kept):
            module.register_buffer(kept, value, persistent=False)
            self.registered.append(kept)
        return self.create_node("get_attr", kept, (), {})

    def take_back(self) -> None:
        for node in reversed(self.made):
            self.graph.erase_node(node)
        for name in self.registered:
            delattr(self.graph.owning_module, name)
        self.made.clear()
        self.registered.clear()
