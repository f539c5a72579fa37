"""Sizes as nodes of a graph.

    empty(s0 * s1, 4)      =>      a = sym_size(x, 0); b = sym_size(x, 1); n = a * b; empty([n, 4])

A fake value's sizes are expressions over symbols; a node's arguments must be numbers and nodes. Each symbol is read
from a number that the graph has, or from the first tensor that has it among its sizes, and the arithmetic is written
as nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.graph import fake_value
from ferrite.rewrite import Writer

aten = torch.ops.aten


class UnknownSymbol(ValueError):
    """A size has a symbol that no earlier value of the graph carries."""


class SizeWriter:
    """Writes sizes into a graph before a node; what was written once is used again."""

    def __init__(self, writer: Writer, before: torch.fx.Node) -> None:
        self.writer, self.before = writer, before
        self.symbols: dict[str, Any] | None = None
        self.written: dict[Any, torch.fx.Node] = {}

    def nodes(self, sizes: Sequence[Any]) -> list[Any]:
        return [self.node(size) for size in sizes]

    def node(self, size: Any) -> Any:
        """A plain number as it is, a symbolic one as a node that computes it."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = torch_api.expression(size)
        if expression.is_number:
            return int(expression)
        if expression not in self.written:
            bound = {name: self.proxy(name) for name in torch_api.free_symbols(size)}
            self.written[expression] = torch_operators.evaluate(size, bound).node
        return self.written[expression]

    def proxy(self, symbol: str) -> torch.fx.Proxy:
        found = self.known().get(symbol)
        if found is None:
            raise UnknownSymbol(f"no value before {self.before.name} carries the size {symbol}")
        if isinstance(found, tuple):
            found = self.writer.call(aten.sym_size.int, *found)
            self.known()[symbol] = found
        return torch.fx.Proxy(found, self.writer)

    def known(self) -> dict[str, Any]:
        """For each symbol a number in the graph, or else a tensor and the dimension to ask."""
        if self.symbols is not None:
            return self.symbols
        numbers: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for node in self.before.graph.nodes:
            if node is self.before:
                break
            value = fake_value(node)
            symbol = torch_api.bare_symbol(value)
            if symbol is not None:
                numbers.setdefault(symbol, node)
            elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
                for dim, size in enumerate(value.shape):
                    if (symbol := torch_api.bare_symbol(size)) is not None:
                        tensors.setdefault(symbol, (node, dim))
        self.symbols = {**tensors, **numbers}
        return self.symbols
