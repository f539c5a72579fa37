"""The lines of the model that a report shows beside what became of them."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from ferrite.errors import ModelLine
from ferrite.reports.data import Place, SourceFile

MAX_LINES = 4000  # of one file; of a longer one, what is around the lines that are used
LINES_AROUND = 60  # of a line that is used


class SourceLines:
    """Numbers lines of the model, and reads their files."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}
        self.texts: list[str] = []

    def of(self, line: ModelLine | None) -> int:
        """-1: no line is known."""
        return -1 if line is None else self.at(line.file, line.line, line.code)

    def at(self, file: str, line: int, text: str = "") -> int:
        number = self.numbers.setdefault((file, line), len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def files(self) -> tuple[tuple[SourceFile, ...], tuple[Place, ...]]:
        used: dict[str, set[int]] = {}
        for file, line in self.numbers:
            used.setdefault(file, set()).add(line)
        found = {file: read(file, sorted(numbers)) for file, numbers in used.items()}
        known = [each for each in found.values() if each is not None]
        numbers = {each.path: number for number, each in enumerate(known)}
        places = [
            Place(numbers.get(file, -1), line, text or linecache.getline(file, line).strip())
            for (file, line), text in zip(self.numbers, self.texts, strict=True)
        ]
        return tuple(known), tuple(places)


def read(file: str, used: Sequence[int]) -> SourceFile | None:
    lines = [line.rstrip("\n") for line in linecache.getlines(file)]
    if not lines:
        return None
    first, last = 1, len(lines)
    if len(lines) > MAX_LINES:
        first, last = max(1, used[0] - LINES_AROUND), min(len(lines), used[-1] + LINES_AROUND, used[0] + MAX_LINES)
    return SourceFile(file, first, tuple(lines[first - 1 : last]), tuple(used))
