"""Every rule and every pass fires in a program that a user could write, compiled as users compile it.

Each program goes through `torch.compile(..., backend="ferrite", fullgraph=True)` with `strict`; the record says what
fired, and everything that can be seen of the results is eager's. A rule or pass without a program fails the first test.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ferrite
from ferrite.passes import PIPELINES, all_rules
from tests.compare import Run, assert_same_as_eager, assert_same_run, compile_strict, random_state
from tests.distributed.rule_programs import PROGRAMS as ON_RANKS
from tests.fired import fired
from tests.rule_programs import NEAR_MISSES, PASS_OF, PROGRAMS, Program
from tests.triton_kernels import ON_A_GPU


def run(program: Program) -> set[str]:
    """Compile, compare with eager; what fired."""
    if program.traced:
        return run_traced(program)
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


def run_traced(program: Program) -> set[str]:
    """FX's own tracer takes nothing apart; the backend is called as a function of a graph and its inputs."""
    gm, inputs = torch.fx.symbolic_trace(program.function()), program.make_inputs()
    backend: Any = torch._dynamo.lookup_backend("ferrite")
    compiled = backend(gm, inputs, options={"strict": True, **program.options})
    ours, theirs = (Run(tuple(each(*inputs)), inputs, {}, {}, random_state()) for each in (compiled, gm))
    assert_same_run(ours, theirs, None)
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
    shown |= {name for program in ON_RANKS for name in program.fires}
    assert shown <= rules | built
    assert not (rules | built) - shown, "without a program"
    assert {name for program in NEAR_MISSES for name in program.not_here} >= rules


def table(programs: tuple[Program, ...]) -> list[Any]:
    return [
        pytest.param(
            each,
            id=(each.fires or each.not_here)[0],
            marks=[pytest.mark.slow] * each.slow + ON_A_GPU * each.on_gpu,
        )
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
