"""A scalar expression in one line, for messages and for the text of what an index reads from memory."""

from __future__ import annotations

from collections import Counter

from ferrite.ir.expr import Cast, Const, Data, Expr, Op, complaint_text, indices_of, nodes_of
from ferrite.ir.program.spelling import index_text, node_text
from ferrite.ir.scalar import OPERATORS
from ferrite.ir.types import short


def expression_text(expr: Expr) -> str:
    """What is used more than once is named where it stands first: `add((_0 := sin(x[i])), _0)`."""
    return _OneLine(expr).text(expr)


class _OneLine:
    def __init__(self, root: Expr) -> None:
        self.uses: Counter[Expr] = Counter()
        for item in nodes_of(root):
            self.uses.update(item.args)
            for index in indices_of(item):
                index_text(index, self.count)
        self.names: dict[Expr, str] = {}

    def count(self, atom: Data) -> str:
        self.uses[atom.value] += 1
        return ""

    def text(self, root: Expr) -> str:
        """Parts from left to right, without recursion: expressions may be deep."""
        pieces: list[str] = []
        stack: list[str | Expr] = [root]
        while stack:
            part = stack.pop()
            if isinstance(part, str):
                pieces.append(part)
            elif part in self.names:
                pieces.append(self.names[part])
            else:
                stack.extend(reversed(self.parts(part)))
        return "".join(pieces)

    def parts(self, item: Expr) -> list[str | Expr]:
        """The text of a node, with its operands as they are."""
        operands: list[Expr] = []

        def later(operand: Expr) -> str:
            operands.append(operand)
            return "\0"

        text = node_text(item, later, lambda index: index_text(index, self.data))
        pieces = text.split("\0")
        parts: list[str | Expr] = [f"{short(item.dtype)}." if gives_any_type(item) else "", pieces[0]]
        for operand, piece in zip(operands, pieces[1:], strict=True):
            parts += [operand, piece]
        if self.uses[item] > 1 and not isinstance(item, Const):
            self.names[item] = name = f"_{len(self.names)}"
            parts = [f"({name} := ", *parts, ")"]
        return parts

    def data(self, atom: Data) -> str:
        return f"data({self.text(atom.value)}, {index_text(atom.extent, self.data)}{complaint_text(atom.complaint)})"


def gives_any_type(item: Expr) -> bool:
    """Whether operands do not tell the type of the result."""
    return isinstance(item, Cast) or (
        isinstance(item, Op) and item.name in OPERATORS and OPERATORS[item.name].gives == "free"
    )
