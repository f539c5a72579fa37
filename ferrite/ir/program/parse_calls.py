"""Read the call of an operator, and the lists of names that other operations share with it."""

from __future__ import annotations

import ast

from ferrite.ir.index.algebra import Symbol
from ferrite.ir.program import arguments as host
from ferrite.ir.program.nodes import Call, CallArgument
from ferrite.ir.program.read import Reader

Results = tuple[str | Symbol | None, ...]


class CallReader(Reader):
    def operator_call(self, node: ast.AST) -> Call:
        if not isinstance(node, ast.Call) or self.call(node, "call(...)")[0] != "call":
            raise self.unexpected(node, "call(...)")
        parts = self.bound(node, "operator args", "kwargs results packed writes aliases effect reason")
        operator = parts["operator"]
        return Call(
            self.literal(operator, str, "an operator")
            if isinstance(operator, ast.Constant)
            else self.operator(operator),
            tuple(map(self.argument, self.items(parts["args"]))),
            self.keywords(parts.get("kwargs")),
            self.result_names(parts.get("results")),
            self.literal(parts["packed"], bool, "True or False") if "packed" in parts else False,
            self.names(parts.get("writes")),
            self.pairs(parts.get("aliases")),
            self.literal(parts["effect"], str, "a name in quotes") if "effect" in parts else None,
            self.literal(parts["reason"], str, "a reason in quotes") if "reason" in parts else "",
        )

    def operator(self, node: ast.expr) -> host.Constant:
        found = self.argument(node)
        if isinstance(found, host.Constant):
            return found
        raise self.unexpected(node, "an operator in quotes, or constant('name')")

    def keywords(self, node: ast.expr | None) -> tuple[tuple[str, CallArgument], ...]:
        if node is None:
            return ()
        if not isinstance(node, ast.Dict):
            raise self.unexpected(node, "{'name': value}")
        names = [self.literal(key or node, str, "a name in quotes") for key in node.keys]
        return tuple(zip(names, map(self.argument, node.values), strict=True))

    def names(self, node: ast.expr | None) -> tuple[str, ...]:
        return () if node is None else tuple(map(self.name, self.items(node)))

    def pairs(self, node: ast.expr | None) -> tuple[tuple[str, str], ...]:
        found = []
        for item in [] if node is None else self.items(node):
            if not isinstance(item, ast.Tuple) or len(item.elts) != 2:
                raise self.unexpected(item, "(result, buffer)")
            found.append((self.name(item.elts[0]), self.name(item.elts[1])))
        return tuple(found)

    def result_names(self, node: ast.expr | None) -> Results:
        found: list[str | Symbol | None] = []
        for item in [] if node is None else self.items(node):
            missing = isinstance(item, ast.Constant) and item.value is None
            name = "" if missing else self.name(item, "a buffer, a symbol or None")
            found.append(None if missing else self.symbols.get(name, name))
        return tuple(found)
