"""Calls of a graph as plain data that JSON can hold, and back.

    torch.nn.functional.gelu(x, approximate="tanh")
    ["call_function", "torch._C._nn:gelu", ["tuple", ["node", 3]], ["dict", ["approximate", "tanh"]]]

Exact: what comes back is of the same types and has the same bits, and a function is the same object. What cannot be
written so that this holds is a NotCached.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from ferrite.capture import torch_api
from ferrite.errors import NotCached

# Where the functions live that graphs call: their names say all, for one version of Python and torch.
KNOWN_MODULES = frozenset({"_operator", "operator", "math", "builtins", "torch"})
THEMSELVES = frozenset({type(None), bool, int, str})
NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory format"}
MAX_NUMBER = 1 << 96  # no number that a graph holds is larger
Data = Any


class CallDescriber:
    """Describes calls. `nodes`: what they may refer to, by place."""

    def __init__(self, nodes: Sequence[torch.fx.Node]) -> None:
        self.places = {node: place for place, node in enumerate(nodes)}
        self._paths: dict[int, str] = {}  # of what the graph calls, which it keeps alive meanwhile

    def call(self, op: str, target: Any, args: Any, kwargs: Any) -> list[Data]:
        path = target if type(target) is str else self.path(target)
        return [op, path, self.value(args), self.value(kwargs) if kwargs else None]

    def path(self, target: Any) -> str:
        found = self._paths.get(id(target))
        if found is None:
            found = self._paths[id(target)] = path_of(target)
        return found

    def value(self, value: Any) -> Data:
        kind = type(value)
        if kind in THEMSELVES:
            return value
        if kind is torch.fx.Node:
            place = self.places.get(value)
            if place is None:
                raise NotCached(f"it refers to {value}, which is not in the graph")
            return ["node", place]
        if kind is tuple:
            return ["tuple", *map(self.value, value)]
        if kind is list or kind is immutable_list:
            return ["list", *map(self.value, value)]
        return self._rarer(value, kind)

    def _rarer(self, value: Any, kind: type) -> Data:
        if kind is float:
            return ["float", repr(value)]
        if kind is slice:
            return ["slice", *map(self.value, (value.start, value.stop, value.step))]
        if kind is dict or kind is immutable_dict:
            return ["dict", *([self.value(name), self.value(item)] for name, item in value.items())]
        if kind in NAMED:
            return [NAMED[kind], str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", str(value)]
        if value is ...:
            return ["..."]
        if kind is complex:
            return ["complex", repr(value.real), repr(value.imag)]
        if kind is torch.Size:
            return ["size", *map(self.value, value)]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        return ["path", self.path(value)]


def rebuilt(data: Data, nodes: Sequence[torch.fx.Node]) -> Any:
    """The argument behind data; `nodes`: those that it may refer to, by place."""
    if type(data) is not list:
        if type(data) is int and -MAX_NUMBER < data < MAX_NUMBER:
            return data
        if type(data) is int or type(data) not in THEMSELVES:
            raise NotCached(f"a {type(data).__name__} that stands for nothing")
        return data
    kind = data[0]
    if kind == "node":
        place = data[1]
        return nodes[place if type(place) is int and 0 <= place < len(nodes) else place_in(nodes, place)]
    if kind == "dict":
        return {rebuilt(name, nodes): rebuilt(item, nodes) for name, item in data[1:]}
    items = [rebuilt(item, nodes) for item in data[1:]]
    return tuple(items) if kind == "tuple" else MAKERS[kind](items)


def place_in(nodes: Sequence[torch.fx.Node], place: Any) -> int:
    """A place among nodes; NotCached where it is none."""
    if type(place) is not int or not 0 <= place < len(nodes):
        raise NotCached(f"there is no node {place!r}")
    return place


def attribute_of_torch(kind: type) -> Callable[[list[Any]], Any]:
    def find(items: list[Any]) -> Any:
        found = getattr(torch, items[0])
        if type(found) is not kind:
            raise NotCached(f"torch.{items[0]} is no {kind.__name__}")
        return found

    return find


MAKERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": lambda items: items,
    "float": lambda items: float(items[0]),
    "slice": lambda items: slice(*items),
    "device": lambda items: torch.device(items[0]),
    "...": lambda _items: ...,
    "complex": lambda items: complex(float(items[0]), float(items[1])),
    "size": torch.Size,
    "range": lambda items: range(*items),
    "path": lambda items: at_path(items[0]),
    **{name: attribute_of_torch(kind) for kind, name in NAMED.items()},
}


# --- functions by their paths -----------------------------------------------------------------------------------------


def path_of(target: Any) -> str:
    """Where a function, an operator or a member of an enumeration is found again: 'torch._C._nn:gelu',
    'ops:aten.add.Tensor'."""
    operator = torch_api.operator_name(target) or torch_api.packet_name(target)
    if operator is not None:
        if torch_api.find_operator(operator) is target:
            return f"ops:{operator}"
        raise NotCached(f"it calls {operator}, which is not found under its name")
    if isinstance(target, enum.Enum):
        path = f"{type(target).__module__}:{type(target).__qualname__}.{target.name}"
        if _at_path(path) is target:
            return path
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    if not callable(target) or not isinstance(name, str):
        raise NotCached(f"it holds a {type(target).__module__}.{type(target).__qualname__}, which has no text")
    for home in (str(module or "torch"), "torch", "builtins"):
        for path in (f"{home}:{getattr(target, '__qualname__', name)}", f"{home}:{name}"):
            if home.partition(".")[0] in KNOWN_MODULES and _at_path(path) is target:
                return path
    raise NotCached(f"it calls {module}.{name}, a function that is not torch's")


def at_path(path: str) -> Any:
    found = _at_path(path)
    if found is None:
        raise NotCached(f"there is nothing at {path}")
    return found


def _at_path(path: str) -> Any:
    """Looked up among what is loaded: nothing is imported, and nothing runs."""
    home, _, name = path.partition(":")
    if home == "ops":
        return torch_api.find_operator(name)
    if home.partition(".")[0] not in KNOWN_MODULES:
        return None
    found: Any = sys.modules.get(home)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
