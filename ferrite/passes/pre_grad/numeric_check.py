"""The option `check_numerics`: did the stage change what the graph computes?

    options={"check_numerics": ["raise"]}                          a difference is an error
    options={"check_numerics": {"warn": {"inputs": "random"}}}     a warning, on random inputs
    options={"check_numerics": {"bisect": {"steps": 3}}}           the pass is found and named, graphs are kept

The graph as it was, the graph as it is, and the first one in float64 run on copies (see `numeric_runs`). The check
never runs on the user's tensors; the random generators are left as they were.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ferrite.errors import CompilerBug, layout, warn_user
from ferrite.options import Options, at_least, check_choices, settings_of
from ferrite.passes.pre_grad.numeric_runs import Maker, Observed, Tolerance, run_graph, unlike
from ferrite.pipeline import Fuel, PassContext, PassRecord, Pipeline, run_pipeline

Keep = Callable[[Mapping[str, torch.fx.GraphModule]], str | None]  # writes graphs down; where


@dataclass(frozen=True)
class NumericCheck:
    """`inputs`: copies of those that the compiler was called with, or random ones of the same looks."""

    inputs: Literal["captured", "random"] = "captured"
    steps: int = at_least(1, 1)
    rtol: float = at_least(0, 0.0)  # beside what the float64 run allows
    atol: float = at_least(0, 0.0)
    gradients: bool = True


# What a difference does.
REACTIONS = {"raise": NumericCheck, "warn": NumericCheck, "bisect": NumericCheck}


class Mismatch(Exception):
    """Two graphs that should compute the same do not."""


def check_settings(options: Options) -> None:
    check_choices("check_numerics", options.check_numerics, REACTIONS, "reaction")


@contextlib.contextmanager
def numerics_checked(
    pipeline: Pipeline,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    context: PassContext,
    keep: Keep | None = None,
) -> Iterator[None]:
    """Compare a graph that passes edit inside with what it was before, as the options ask. Its nodes have values."""
    if not context.options.check_numerics:
        yield
        return
    check_settings(context.options)
    try:
        check = Check(pipeline, copy.deepcopy(gm), example_inputs, context)
    except Exception as problem:
        warn("the numeric check was not made", {"because": f"the graph cannot be copied: {problem}"})
        yield
        return
    yield
    for choice in context.options.check_numerics:
        check.react(choice.name, gm, keep)


@dataclass
class Check:
    """A graph before the passes, and what is needed to run it."""

    pipeline: Pipeline
    before: torch.fx.GraphModule
    example_inputs: Sequence[Any]
    context: PassContext
    truths: dict[int, tuple[Observed, Observed | None]] = field(default_factory=dict)

    def react(self, reaction: str, gm: torch.fx.GraphModule, keep: Keep | None) -> None:
        settings = settings_of(self.context.options.check_numerics, reaction, NumericCheck)
        self.truths.clear()
        try:
            self.run_before(settings)
        except Exception as problem:
            warn("the numeric check was not made", {"because": f"{type(problem).__name__}: {problem}"})
            return
        difference = self.difference(gm, settings)
        if difference is None:
            return
        facts: dict[str, str | None] = {"difference": difference, "to run without": 'options={"pre_grad": False}'}
        if reaction == "warn":
            warn("the pre-grad passes changed what the graph computes", facts)
            return
        if reaction == "bisect":
            facts = {**self.first_bad(settings, keep), **facts}
        raise CompilerBug(
            "the pre-grad passes changed what the graph computes", facts, stage="pre_grad", cause=Mismatch(difference)
        )

    def run_before(self, settings: NumericCheck) -> None:
        """The graph as it was, once per step, and in float64 where that can be."""
        for step in range(settings.steps):
            outcome = self.run(self.before, settings, step)
            truth: Observed | None = None
            with contextlib.suppress(Exception):  # some operators know no float64, and random numbers would differ
                truth = self.run(self.before, settings, step, wide=True) if not outcome.random else None
            self.truths[step] = (outcome, truth)

    def run(self, gm: torch.fx.GraphModule, settings: NumericCheck, step: int, *, wide: bool = False) -> Observed:
        maker = Maker(self.before.graph, self.example_inputs, settings.inputs == "random", wide)
        gradients = settings.gradients and not self.context.is_inference
        return run_graph(gm, maker, step, grad=not self.context.is_inference, gradients=gradients)

    def difference(self, gm: torch.fx.GraphModule, settings: NumericCheck) -> str | None:
        """How a graph differs from the one before the passes; None if it computes the same."""
        for step, (before, truth) in self.truths.items():
            try:
                after = self.run(gm, settings, step)
            except Exception as problem:
                return f"the new graph fails: {type(problem).__name__}: {problem}"
            tolerance = Tolerance(settings.rtol, settings.atol, values=not self.redrawn(gm))
            found = unlike(before, after, truth, tolerance)
            if found is not None:
                return found
        return None

    def redrawn(self, gm: torch.fx.GraphModule) -> bool:
        """Whether a rule fired that draws other random numbers: then values say nothing."""
        rules = (rule for step in self.pipeline.passes for rule in step.rules)
        drawing = {rule.name for rule in rules if rule.numerics == "redrawn"}
        return any(node.meta.get("rewritten", ("",))[0] in drawing for node in gm.graph.nodes)

    def first_bad(self, settings: NumericCheck, keep: Keep | None) -> dict[str, str | None]:
        """Run the passes again, and stop behind the first that changes what the graph computes."""
        gm = copy.deepcopy(self.before)
        last = [copy.deepcopy(gm)]  # as it was when it still computed the same
        guilty: list[PassRecord] = []

        def look(record: PassRecord, now: torch.fx.GraphModule) -> None:
            if guilty or str(now.graph) == str(last[0].graph):  # another spelling counts, though it is no rewrite
                return
            if self.difference(now, settings) is not None:
                guilty.append(record)
                last.append(copy.deepcopy(now))
            else:
                last[0] = copy.deepcopy(now)

        options = self.context.options
        run_pipeline(self.pipeline, gm, PassContext(options, self.context.is_inference, Fuel(options.fuel)), None, look)
        if not guilty:
            return {"in the pass": "unknown: run again, pass by pass, the graph is right"}
        (record,) = guilty
        graphs = {f"before_{record.name}": last[0], f"after_{record.name}": last[1]}
        rules = ", ".join(f"{name} ({count})" for name, count in record.rewrites.items())
        return {
            "in the pass": record.name,
            "it rewrote": rules,
            "kept": keep(graphs) if keep is not None else None,
            "to leave it out": f'options={{"skip": ["{record.name}"]}}',
        }


def warn(headline: str, facts: dict[str, str | None]) -> None:
    warn_user(layout(f"ferrite: {headline}", facts))
