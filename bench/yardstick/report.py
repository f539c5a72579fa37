"""Two runs of one file side by side, as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.yardstick.reasons import KINDS
from bench.yardstick.runs import OUTCOMES, Result

LISTED = ("failed", "crashed", "hung")


@dataclass(frozen=True)
class Comparison:
    """How the tests of a file went with the backend in question and with the neutral one."""

    file: Path
    ours: Sequence[Result]
    neutral: Sequence[Result]

    def lost(self) -> list[Result]:
        """Tests that pass with the neutral backend and not with the other, the most severe first."""
        passed = {each.test for each in self.neutral if each.outcome == "passed"}
        found = [each for each in self.ours if each.outcome in LISTED and each.test in passed]
        return sorted(found, key=lambda each: KINDS.index(each.kind))

    def internals(self) -> list[Result]:
        """Tests that ask for Inductor's insides, which no other backend has."""
        return [each for each in self.ours if each.kind == "internals"]

    def by_inductor(self) -> int:
        """Tests that ran Inductor itself, by handing parts of it to its own functions."""
        return sum(each.by_inductor > 0 for each in self.ours)

    def idle(self) -> int:
        """Tests that passed without the backend being given a graph: they say nothing about it."""
        return sum(each.outcome == "passed" and each.graphs == 0 for each in self.ours)


def page(comparisons: Sequence[Comparison], backend: str, against: str, command: str) -> str:
    """The whole report."""
    lines = [f"# {backend} beside {against}", "", f"`{command}`", "", *table(comparisons, backend, against)]
    for each in comparisons:
        lines += ["", f"## {each.file.name}", "", *details(each, backend, against)]
    return "\n".join(lines) + "\n"


def table(comparisons: Sequence[Comparison], backend: str, against: str) -> list[str]:
    heads = ["file", "backend", "tests", *OUTCOMES, "passed without a graph", "ran Inductor", "lost"]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for each in comparisons:
        for name, results in ((backend, each.ours), (against, each.neutral)):
            counts = Counter(result.outcome for result in results)
            facts = [str(len(results)), *(str(counts[outcome]) for outcome in OUTCOMES)]
            facts += (
                [str(each.idle()), str(each.by_inductor()), str(len(each.lost()))] if results is each.ours else [""] * 3
            )
            rows.append("| " + " | ".join([each.file.name, name, *facts]) + " |")
    return rows


def details(each: Comparison, backend: str, against: str) -> list[str]:
    lost = each.lost()
    lines = [f"{len(lost)} tests pass with {against} and not with {backend}:", ""]
    lines += [row(result) for result in lost if result.kind != "internals"] or ["none but for what is below"]
    insides = each.internals()
    also = {result.test for result in lost}
    lines += ["", f"{len(insides)} tests ask for Inductor's insides; {against} passes those with a star:", ""]
    lines += [("* " if result.test in also else "") + row(result, "") for result in insides] or ["none"]
    return lines


def row(result: Result, mark: str = "- ") -> str:
    name = result.test.split("::", 1)[-1]
    return f"- {name} **{result.kind}** {result.reason}".replace("\n", " ") if mark else f"{name}: {result.reason}"
