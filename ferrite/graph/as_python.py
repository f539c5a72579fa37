"""An FX graph as Python that runs by itself: one class per module, tensors replaced by stand-ins of the same shape.

No tensor contents are written, only shape, strides, dtype and device. The text calls two functions that its reader
supplies: `stand_in` makes a tensor of a given look, `missing` says what could not be written down.
"""

from __future__ import annotations

import importlib
import re
import types
from typing import Any

import torch


def module_source(gm: torch.fx.GraphModule, name: str = "Graph") -> str:
    """Python source that defines a module class `name` which does what `gm` does, on stand-in constants."""
    imports: dict[str, None] = {"import torch": None}
    classes: list[str] = []
    _add_class(gm, name, imports, classes)
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(classes) + "\n"


def _add_class(gm: torch.fx.GraphModule, name: str, imports: dict[str, None], classes: list[str]) -> None:
    code = gm.graph.python_code("self")
    words = set(re.findall(r"\w+", code.src))
    imports.update(dict.fromkeys(import_line(name, value) for name, value in code.globals.items() if name in words))
    body = ["def __init__(self):", "    super().__init__()"]
    for target in dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "get_attr"):
        body += [f"    {line}" for line in _attribute(gm, target, name, imports, classes)]
    body += ["", *code.src.strip().splitlines()]
    lines = [f"    {line}" if line else "" for line in body]
    classes.append("\n".join([f"class {name}(torch.nn.Module):", *lines]))


def _attribute(
    gm: torch.fx.GraphModule, target: str, name: str, imports: dict[str, None], classes: list[str]
) -> list[str]:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    if isinstance(value, torch.fx.GraphModule):
        inner = f"{name}_{target.replace('.', '_')}"
        _add_class(value, inner, imports, classes)
        return [f"self.{target} = {inner}()"]
    if isinstance(value, torch.Tensor):
        return [f"self.{target} = {stand_in_source(value)}"]
    return [f"self.{target} = missing({type(value).__name__!r})"]


def stand_in_source(value: torch.Tensor) -> str:
    """A call of `stand_in` that makes a tensor of the same look."""
    if value.layout is not torch.strided:
        return f"missing('a {value.layout} tensor')"
    facts = [
        f"shape={tuple(map(int, value.shape))}",
        f"stride={tuple(map(int, value.stride()))}",
        f"dtype={value.dtype}",
        f"device={str(value.device)!r}",
    ]
    if value.requires_grad:
        facts.append("requires_grad=True")
    return f"stand_in({', '.join(facts)})"


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
