"""The laws of the text of a host program, checked for every one before it may run.

H1  a name is read only after it is bound, on every path there, and not after it is freed
H2  a name that the function does not bind is a function of the text, an object of the graph, or one of the helpers
H3  only bound names are freed

The text itself is looked at, not what it was printed from: a mistake of any stage that wrote a part of it shows here,
as a reason to run the graph in eager, and not in the middle of a call. Lines are those that
`ferrite.codegen.host.printer` prints, so words are enough to tell what is bound and what is read; Python's own parser
would take ten times as long.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Sequence

from ferrite.codegen.host.pieces import NAME
from ferrite.codegen.host.source import HostSource
from ferrite.ir import InvalidProgram

# What the runtime puts beside a host program (`ferrite.runtime.host_program`).
HELPERS = {"empty_on_cpu", "empty_on_cuda", "empty_strided", "laid_out", "large_on_cpu", "taken_over", "view_of"}
HELPERS |= {
    "arena_on_cuda",
    "arena_on_first_cuda",
    "begin_of",
    "empty_on_first_cuda",
    "end_of",
    "from_pool",
    "in_eager",
    "inf",
    "is_recording",
    "leaves",
    "nan",
    "random_state",
    "repeat",
    "saved",
    "stream_of",
    "threads",
    "torch",
    "untracked_view",
}
WORDS = frozenset(["and", "else", "if", "in", "is", "not", "or", "raise", "return"])
TARGETS = re.compile(r"([\w\s,()\[\]*]+?) = (?!=)")


def verify_host(source: HostSource, objects: Iterable[str]) -> HostSource:
    """The source itself, if its text keeps every law; linear in it. `objects`: names of constants and the like."""
    lines = source.text.split("\n")
    known = {*HELPERS, *WORDS, *dir(builtins), *source.operators, *objects}
    known.update(line[4 : line.index("(")] for line in lines if line.startswith("def "))
    numbered: dict[str, Sequence[object]] = {"run": source.runs, "interpret": source.programs}
    numbered |= {"scalar": source.scalars, "recorded": source.parts}
    for name, many in numbered.items():
        known.update(f"{name}_{number}" for number in range(len(many)))
    check = _Check(known)
    for line in lines:
        check.line(line)
    return source


class _Check:
    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.bound: set[str] = set()
        self.freed: set[str] = set()

    def line(self, line: str) -> None:
        if line.startswith("def "):
            self.bound, self.freed = {"args"}, set()
            return
        text = line.strip()
        if text.startswith("#"):
            return
        if text.startswith("if ") and (place := text.find(": ")) > 0:  # what follows may not happen
            self.reads(text[:place], line)
            before = set(self.bound)
            self.statement(text[place + 2 :], line)
            self.bound &= before
            return
        for statement in text.removesuffix(":").split("; "):
            self.statement(statement, line)

    def statement(self, text: str, line: str) -> None:
        if text.startswith("del "):
            for name in text[4:].split(", "):
                if name not in self.bound:
                    raise InvalidProgram("H3", f"{name} is freed, but not bound, in {line.strip()!r}")
                self.bound.remove(name)
                self.freed.add(name)
            return
        found = TARGETS.match(text)
        self.reads(text[found.end() :] if found else text, line)
        if found:
            names = set(NAME.findall(found[1]))
            self.bound |= names
            self.freed -= names

    def reads(self, text: str, line: str) -> None:
        for name in NAME.findall(text):
            if name in self.bound or not name:
                continue
            if name in self.freed:
                raise InvalidProgram("H1", f"{name} is read after it is freed, in {line.strip()!r}")
            if name not in self.known:
                raise InvalidProgram("H2", f"{name} is read, but not bound, in {line.strip()!r}")
