"""What a host program is, apart from how it is printed: its text with all that the text names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrite.codegen.host.recording import RecordedPart
from ferrite.codegen.host.runs import RunTable
from ferrite.errors import Refusal
from ferrite.graph import ModelLine
from ferrite.ir import Expr, Symbol
from ferrite.ir.program import Program

COMMENT_COLUMN = 72


@dataclass
class HostSource:
    """The text with all it names: operators by their paths, runs as tables, small programs that the interpreter runs,
    expressions over symbols, parts that a GPU records. `lines`: where lines of the text come from in the model, by
    their places. `bytecode`: the text compiled by this version of Python, where that is known. `not_recorded`: why
    other steps are in no part, where parts were asked for."""

    function: str
    text: str = ""
    lines: dict[int, ModelLine] = field(default_factory=dict)
    operators: dict[str, str] = field(default_factory=dict)
    runs: list[RunTable] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    scalars: list[tuple[Expr, tuple[Symbol, ...]]] = field(default_factory=list)
    bytecode: bytes = b""
    checked: bool = False
    parts: list[RecordedPart] = field(default_factory=list)
    not_recorded: tuple[Refusal, ...] = ()

    @functools.cached_property
    def commented(self) -> str:
        """The text with the lines of the model beside it, once both are complete."""
        rows = self.text.split("\n")
        for place, line in self.lines.items():
            rows[place] = f"{rows[place]:<{COMMENT_COLUMN}}  # {line}"
        return "\n".join(rows)


@dataclass(frozen=True)
class Executable:
    """A plan as text and object code. `kernels`: the name of each, by its number, and what it says where a check of it
    fails. `code`: object code by name, the driver's too."""

    source: HostSource
    kernels: tuple[tuple[str, tuple[str, ...]], ...]
    code: Mapping[str, bytes]
