"""Helpers of the lowering tests: a function compiled to loop programs, run by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ferrite
from compare import check
from ferrite.ir.program import Call, Operation, Program, Template, call_of
from ferrite.lower.graph import lower_graph

INTERPRETED = {"executor": "interpreter"}


def same_as_eager(
    fn: Callable[..., Any], make_inputs: Callable[[], Sequence[Any]], **settings: Any
) -> ferrite.CompileRecord:
    """Everything observable is eager's when the loop program runs; the record of the last compilation."""
    check(fn, make_inputs, options=INTERPRETED, **settings)
    return ferrite.last_compile()


def programs_of(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, grad: bool = False) -> list[Program]:
    """The loop programs that a function of tensors is lowered to, without any pass before; checked against eager."""
    from ferrite.capture import capture
    from ferrite.ir.interpret import interpret
    from ferrite.options import Options

    found: list[Program] = []

    def keep(graph: Any) -> Any:
        lowered = lower_graph(graph)
        found.append(lowered.program)

        def run(args: list[Any]) -> list[Any]:
            return interpret(lowered.program, list(args), lowered.objects)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: Any, examples: Any) -> Any:
        return capture(gm, examples, keep, Options(), lambda partition: partition)

    torch.compiler.reset()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs), fn(*inputs))
    return found


def program_of(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Program:
    (program,) = programs_of(fn, *inputs, dynamic=dynamic)
    return program


def kinds(program: Program) -> list[str]:
    """What a program consists of, in order: compute, reduce, call ..."""
    return [type(operation).__name__.lower() for operation in program.operations]


def eager_calls(program: Program) -> list[Call]:
    """Calls of torch that are not templates."""
    return [
        call for item in program.operations if (call := call_of(item)) is not None and not isinstance(item, Template)
    ]


def operations(program: Program, kind: type[Operation]) -> list[Any]:
    return [item for item in program.operations if isinstance(item, kind)]
