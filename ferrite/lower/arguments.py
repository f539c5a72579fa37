"""From the arguments of an FX node to the arguments of a host step.

Values with a source form become literals; nodes become references; anything else (a tensor constant, a sub-graph, an
opaque object) is kept aside under a name and supplied when the program is loaded.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.ir import Argument, Constant, Literal, Mapping, Sequence, Slice


class Constants:
    """Objects without a source form, each once, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def name_of(self, value: Any, hint: str = "object") -> Constant:
        name = self._names.get(id(value))
        if name is None:
            name = f"constant_{len(self.by_name)}_{hint}" if hint.isidentifier() else f"constant_{len(self.by_name)}"
            self._names[id(value)] = name
            self.by_name[name] = value
        return Constant(name)


def argument(value: Any, name_of: Callable[[torch.fx.Node], Argument], constants: Constants) -> Argument:
    def recurse(inner: Any) -> Argument:
        return argument(inner, name_of, constants)

    if isinstance(value, torch.fx.Node):
        return name_of(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        kind = "list" if isinstance(value, list) else "tuple"
        return Sequence(kind, tuple(map(recurse, value)))  # type: ignore[arg-type]
    if isinstance(value, dict):
        return Mapping(tuple((literal_text(key) or repr(key), recurse(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return Slice(recurse(value.start), recurse(value.stop), recurse(value.step))
    text = literal_text(value)
    return Literal(text) if text is not None else constants.name_of(value, type(value).__name__)


def literal_text(value: Any) -> str | None:
    """Python source that makes an equal value; None where there is none.

    >>> literal_text(float("-inf")), literal_text(-0.0), literal_text(torch.float32)
    ("float('-inf')", '-0.0', 'torch.float32')
    """
    kind = type(value)
    if value is None or value is Ellipsis or kind in (bool, int, str):
        return "..." if value is Ellipsis else repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if kind is complex:
        if cmath.isfinite(value):
            return repr(value)
        return f"complex({literal_text(value.real)}, {literal_text(value.imag)})"
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return str(value)
    if kind is torch.device:
        return f"torch.device({str(value)!r})"
    name = torch_api.operator_name(value)
    return f"torch.ops.{name}" if name is not None else None
