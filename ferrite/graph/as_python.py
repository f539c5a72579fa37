"""An FX graph as Python that runs by itself: one class per module, tensors replaced by stand-ins of the same shape.

No tensor contents are written: the caller says how a tensor is described. The text calls a function `missing` that its
reader supplies, where something could not be written down.
"""

from __future__ import annotations

import importlib
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import torch


def module_source(gm: torch.fx.GraphModule, describe_tensor: Callable[[torch.Tensor], str], name: str = "Graph") -> str:
    """Python source that defines a module class `name` which does what `gm` does, on stand-in constants."""
    writer = _Writer(describe_tensor)
    writer.add_class(gm, name)
    return "\n".join(writer.imports) + "\n\n\n" + "\n\n\n".join(writer.classes) + "\n"


class _Writer:
    """Collects the classes of a module and of the sub-graphs it holds, inner ones first."""

    def __init__(self, describe_tensor: Callable[[torch.Tensor], str]) -> None:
        self.describe_tensor = describe_tensor
        self.imports: dict[str, None] = {"import torch": None}
        self.classes: list[str] = []

    def add_class(self, gm: torch.fx.GraphModule, name: str) -> None:
        code = gm.graph.python_code("self")
        words = set(re.findall(r"\w+", code.src))
        used = (import_line(word, value) for word, value in code.globals.items() if word in words)
        self.imports.update(dict.fromkeys(used))
        body = ["def __init__(self):", "    super().__init__()"]
        for target in dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "get_attr"):
            body.append(f"    self.{target} = {self.attribute(gm, target, name)}")
        body += ["", *code.src.strip().splitlines()]
        lines = [f"    {line}" if line else "" for line in body]
        self.classes.append("\n".join([f"class {name}(torch.nn.Module):", *lines]))

    def attribute(self, gm: torch.fx.GraphModule, target: str, name: str) -> str:
        value = operator.attrgetter(target)(gm)
        if isinstance(value, torch.fx.GraphModule):
            inner = f"{name}_{target.replace('.', '_')}"
            self.add_class(value, inner)
            return f"{inner}()"
        if isinstance(value, torch.Tensor):
            return self.describe_tensor(value)
        return f"missing({type(value).__name__!r})"


def import_line(name: str, value: Any) -> str:
    """What brings one global name of generated code into being, without running anything of the user's."""
    if isinstance(value, types.ModuleType):
        return f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"{name} = float({str(value)!r})"
    if value is type(None):
        return f"{name} = type(None)"
    home = importable(value)
    if home is None:
        return f"{name} = missing({getattr(value, '__qualname__', repr(value))!r})"
    module, attribute = home
    return f"from {module} import {attribute}" + (f" as {name}" if attribute != name else "")


def importable(value: Any) -> tuple[str, str] | None:
    """(module, name) under which a function or class can be imported."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or "." in name:
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return (module, name) if found is value else None
