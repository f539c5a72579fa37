"""Control flow as sub-programs: conditionals, loops, shared regions, scans with a function of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows

from ferrite.capture import torch_operators
from ferrite.ir import number
from ferrite.ir.program.loop_operations import Scan
from ferrite.ir.program.nodes import Call, If, Invoke, While, argument_names
from ferrite.ir.program.operation_facts import bodies_of, has_effect, reads, writes
from ferrite.lower.graph import lower_module
from tests.compare import assert_same_as_eager, compile_strict, compiled_graphs, reset
from tests.lower.lowered import INTERPRETER, assert_lowered, calls, operations, programs, run, traced

# --- conditionals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_is_a_branch_between_two_programs(sign: float) -> None:
    program = run(
        lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,)),
        lambda: [torch.full((3, 4), sign)],
        dynamic=True,
    )
    (branch,) = operations(program, If)
    assert (branch.then.name, branch.otherwise.name) == ("when_true", "when_false")
    assert not operations(program, Call)


def test_branches_of_different_sizes_define_a_symbol() -> None:
    def fn(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return torch.cond(which, lambda x: x[:2] * 2, lambda x: x[:3] + 1, (x,)).sum(0)

    for which in (True, False):
        program = run(fn, lambda which=which: [torch.randn(5, 3), torch.tensor(which)], dynamic=False)
        (branch,) = operations(program, If)
        sizes = [body.buffer(body.outputs[0]).sizes[0] for body in bodies_of(branch)]
        assert sizes == [number(2), number(3)]
        assert str(program.buffer(branch.results[0]).sizes[0]) == "u0"


def test_branches_agree_in_strides() -> None:
    program = run(
        lambda x, p: torch.cond(p, lambda x: x.t() + 1, lambda x: x.t() * 2, (x,)),
        lambda: [torch.randn(3, 4), torch.tensor(True)],
        dynamic=False,
    )
    (branch,) = operations(program, If)
    strides = [body.buffer(body.outputs[0]).strides for body in bodies_of(branch)]
    assert strides[0] == strides[1] == program.buffer(branch.results[0]).strides


def test_a_predicate_that_is_a_number() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for count in (1, 5):
            run(
                lambda x, n: torch.cond(n.sum().item() > 2, lambda x: x + 1, lambda x: x - 1, (x,)),
                lambda count=count: [torch.randn(3), torch.tensor([count])],
            )


def test_conditionals_inside_one_another_and_a_constant_of_a_body() -> None:
    table = torch.arange(3.0)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 1, lambda x: x + table, lambda x: x - 1, (x,))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, inner, lambda x: x * torch.tensor([1.0, 2.0, 3.0]), (x,))

    for start in (-1.0, 0.1, 2.0):
        program = run(fn, lambda start=start: [torch.full((3,), start)], dynamic=False)
        assert len(operations(program, If)) == 2


def test_an_effect_inside_a_branch_keeps_the_branch() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() < 10, "too large")
        return x + 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.cond(x.sum() > 0, checked, lambda x: x - 1, (x,))
        return x * 2

    program = lower_module(traced(fn, torch.ones(3))).program
    (branch,) = operations(program, If)
    assert has_effect(branch)


# --- loops ------------------------------------------------------------------------------------------------------------


def test_while_loop() -> None:
    program = run(
        lambda x: while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), x)),
        lambda: [torch.randn(3, 2)],
        dynamic=True,
    )
    (loop,) = operations(program, While)
    assert not loop.stacked
    assert not operations(program, Call)


def test_a_loop_that_never_runs_returns_copies() -> None:
    """The contract compares sharing too: the result is no view of the input."""
    run(
        lambda x: while_loop(lambda x: x.sum() < 1, lambda x: (x * 2,), (x,)),
        lambda: [torch.ones(3)],
        dynamic=False,
    )


def test_scan_and_map_write_each_step_into_its_place() -> None:
    program = run(
        lambda s, xs: scan(lambda c, x: (c * 0.5 + x, c.sin()), s, xs),
        lambda: [torch.randn(4), torch.randn(5, 4)],
        dynamic=True,
    )
    (loop,) = operations(program, While)
    assert not operations(program, Call)
    assert str(loop.carried[0]) == "Literal(text='0')"
    program = run(
        lambda xs, y: map_rows(lambda x, y: x + y, xs, y), lambda: [torch.randn(5, 3), torch.randn(3)], dynamic=False
    )
    assert len(operations(program, While)) == 1


def test_a_loop_in_training_keeps_every_iteration() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        _, out = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, (x * w).sin()), (torch.tensor(0), x))
        return out

    def gradients(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(3, requires_grad=True) for _ in range(2)]
        call(*leaves).sum().backward()
        return [leaf.grad for leaf in leaves]

    def unrolled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((((x * w).sin() * w).sin()) * w).sin()

    compiled = compile_strict(fn, options=INTERPRETER, fullgraph=True, dynamic=False)
    torch.testing.assert_close(gradients(compiled), gradients(unrolled))
    stacked = [loop for program in programs() for loop in operations(program, While) if loop.stacked]
    assert len(stacked) == 1


def test_a_stacking_loop_without_iterations() -> None:
    loop = torch_operators.higher_order("while_loop_stack_output")

    def fn(x: torch.Tensor) -> Any:
        return loop(lambda x: x.sum() < 10, lambda x: (x * 2,), (x,), ())

    assert_lowered(fn, torch.full((3,), 5.0))  # no iteration: what came in, as the only one
    assert_lowered(fn, torch.ones(3))


def test_an_operand_that_no_body_touches_counts_as_read() -> None:
    """It is handed over, so nobody may free it before; one that bodies only write need hold nothing yet."""
    fn = lambda s, xs: scan(lambda c, x: (c + x, c * 2), s, xs)  # noqa: E731
    program = run(fn, lambda: [torch.randn(4), torch.randn(5, 4)], dynamic=False)
    (loop,) = operations(program, While)
    read, written = ({access.buffer for access in found(loop)} for found in (reads, writes))
    handed_over = set(argument_names(*loop.carried, *loop.constants))
    assert handed_over <= read | written
    assert handed_over - read <= written

    unused = assert_lowered(
        lambda p, x, y: torch.cond(p, lambda x, y: x + 1, lambda x, y: x * 2, (x, y * 3)),
        torch.tensor(True), torch.ones(3), torch.ones(2),
    )  # fmt: skip
    (branch,) = operations(unused, If)
    assert set(argument_names(*branch.operands)) <= {access.buffer for access in reads(branch)}


# --- regions ----------------------------------------------------------------------------------------------------------


@torch.compiler.nested_compile_region
def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y).relu() + 1


def test_a_region_that_is_used_twice_is_lowered_once() -> None:
    program = run(lambda x, y: region(region(x, y), y), lambda: [torch.randn(3, 3), torch.randn(3, 3)], dynamic=False)
    first, second = operations(program, Invoke)
    assert first.body == second.body
    assert str(program).count("def subgraph_0") == 1


def test_a_region_in_training() -> None:
    assert_same_as_eager(
        lambda x, y: region(region(x, y), y),
        lambda: [torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)],
        backward=True,
        options=INTERPRETER,
        dynamic=False,
    )
    assert all(len(operations(program, Invoke)) == 2 for program in programs())


def test_a_region_of_symbolic_sizes_serves_all_of_them() -> None:
    reset()
    compiled = compile_strict(lambda x, y: region(x, y), options=INTERPRETER, dynamic=True)
    for rows in (3, 5):
        x, y = torch.randn(rows, 4), torch.randn(4, rows)
        torch.testing.assert_close(compiled(x, y), (x @ y).relu() + 1)
    assert compiled_graphs() == 1


# --- scans with a function --------------------------------------------------------------------------------------------


def test_associative_scan_is_a_scan_with_a_combine_function() -> None:
    operator = torch_operators.higher_order("associative_scan")

    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        return operator(lambda a, b, c, d: [a * c, b * c + d], [a, b], ())

    program = assert_lowered(fn, torch.rand(5, 3), torch.rand(5, 3))
    (found,) = operations(program, Scan)
    assert [str(result) for result in found.combine.results] == [
        "mul(param(0), param(2))",
        "add(mul(param(1), param(2)), param(3))",
    ]
    assert not operations(program, Call)


def test_associative_scan_of_narrow_floats_rounds_every_step() -> None:
    operator = torch_operators.higher_order("associative_scan")
    assert_lowered(lambda a: operator(lambda a, b: [a + b], [a], ()), torch.rand(7, 2).bfloat16())


def test_a_combine_function_with_more_operands_is_called() -> None:
    operator = torch_operators.higher_order("associative_scan")

    def fn(a: torch.Tensor, w: torch.Tensor) -> Any:
        return operator(lambda a, b, w: [a + b * w], [a], (w,))

    program = assert_lowered(fn, torch.rand(5, 3), torch.rand(3))
    (called,) = calls(program)
    assert called.reason == "a combine function that takes more than two states"


def test_associative_scan_in_its_generic_form() -> None:
    run(
        lambda xs: associative_scan(lambda a, b: a * b, xs, dim=0, combine_mode="generic"),
        lambda: [torch.randn(7, 3)],
        dynamic=True,
    )
