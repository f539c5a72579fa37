"""One function while it is written: every value once, as far out as it may stand.

Code is a tree of scopes. A loop has two: what runs before it (open: code can still be added while the loop is written)
and its body. A value is written in the first open scope in which all its operands are known, or else where we are; a
value that is known already is not written again. So nothing is left for LLVM to move out of loops or to find equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Code = list[Any]  # lines, and code that is still being written


@dataclass
class Scope:
    """`writes`: the memory that the loop of a body changes. `runs`: the loop of this scope runs at least once whenever
    what stands around does."""

    depth: int
    label: str
    open: bool = False
    branch: bool = False
    writes: frozenset[str] = frozenset()
    runs: bool = True
    code: Code = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


class Function:
    """`counter` is shared by the functions of a module: a name tells where it was defined."""

    def __init__(self, counter: Iterator[int] | None = None) -> None:
        self.counter = counter or itertools.count()
        self.values_by_text: dict[str, str] = {}
        self.rank: dict[str, int] = {}  # the scope that defines a name
        self.variables: Code = []
        self.cold: Code = []
        self.captured: dict[str, tuple[str, str]] = {}  # name outside: type, name here
        self.fails = False
        self.note = ""  # behind every line: for those who read the text
        self.memory: dict[Any, Any] = {}  # tiles of its own, by the statement that asks for them
        self.stack, self.tiles = 0, 0  # bytes of tiles on the stack, and beyond it
        self.without_tiles = ""  # what is called where there is no memory for so many `bytes` beyond it
        self.scopes = [Scope(0, "entry", open=True)]
        self.push("start")

    # --- scopes -------------------------------------------------------------------------------------------------------

    @property
    def scope(self) -> Scope:
        return self.scopes[-1]

    def push(self, label: str, **rest: Any) -> Scope:
        self.scopes.append(Scope(len(self.scopes), label, **rest))
        return self.scopes[-1]

    def pop(self) -> Scope:
        scope = self.scopes.pop()
        for key in scope.keys:
            del self.values_by_text[key]
        return scope

    def home(self, rank: int) -> Scope:
        """Where code goes that needs the values of a scope."""
        for scope in self.scopes[rank:-1]:
            if scope.open:
                return scope
        return self.scopes[-1]

    def floor(self, memory: str | None) -> int:
        """The outermost scope where what runs here may run as well: it runs there only if it does here, and sees the
        same memory."""
        place = len(self.scopes) - 1
        while place > 1:
            scope = self.scopes[place]
            if scope.open:
                if not scope.runs:
                    return place
            elif scope.branch or memory in scope.writes:
                return place
            place -= 1
        return place

    # --- lines --------------------------------------------------------------------------------------------------------

    def fresh(self, hint: str = "v") -> str:
        return f"%{hint}{next(self.counter)}"

    def op(self, text: str, *operands: str, floor: int = 0, key: str | None = None) -> str:
        """A value without effects. `floor`: it must not stand farther out."""
        found = self.values_by_text.get(key or text)
        if found is not None:
            return found
        rank = floor
        for operand in operands:
            at = self.rank.get(operand, 0)
            if at > rank:
                rank = at
        scope = self.home(rank)
        name = f"%v{next(self.counter)}"
        scope.code.append(f"  {name} = {text}{self.note}")
        scope.keys.append(key or text)
        self.values_by_text[key or text] = name
        self.rank[name] = scope.depth
        return name

    def define(self, text: str) -> str:
        """A value that is computed here and now."""
        name = f"%v{next(self.counter)}"
        self.scope.code.append(f"  {name} = {text}{self.note}")
        self.rank[name] = self.scope.depth
        return name

    def line(self, text: str) -> None:
        self.scope.code.append(f"  {text}{self.note}")

    def block(self, label: str, scope: Scope | None = None) -> None:
        """Begin a basic block."""
        scope = scope or self.scope
        scope.code.append(f"{label}:")
        scope.label = label

    def variable(self, type_: str) -> str:
        """Memory for a value that changes; it becomes a register."""
        name = self.fresh("m")
        self.variables.append(f"  {name} = alloca {type_}")
        self.rank[name] = 0
        return name

    def parameter(self, name: str) -> str:
        self.rank[name] = 0
        return name

    def capture(self, name: str, type_: str) -> str:
        """A value of the function around."""
        if name in self.rank:
            return name
        if name not in self.captured:
            self.captured[name] = (type_, self.parameter(self.fresh("c")))
        return self.captured[name][1]

    # --- text ---------------------------------------------------------------------------------------------------------

    def text(self, head: str) -> str:
        """The whole function; `head` is its first line without the brace."""
        entry, start = self.scopes
        lines = [head + " {", "entry:"]
        code: Code = [
            *self.variables,
            *self.memory_for_tiles(),
            *entry.code,
            "  br label %start",
            "start:",
            *start.code,
        ]
        _flatten(code, lines)
        lines.append("  br label %leave")
        _flatten(self.cold, lines)
        lines += ["leave:", *(["  call void @free(ptr %tiles)"] if self.tiles else []), "  ret void", "}"]
        return "\n".join(lines)

    def memory_for_tiles(self) -> list[str]:
        if not self.tiles:
            return []
        return [
            f"  %tiles = call noalias ptr @malloc(i64 {self.tiles})",
            "  %tiles.missing = icmp eq ptr %tiles, null",
            "  br i1 %tiles.missing, label %without_tiles, label %with_tiles",
            "without_tiles:",
            f"  {self.without_tiles.format(bytes=self.tiles)}",
            "  br label %leave",
            "with_tiles:",
        ]


def _flatten(code: Code, lines: list[str]) -> None:
    for item in code:
        if isinstance(item, str):
            lines.append(item)
        else:
            _flatten(item, lines)
