"""Arguments of calls, as plain data.

    argument = Ref(name) | Constant(name) | Literal(text) | Sequence(kind, items) | Mapping(items) | Slice(...)

Literals are Python source, so that programs compare and hash by text whatever the value (NaN, -0.0). Objects that have
no source form (tensor constants, sub-graphs) are named here and supplied when a program is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal as OneOf


@dataclass(frozen=True)
class Ref:
    """A value that an input or an earlier step bound."""

    name: str


@dataclass(frozen=True)
class Constant:
    """An object without a source form, supplied when the program is loaded."""

    name: str


@dataclass(frozen=True)
class Literal:
    """Python source of a value: `2`, `float('nan')`, `torch.float32`."""

    text: str


@dataclass(frozen=True)
class Sequence:
    kind: OneOf["list", "tuple"]
    items: tuple[Argument, ...]


@dataclass(frozen=True)
class Mapping:
    items: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True)
class Slice:
    start: Argument
    stop: Argument
    step: Argument


Argument = Ref | Constant | Literal | Sequence | Mapping | Slice
