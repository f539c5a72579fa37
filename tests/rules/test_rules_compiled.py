"""Every rule and every pass fires in a program that a user could write, compiled as users compile it.

Each program goes through `torch.compile(..., backend="ferrite", fullgraph=True)` with `strict`; the record says what
fired, and everything that can be seen of the results is eager's. A rule or pass without a program fails the first test.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ferrite
from ferrite.passes import PIPELINES, all_rules
from ferrite.pipeline import PassRecord
from tests.compare import assert_same_as_eager, compile_strict
from tests.rule_programs import EXCEPT, NEAR_MISSES, PASS_OF, PROGRAMS, Program

IN_ORDER = [(pipeline.name, step.name) for pipeline in PIPELINES for step in pipeline.passes]


def fired(record: Any) -> set[str]:
    """Rules by their names, passes as `stage/name`: what the record says has changed a graph."""
    found = set(record.rewrites)
    for stage, steps in record.passes.items():
        found |= {f"{stage}/{step.name}" for step in steps if did_something(step)}
    for graph in record.graphs:
        found |= set(passes_of_graph(graph.passes))
    return found


def did_something(step: PassRecord) -> bool:
    return step.changed or bool(step.facts)


def passes_of_graph(steps: tuple[PassRecord, ...]) -> Iterator[str]:
    """A graph lists the passes of all its stages one after the other, and two stages may have one of a name."""
    place = 0
    for step in steps:
        name = step.name.rpartition("/")[2]
        later = next((at for at in range(place, len(IN_ORDER)) if IN_ORDER[at][1] == name), None)
        if later is None:
            continue
        if "/" not in step.name:  # those of graphs inside come first
            place = later
        if did_something(step):
            yield "/".join(IN_ORDER[later])


def run(program: Program) -> set[str]:
    """Compile, compare with eager; what fired."""
    made = isinstance(program.function, (type, functools.partial))
    function = program.function() if made else program.function
    if program.redrawn:
        assert_same_looks(function, program)
    else:
        with torch.set_grad_enabled(not program.inference), torch._dynamo.config.patch(dict(program.config)):
            assert_same_as_eager(
                function,
                program.make_inputs,
                backward=trains(function, program),
                exact=program.exact,
                terms=program.terms,
                options=dict(program.options),
                dynamic=program.dynamic,
                fullgraph=True,
            )
    return fired(ferrite.last_compile())


def trains(function: Any, program: Program) -> bool:
    if program.inference or isinstance(function, nn.Module):
        return program.backward
    torch.manual_seed(0)
    results = pytree.tree_leaves(function(*program.make_inputs()))
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in results)


def assert_same_looks(function: Any, program: Program) -> None:
    compiled = compile_strict(function, options=dict(program.options), dynamic=program.dynamic, fullgraph=True)
    mine, theirs = (pytree.tree_leaves(each(*program.make_inputs())) for each in (compiled, function))
    for one, other in zip(mine, theirs, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert one.isfinite().all()


def wanted(program: Program) -> set[str]:
    """A rule that fires does so in the first pass that has it."""
    return set(program.fires) | {PASS_OF[name] for name in program.fires if name in PASS_OF}


@pytest.mark.quick
def test_every_rule_and_pass_has_a_program():
    rules = {rule.name for rule in all_rules()}
    built = {f"{stage.name}/{step.name}" for stage in PIPELINES for step in stage.passes}
    shown = {name for program in PROGRAMS for name in wanted(program)}
    assert shown <= rules | built
    assert sorted((rules | built) - shown) == sorted(EXCEPT), "without a program"
    assert {name for program in NEAR_MISSES for name in program.not_here} >= rules


def table(programs: tuple[Program, ...]) -> list[Any]:
    return [
        pytest.param(each, id=(each.fires or each.not_here)[0], marks=[pytest.mark.slow] * each.slow)
        for each in programs
    ]


@pytest.mark.parametrize("program", table(PROGRAMS))
def test_it_fires(program):
    found = run(program)
    assert wanted(program) <= found, sorted(found)


@pytest.mark.parametrize("program", table(NEAR_MISSES))
def test_it_does_not_fire(program):
    assert run(program).isdisjoint(program.not_here)


@pytest.mark.quick
def test_a_pass_computes_with_real_tensors_in_every_stage():
    seen = []

    def looking(stage: Any) -> Any:
        def look(gm: Any, context: Any) -> int:
            seen.append((stage, torch.tensor(2.0).add(1).item()))
            return 0

        return ferrite.graph_pass(look, stage=stage, name=f"look_{stage}")

    stages = ("pre_grad", "joint", "freeze", "post_grad")
    options = {"passes": [looking(stage) for stage in stages]}
    model = nn.Linear(3, 3)
    compile_strict(model, options=options)(torch.randn(2, 3)).sum().backward()
    with torch.no_grad():
        compile_strict(model, options={**options, "freeze": True})(torch.randn(2, 3))
    assert {stage for stage, _ in seen} == set(stages)
    assert {number for _, number in seen} == {3.0}
