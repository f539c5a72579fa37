"""Attention as text, in programs and in kernels:

    with attention(axes(b=2, h=4), group(g=1), rows(m=300), keys(n=300), over(d=64), columns(e=64),
                   entries(j0=3), sides=[128, 128]):
        v0: bf16 = q[b, h, m, d]
        ...
        key_blocks(v7, v8, whole=True)
        out[b, h, m, e], lse[b, h, m], _ = attended(v0, v1, v2, v4, v6)

Behind `attended` stand query, key, value, score, and whether it is allowed; behind `attended_gradients` also the
gradient of the result, the logarithm, what is subtracted, and the gradient of the sum of products. Each list of blocks
has one of the entries, in their order.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ferrite.ir.expr import Expr
from ferrite.ir.index.algebra import Axis, axis
from ferrite.ir.program.loop_operations import Attention, BlockList, Destination, Gradients
from ferrite.ir.program.read import Reader
from ferrite.ir.program.spelling import Values

FORWARD, BACKWARD = "attended", "attended_gradients"
LISTS = ("key_blocks", "row_blocks")
PARTS = ("axes", "group", "rows", "keys", "over", "columns")


def attention_text(operation: Attention, values: Values) -> tuple[str, list[str]]:
    """The head of its block, and the lines inside."""
    axes = [operation.axes, *([each] for each in operation.all_axes[len(operation.axes) :][: len(PARTS) - 1])]
    head = [f"{word}({_axes_text(some)})" for word, some in zip(PARTS, axes, strict=True)]
    if operation.lists:
        head.append(f"entries({_axes_text([each.entry for each in operation.lists])})")
        head.append(f"sides={list(operation.block_sides)}")
    values.declare(*operation.values)
    lists = [
        f"{word}({values.value(each.count)}, {values.value(each.place)}{', whole=True' if each.whole else ''})"
        for word, some in zip(LISTS, (operation.key_blocks, operation.row_blocks), strict=True)
        for each in some
    ]
    given = operation.values[: len(operation.values) - 2 * len(operation.lists)]
    right = f"{BACKWARD if operation.gradients else FORWARD}({', '.join(map(values.value, given))})"
    left = ", ".join(
        "_" if each is None else values.element(each.buffer, each.coordinates) for each in operation.destinations
    )
    return f"attention({', '.join(head)})", [*values.take(), *lists, f"{left} = {right}"]


def _axes_text(axes: Sequence[Axis]) -> str:
    return ", ".join(f"{each.name}={each.extent}" for each in axes)


class AttentionReader(Reader):
    def attention(self, node: ast.Call, body: list[ast.stmt]) -> Attention:
        word, args, keywords = self.call(node, "attention(...)")
        words = [self.call(arg, "axes by name")[0] for arg in args]
        shape = f"attention({', '.join(f'{part}(name=extent)' for part in PARTS)}, entries(), sides=[])"
        if word != "attention" or tuple(words[: len(PARTS)]) != PARTS or words[len(PARTS) :] not in ([], ["entries"]):
            raise self.unexpected(node, shape)
        opened = [self.opened(arg) for arg in args]
        if any(len(some) != 1 for some in opened[1 : len(PARTS)]):
            raise self.unexpected(node, shape)
        entries = opened[len(PARTS)] if len(opened) > len(PARTS) else ()
        sides = (0, 0)
        if "sides" in keywords:
            rows, keys = (self.literal(each, int, "a number") for each in self.items(keywords["sides"]))
            sides = rows, keys
        lists: dict[str, list[BlockList]] = {name: [] for name in LISTS}
        waiting = list(entries)
        *before, last = body
        for statement in before:
            match statement:
                case ast.AnnAssign():
                    self.declare(statement)
                case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name in LISTS and waiting:
                    parts = self.bound(call, "count place", "whole")
                    whole = "whole" in parts and self.literal(parts["whole"], bool, "True or False")
                    found = BlockList(waiting.pop(0), self.value(parts["count"]), self.value(parts["place"]), whole)
                    lists[name].append(found)
                case _:
                    raise self.unexpected(statement, "a value, or a list of blocks for each of the entries")
        given, destinations, backward = self.attended(last)
        if waiting or len(given) != (9 if backward else 5):
            raise self.unexpected(last, f"{FORWARD}(query, key, value, score, allowed), behind a list for each entry")
        group, rows, keys, summed, columns = (some[0] for some in opened[1 : len(PARTS)])
        query, key, value, score, allowed = given[:5]
        return Attention(
            opened[0],
            group,
            rows,
            keys,
            summed,
            columns,
            query,
            key,
            value,
            score,
            allowed,
            destinations=destinations,
            block_sides=sides,
            key_blocks=tuple(lists[LISTS[0]]),
            row_blocks=tuple(lists[LISTS[1]]),
            gradients=Gradients(*given[5:]) if backward else None,
        )

    def opened(self, node: ast.expr) -> tuple[Axis, ...]:
        """`rows(m=8)`: axes in scope from here."""
        _, args, extents = self.call(node, "axes by name")
        if args:
            raise self.unexpected(node, "name=extent")
        found = tuple(axis(name, self.index(extent)) for name, extent in extents.items())
        self.axes.update({each.name: each for each in found})
        return found

    def attended(self, node: ast.stmt) -> tuple[list[Expr], tuple[Destination | None, ...], bool]:
        """`out[m, e], _, _ = attended(...)`."""
        match node:
            case ast.Assign(targets=[left], value=ast.Call(func=ast.Name(id=word)) as call):
                places = left.elts if isinstance(left, ast.Tuple) else [left]
                if word in (FORWARD, BACKWARD):
                    found = tuple(
                        None if isinstance(each, ast.Name) and each.id == "_" else Destination(*self.element(each))
                        for each in places
                    )
                    return list(map(self.value, call.args)), found, word == BACKWARD
        raise self.unexpected(node, f"places = {FORWARD}(...), as the last statement")
