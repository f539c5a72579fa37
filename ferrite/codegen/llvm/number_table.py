"""Coefficients in memory, for machines whose multiply-add destroys the addend.

There a coefficient in a register has to be copied before every use, and copies compete with arithmetic; a load does
not. The loads are volatile, or LLVM would do each once and copy again.
"""

from __future__ import annotations

import re

from ferrite.codegen.llvm.types import BYTES

Numbers = dict[str, dict[str, int]]  # by type: each number, and its place in the table
REGISTER_BYTES = 16
ADDED = re.compile(
    r"  (?P<name>%\S+) = (?P<call>call <(?P<lanes>\d+) x (?P<element>float|double)> @llvm\.fma\.\S+\(.*> )"
    r"splat \((?:float|double) (?P<number>\S+)\)\)"
)


def with_numbers_in_memory(tables: Numbers, text: str) -> str:
    """The text of a function of vectors, its added numbers loaded from a table."""
    lines = []
    for line in text.splitlines():
        found = ADDED.fullmatch(line)
        lines += [line] if found is None else _loaded(tables, found)
    return "\n".join(lines)


def _loaded(tables: Numbers, found: re.Match[str]) -> list[str]:
    name, element, lanes = found["name"], found["element"], int(found["lanes"])
    size = REGISTER_BYTES // BYTES[element]
    numbers = tables.setdefault(element, {})
    place = numbers.setdefault(found["number"], len(numbers))
    row, wide, order = f"<{size} x {element}>", f"{name}.wide", ", ".join(f"i32 {lane % size}" for lane in range(lanes))
    at = f"getelementptr (i8, ptr @ferrite_{element}s, i64 {REGISTER_BYTES * place})"
    return [
        f"  {name}.row = load volatile {row}, ptr {at}, align {REGISTER_BYTES}",
        f"  {wide} = shufflevector {row} {name}.row, {row} poison, <{lanes} x i32> <{order}>",
        f"  {name} = {found['call']}{wide})",
    ]


def table_texts(tables: Numbers) -> list[str]:
    made = []
    for element, numbers in tables.items():
        row = f"<{REGISTER_BYTES // BYTES[element]} x {element}>"
        rows = ", ".join(f"{row} splat ({element} {number})" for number in numbers)
        made.append(f"@ferrite_{element}s = internal global [{len(numbers)} x {row}] [{rows}], align {REGISTER_BYTES}")
    return made
