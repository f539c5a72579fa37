"""Helpers of the lowering tests: functions compiled to loop programs, run by the interpreter, checked, looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import ferrite
from ferrite.capture import CapturedGraph, capture
from ferrite.debug.record import CompileRecord
from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.nodes import Call, If, Invoke, Operation, Program, Template, While, call_of
from ferrite.ir.program.operation_facts import bodies_of
from ferrite.ir.program.parse import parse
from ferrite.lower.graph import LoweredProgram, lower_graph, lower_module
from ferrite.options import Options
from tests.compare import assert_same_as_eager

INTERPRETER = {"executor": "interpreter"}


LOWERED: list[tuple[CompileRecord, Program]] = []  # in this test: see conftest.py


def lower_and_keep(graph: CapturedGraph, *about: Any) -> LoweredProgram:
    """What the compiler calls in these tests: they look at the programs that it made."""
    lowered = lower_graph(graph, *about)
    LOWERED.append((ferrite.last_compile(), lowered.program))
    return lowered


def programs() -> list[Program]:
    """The programs of the last compilation, read back from their text; each keeps the laws."""
    record = ferrite.last_compile()
    return [verify_program(parse(str(program))) for compilation, program in LOWERED if compilation is record]


def run(fn: Callable[..., Any], make_inputs: Callable[[], Sequence[Any]], **settings: Any) -> Program:
    """Compare everything observable with eager; the last program."""
    assert_same_as_eager(fn, make_inputs, options=INTERPRETER, **{"graphs": 1, **settings})
    return programs()[-1]


def operations(program: Program, *kinds: type) -> list[Any]:
    """Operations of some kinds, those of bodies too."""
    found: list[Operation] = []
    for operation in program.operations:
        found += [operation] if isinstance(operation, kinds) else []
        if isinstance(operation, If | While | Invoke):
            for body in bodies_of(operation):
                found += operations(body, *kinds)
    return found


def calls(program: Program) -> list[Call]:
    """Everything that torch is called for, inside other operations too."""
    return [call for operation in operations(program, object) if (call := call_of(operation)) is not None]


def traced(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> torch.fx.GraphModule:
    """A graph with operators as they stand in the function, whose results come in a list."""
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(each, static_shapes=not dynamic) for each in inputs]
    with mode:
        return make_fx(lambda *given: pytree.tree_leaves(fn(*given)))(*fakes)


def assert_lowered(fn: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    """Lower a graph as it stands, run it, and compare with what the function does in eager."""
    lowered = lower_module(traced(fn, *inputs))
    verify_program(lowered.program)
    mine = interpret(lowered.program, [each.clone() for each in inputs], lowered.objects)
    torch.testing.assert_close(mine, pytree.tree_leaves(fn(*inputs)), equal_nan=True)
    return lowered.program


def assert_interpreted_as_eager(
    fn: Callable[..., Any], make_inputs: Callable[[], Sequence[Any]], **settings: Any
) -> Any:
    """Compare everything observable with eager; the record of the last compilation."""
    assert_same_as_eager(fn, make_inputs, options=INTERPRETER, **settings)
    return ferrite.last_compile()


def programs_of(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, grad: bool = False) -> list[Program]:
    """The programs that a function of tensors is lowered to, without any pass before; checked against eager. `grad`:
    those of its gradients, too."""
    found: list[Program] = []

    def keep(graph: Any) -> Any:
        lowered = lower_graph(graph)
        assert parse(str(verify_program(lowered.program))) == lowered.program
        found.append(lowered.program)

        def run(args: list[Any]) -> list[Any]:
            return interpret(lowered.program, list(args), lowered.objects)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: Any, examples: Any) -> Any:
        return capture(gm, examples, keep, Options(), lambda partition: partition)

    torch.compiler.reset()
    with torch.set_grad_enabled(grad):
        ours, theirs = torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs), fn(*inputs)
    torch.testing.assert_close(ours, theirs)
    if grad:
        torch.testing.assert_close(*(gradients_of(results, inputs) for results in (ours, theirs)))
    return found


def gradients_of(results: Any, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Those of the inputs that require one."""
    sums = [each.sin().sum() for each in pytree.tree_leaves(results) if each.requires_grad]
    return torch.autograd.grad(sums, [each for each in inputs if each.requires_grad])


def program_of(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Program:
    (program,) = programs_of(fn, *inputs, dynamic=dynamic)
    return program


def kinds(program: Program) -> list[str]:
    """What a program consists of, in order: compute, reduce, call ..."""
    return [type(operation).__name__.lower() for operation in program.operations]


def eager_calls(program: Program) -> list[Call]:
    """Calls of torch that are not templates."""
    found = [item for item in operations(program, object) if not isinstance(item, Template)]
    return [call for item in found if (call := call_of(item)) is not None]
