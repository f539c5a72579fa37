"""Halving: which graph, which stage, which pass, which rewrite, which operator or which fusion is to blame.

    graphs      in the order in which they are captured; the others run in eager
    stages      each with those before it: capture, pre_grad, joint, freeze, post_grad, lower, schedule
    passes      of a stage of passes, in their order; then their rewrites, by fuel
    operators   that are lowered to kernels, by fuel, while the others are eager calls: which kernel
    steps       of the schedule, by fuel: which fusion, or which reuse of memory

A check is taken for one that goes on failing once it does: what is found is where it first failed, and is tried both
ways before it is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ferrite.diagnosis.bisect.dumps import what_changed
from ferrite.diagnosis.bisect.finding import Finding
from ferrite.diagnosis.bisect.folder import keep
from ferrite.diagnosis.bisect.probe import Check, Prober, TryResult
from ferrite.diagnosis.bisect.shrink import Small, shrunk
from ferrite.diagnosis.bisect.sources import check_source
from ferrite.errors import FerriteError, UserError
from ferrite.passes import PIPELINES

PASSES = ("pre_grad", "joint", "freeze", "post_grad")
RUNGS = ("capture", *PASSES, "lower", "schedule")
MIN_SLOWNESS = 1.2  # times eager's seconds: less cannot be told from noise
UNLIMITED_FUEL = 10**9
NOTHING: Mapping[str, Any] = {"line": "", "passes": [], "kernels": [], "spent": {}, "skip": [], "freeze": False}


class NothingFound(FerriteError):
    """The check does not fail, or fails in eager too."""


def bisect(
    check: Check,
    *,
    folder: Path,
    seconds: float = 600.0,
    tell: Callable[[str], None] = lambda text: None,
    setup: str = "",
) -> Finding:
    """Find what makes a check fail; raises NothingFound where nothing does. `folder`: where to keep what was found.
    `setup`: a module or file that has to be loaded before a graph can run (operators of one's own)."""
    return Search(Prober(check, seconds), tell).run(folder, setup)


class Search:
    def __init__(self, prober: Prober, tell: Callable[[str], None]) -> None:
        self.prober, self.tell = prober, tell
        self.base: dict[str, Any] = {}
        self.limit = 0.0  # seconds beyond which it is slow; the first ones are what others are held against
        self.known: dict[str, TryResult] = {}
        self.number = 0  # of the graph to blame

    # --- tries --------------------------------------------------------------------------------------------------------

    def outcome(self, **settings: Any) -> TryResult:
        wanted = {**self.base, **settings}
        key = repr(sorted(wanted.items()))
        if key not in self.known:
            self.known[key] = self.prober.run(wanted, limit=self.limit)
        return self.known[key]

    def fails(self, **settings: Any) -> bool:
        """Whether it fails in the way that is looked for: another failure is another story."""
        found = self.outcome(**settings)
        bad = self.is_bad(found)
        shown = ", ".join(f"{name}={value}" for name, value in settings.items())
        self.tell(f"{'fails' if bad else 'good ':5}  {shown[:100]}")
        return bad

    def is_bad(self, found: TryResult) -> bool:
        if self.symptom.kind == "slow":
            return found.kind == "good" and found.cost is not None and found.cost > self.limit
        return found.kind == self.symptom.kind

    # --- the whole ----------------------------------------------------------------------------------------------------

    def run(self, folder: Path, setup: str) -> Finding:
        self.symptom = self.first_look()
        if self.symptom.kind != "slow":
            self.limit = math.inf
        self.tell(f"{self.symptom.kind}: {self.symptom.about}")
        self.number = number = self.graph()
        rungs = self.rungs()
        stage = rungs[first_bad(len(rungs) - 1, lambda k: self.fails(**self.up_to(rungs[k])))]
        self.tell(f"stage {stage}")
        finding = Finding(self.symptom.kind, self.symptom.about, number, stage, line=self.about_graph()["line"])
        if stage in PASSES:
            finding = self.blame_pass(finding)
        elif stage == "lower":
            finding = self.blame_operator(finding)
        elif stage == "schedule":
            finding = self.blame_step(finding)
        self.tell(finding.name)
        small = self.shrink(finding, setup)
        if small is not None and stage == "lower" and finding.kind == "wrong":
            finding = replace(finding, about=f"{finding.about}; {self.lowered_or_generated(small)}")
        finding = replace(finding, small=small, tries=self.prober.count)
        return replace(finding, folder=keep(finding, folder, setup))

    def first_look(self) -> TryResult:
        """How it fails."""
        eager = self.outcome(graphs="none")
        if eager.kind != "good":
            raise NothingFound(
                "the check fails without ferrite too",
                {"in eager": f"{eager.kind}: {eager.about}", "it printed": eager.printed.strip() or None},
            )
        found = self.outcome()
        if found.kind == "good" and found.failures:
            self.base["strict"] = True  # a stage failed, and the graph ran in eager
            found = self.outcome()
        if found.kind == "error":
            self.base["strict"] = True
        if found.kind == "good" and found.cost is not None and eager.cost is not None:
            if found.cost > MIN_SLOWNESS * eager.cost:
                self.limit = math.sqrt(found.cost * eager.cost)
                about = f"{found.cost * 1e3:.2f} ms, eager {eager.cost * 1e3:.2f} ms"
                return replace(found, kind="slow", about=about)
            raise NothingFound(
                "it is not slower than eager",
                {"compiled": f"{found.cost * 1e3:.2f} ms", "eager": f"{eager.cost * 1e3:.2f} ms"},
            )
        if found.kind == "good":
            compiled = f"{len(found.compiles)} graphs were compiled" if found.compiles else "nothing was compiled"
            raise NothingFound("the check passes", {"with ferrite": compiled})
        if not found.compiles:
            raise UserError("the check fails before anything is compiled", {"because": found.about})
        return found

    def graph(self) -> int:
        """The graph to blame; from here on it alone is compiled, if it fails alone."""
        count = len(self.symptom.compiles)
        if count > 1:
            number = first_bad(count, lambda k: self.fails(graphs=f"0-{k - 1}")) - 1
            alone = self.fails(graphs=str(number))
            self.base["graphs"] = str(number) if alone else f"0-{number}"
            self.tell(f"graph {number} of {count}" + ("" if alone else ", with those before it"))
            return number
        return 0

    def about_graph(self, **settings: Any) -> Mapping[str, Any]:
        """What was compiled of the graph in question."""
        return self.outcome(**settings).compiles.get(self.number, NOTHING)

    def rungs(self) -> list[str]:
        about = self.about_graph()
        left_out = {"freeze"} if not about["freeze"] else set()
        if about.get("executor", "native") != "native":
            left_out |= {"lower", "schedule"}
        return [rung for rung in RUNGS if rung not in left_out]

    def up_to(self, stage: str) -> dict[str, Any]:
        """Options for a compiler that goes no farther than a stage. What is not lowered is called, but for the same
        device: rules that look at it fire as they do."""
        place = RUNGS.index(stage)
        settings: dict[str, Any] = {name: False for name in PASSES if RUNGS.index(name) > place}
        if stage == "lower":
            return {"fuel": 0, "fuel_stage": "schedule"}
        return settings if stage == "schedule" else {**settings, "fuel": 0, "fuel_stage": "lower"}

    # --- one stage ----------------------------------------------------------------------------------------------------

    def blame_pass(self, finding: Finding) -> Finding:
        own = {step.name for pipeline in PIPELINES if pipeline.name == finding.stage for step in pipeline.passes}
        others = {step.name for pipeline in PIPELINES for step in pipeline.passes} - own
        about = self.about_graph()
        ran = [each for each in about["passes"] if each["ran"] and each["name"].rpartition("/")[2] not in others]
        likely = [each["name"].rpartition("/")[2] for each in ran if each["changed"] or each["name"] not in own]
        everything = [each["name"].rpartition("/")[2] for each in ran]
        for names in (unique(likely), unique(everything)):
            if not names or self.fails(skip=skipped(names, about)):
                continue  # all of these left out, and it still fails: it is another one
            place = first_bad(len(names), lambda k: self.fails(skip=skipped(names[k:], about)))  # noqa: B023
            part = names[place - 1]
            avoid = {"skip": skipped([part], about)}
            return self.blame_rewrite(replace(finding, part=part, avoid=avoid))
        return replace(finding, part="a pass that cannot be left out", avoid={finding.stage: False})

    def blame_rewrite(self, finding: Finding) -> Finding:
        """The rule, and the graph before and after it."""
        stage = finding.stage
        spent = self.about_graph(fuel=UNLIMITED_FUEL, fuel_stage=stage)["spent"].get(stage, 0)
        if not spent or self.fails(fuel=0, fuel_stage=stage):
            return finding  # it does not count what it does
        number = first_bad(spent, lambda k: self.fails(fuel=k, fuel_stage=stage))
        before, after = (self.rewrites(finding.part, fuel=k, fuel_stage=stage) for k in (number - 1, number))
        rule = next((name for name, count in after.items() if count > before.get(name, 0)), "")
        changed = what_changed(self.prober, self.base, stage, number)
        return replace(finding, rule=rule if rule != finding.part else "", changed=changed)

    def rewrites(self, part: str, **settings: Any) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in self.about_graph(**settings)["passes"]:
            if each["name"].rpartition("/")[2] == part:
                for name, count in each["rewrites"].items():
                    found[name] = found.get(name, 0) + count
        return found

    def blame_operator(self, finding: Finding) -> Finding:
        avoid = {"executor": "calls"}
        spent = self.about_graph(fuel=UNLIMITED_FUEL, fuel_stage="lower")["spent"].get("lower", 0)
        if not spent or self.fails(fuel=0, fuel_stage="lower"):
            return replace(finding, part="calls", avoid=avoid)
        number = first_bad(spent, lambda k: self.fails(fuel=k, fuel_stage="lower"))
        before = {
            name
            for kernel in self.about_graph(fuel=number - 1, fuel_stage="lower")["kernels"]
            for name in kernel["operators"]
        }
        kernels = self.about_graph(fuel=number, fuel_stage="lower")["kernels"]
        kernel = next((each for each in kernels if not before.issuperset(each["operators"])), None)
        if kernel is None:  # it crashed before its record was complete
            kernel = next(
                iter(self.about_graph()["kernels"]), {"name": f"operator {number}", "operators": [], "lines": []}
            )
        new = [name for name in kernel["operators"] if name not in before]
        line = next(iter(kernel["lines"]), finding.line)
        return replace(
            finding, part=f"kernel {kernel['name']}", about=f"computes {', '.join(new)}", line=line, avoid=avoid
        )

    def blame_step(self, finding: Finding) -> Finding:
        spent = self.about_graph(fuel=UNLIMITED_FUEL, fuel_stage="schedule")["spent"].get("schedule", 0)
        if not spent or not self.fails(fuel=spent, fuel_stage="schedule"):
            return replace(finding, part="what no fuel counts", avoid={"fuel": spent, "fuel_stage": "schedule"})
        number = first_bad(spent, lambda k: self.fails(fuel=k, fuel_stage="schedule"))
        changed = what_changed(self.prober, self.base, "schedule", number)
        avoid = {"fuel": number - 1, "fuel_stage": "schedule"}
        step = changed.step if changed is not None else f"step {number}"
        about = changed.summary if changed is not None else ""
        return replace(finding, part=step, about=about, avoid=avoid, changed=changed)

    def lowered_or_generated(self, small: Small) -> str:
        """Which half of the way is wrong: the interpreter runs the loop program that a kernel is made of."""
        settings = {name: value for name, value in self.base.items() if name != "graphs"}
        found = self.prober.run({**settings, "executor": "interpreter"}, check_source(small.text, small.about))
        return "its loop program is wrong" if self.is_bad(found) else "its loop program is right, its code is not"

    # --- the smallest graph -------------------------------------------------------------------------------------------

    def shrink(self, finding: Finding, setup: str) -> Small | None:
        without = {**self.base, **finding.avoid}
        return shrunk(self.prober, self.base, without, self.symptom, setup, self.tell)


def first_bad(count: int, is_bad: Callable[[int], bool]) -> int:
    """The first of 1 to `count` that is bad, where `count` is.

    >>> first_bad(100, lambda place: place >= 37)
    37
    """
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(middle) else (middle, bad)
    return bad


def skipped(names: Sequence[str], about: Mapping[str, Any]) -> list[str]:
    """Passes to leave out, with those that the user leaves out anyway."""
    return unique([*about["skip"], *names])


def unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
