"""Higher-order operators: conditionals, loops, scans, checkpointing, and effects that must keep their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.checkpoint import checkpoint

from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict, compiled_graphs
from tests.custom_operators import by_columns


def choose(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() - 1, (x,))


@pytest.mark.parametrize("sign", [1, -1], ids=["true_side", "false_side"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_cond(sign: int, training: bool, dynamic: bool) -> None:
    assert_same_as_eager(
        lambda x: choose(x * sign) + 1,
        lambda: [torch.rand(3, 4, requires_grad=training)],
        backward=training,
        graphs=1,
        dynamic=dynamic,
    )


@pytest.mark.quick
def test_cond_takes_both_sides_of_one_graph() -> None:
    compiled = compile_strict(choose, fullgraph=True)
    inputs = [torch.full((3,), sign) for sign in (1.0, -1.0, 1.0)]
    outputs = [compiled(x) for x in inputs]
    assert compiled_graphs() == 1
    assert_same_tree(outputs, [choose(x) for x in inputs], [choose(x.double()) for x in inputs], "output")


def test_cond_with_several_results_and_a_captured_tensor() -> None:
    def fn(x: torch.Tensor, flag: torch.Tensor) -> Any:
        y = x * 2
        return torch.cond(flag, lambda x: (x + y, x.sum()), lambda x: (x - y, x.mean()), (x,))

    for flag in (True, False):
        assert_same_as_eager(fn, lambda flag=flag: [torch.randn(4), torch.tensor(flag)], graphs=1, dynamic=False)


def test_while_loop(dynamic: bool) -> None:
    def fn(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.5 + 1), (torch.tensor(0), x))

    assert_same_as_eager(fn, lambda: [torch.randn(3, 2)], graphs=1, dynamic=dynamic)


def test_while_loop_that_runs_a_number_of_times_given_by_data() -> None:
    def halve(x: torch.Tensor) -> Any:
        return while_loop(lambda x, n: x.sum() > 1, lambda x, n: (x / 2, n + 1), (x, torch.tensor(0)))

    compiled = compile_strict(halve, fullgraph=True)
    inputs = [torch.full((4,), start) for start in (0.1, 8.0, 1000.0)]
    outputs = [compiled(x) for x in inputs]
    assert compiled_graphs() == 1
    assert_same_tree(outputs, [halve(x) for x in inputs], [halve(x.double()) for x in inputs], "output")


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_while_loop_in_training(times: int, dynamic: bool) -> None:
    """The backward reads the states before each iteration, of which there are as many as data say: the first of them
    is computed before that is known."""

    def fn(n: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        start = (n, a.sin(), b * 2)
        _, x, y = while_loop(lambda n, x, y: n > 0, lambda n, x, y: (n - 1, x * y, y + x.cos()), start)
        return x / y

    def make() -> list[torch.Tensor]:
        return [torch.tensor(times), torch.rand(2, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)]

    assert_same_as_eager(fn, make, backward=True, graphs=1, dynamic=dynamic, fullgraph=True)


def test_scan(dynamic: bool) -> None:
    def fn(start: torch.Tensor, xs: torch.Tensor) -> Any:
        return scan(lambda carry, x: (carry * 0.5 + x, carry.sin()), start, xs)

    assert_same_as_eager(fn, lambda: [torch.randn(4), torch.randn(6, 4)], graphs=1, dynamic=dynamic)


def test_scan_in_training() -> None:
    def fn(start: torch.Tensor, xs: torch.Tensor) -> Any:
        return scan(lambda carry, x: (carry * 0.5 + x, carry.sin()), start, xs)

    assert_same_as_eager(
        fn,
        lambda: [torch.randn(4, requires_grad=True), torch.randn(6, 4, requires_grad=True)],
        backward=True,
        dynamic=False,
    )


def test_associative_scan(dynamic: bool) -> None:
    assert_same_as_eager(
        lambda xs: associative_scan(lambda a, b: a + b, xs, dim=0, combine_mode="generic"),
        lambda: [torch.randn(7, 3)],
        graphs=1,
        dynamic=dynamic,
    )


def test_map() -> None:
    assert_same_as_eager(
        lambda xs, y: map_rows(lambda x, y: x.sin() + y, xs, y),
        lambda: [torch.randn(5, 3), torch.randn(3)],
        graphs=1,
        dynamic=False,
    )


def map_of_map(x):
    return map_rows(lambda rows: map_rows(torch.sin, rows), x)


def map_of_cond(x):
    return map_rows(lambda rows: torch.cond(rows.sum() > 0, torch.sin, torch.cos, (rows,)), x)


def scan_of_scan(x):
    def inner(total, row):
        return total + row, total * row

    def outer(total, rows):
        last, products = scan(inner, rows[0] * 0, rows, dim=0)
        return total + last, products

    return scan(outer, x[0, 0] * 0, x, dim=0)


@pytest.mark.parametrize("function", [map_of_map, map_of_cond, scan_of_scan])
@pytest.mark.parametrize("gaps", [True, False])
def test_inner_bodies_read_parts_where_they_lie(function, gaps) -> None:
    """Torch traces an inner body on contiguous parts, whatever the tensor is that they are parts of."""

    def inputs():
        return [torch.randn(2, 3, 8)[..., ::2] if gaps else torch.randn(2, 3, 4)]

    torch.compiler.reset()
    (x,) = inputs()
    ours = compile_strict(function, options={"check_bounds": True})(x)
    torch.compiler.reset()
    expected = torch.compile(function, backend="aot_eager")(x)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (by_columns(x),)),
        lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, by_columns(y.sin())), (torch.tensor(0), x * 2)),
    ],
)
def test_bodies_read_results_of_calls_where_they_lie(function) -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(compile_strict(function)(x), torch.compile(function, backend="aot_eager")(x))


def test_checkpoint(dynamic: bool) -> None:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = checkpoint(block, x, w, use_reentrant=False)
        return checkpoint(block, y, w, use_reentrant=False).sin()

    assert_same_as_eager(
        fn,
        lambda: [torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)],
        backward=True,
        dynamic=dynamic,
    )


def test_checkpoint_around_a_compiled_block() -> None:
    """Eager checkpointing calls the compiled forward a second time during backward."""
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    compiled = compile_strict(block)

    def gradients(call: Any, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        block.to(dtype).zero_grad()
        x = torch.randn(3, 4).to(dtype).requires_grad_()
        checkpoint(call, x, use_reentrant=False).sum().backward()
        return [x.grad, *(p.grad.clone() for p in block.parameters())]

    ours, eager = gradients(compiled, torch.float32), gradients(block, torch.float32)
    assert_same_tree(ours, eager, gradients(block, torch.float64), "gradient")


@torch.library.custom_op("contract::record", mutates_args=())
def record(x: torch.Tensor, label: str) -> torch.Tensor:
    RECORDED.append((label, x.sum().item()))
    return x.clone()


@record.register_fake
def _(x, label):
    return torch.empty_like(x)


RECORDED: list[tuple[str, float]] = []


_register_effectful_op(torch.ops.contract.record.default, _EffectType.ORDERED)


def test_ordered_effects_all_happen_in_program_order(dynamic: bool) -> None:
    """The second result is unused and none depends on another: order and presence come from the effect alone."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        first = record(x, "first")
        record(x * 2, "second")
        third = record(x * 3, "third")
        return third + first

    compiled = compile_strict(fn, dynamic=dynamic)
    RECORDED.clear()
    out = compiled(torch.ones(4))
    assert RECORDED == [("first", 4.0), ("second", 8.0), ("third", 12.0)]
    assert torch.equal(out, torch.full((4,), 4.0))
    compiled(torch.ones(4) * 2)
    assert [label for label, _ in RECORDED] == ["first", "second", "third"] * 2


def test_ordered_effects_and_writes_of_an_input() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        record(x, "before")
        x.add_(1)
        record(x, "after")
        return x * 2

    RECORDED.clear()
    x = torch.zeros(4)
    out = compile_strict(fn)(x)
    assert RECORDED == [("before", 0.0), ("after", 4.0)]
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(out, torch.full((4,), 2.0))


def test_assertion_on_data_fails_while_running() -> None:
    """`torch._assert_async` has no result to keep it alive."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "must be positive")
        return x * 2

    compiled = compile_strict(fn)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="must be positive"):
        compiled(-torch.ones(3))
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("side", [True, False])
def test_scan_inside_of_cond_in_training(side: bool) -> None:
    """The gradient that the loop begins with is one number for all elements, and has strides of its own."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        def scanned() -> Any:
            carry, ys = scan(lambda carry, row: ((carry + row @ w).tanh(), carry * row), w[0] * 2, x)
            return carry.sum(), ys.sin()

        return torch.cond(x.sum() > 0, scanned, lambda: (w.sum(), x.cos()), ())

    sign = 1 if side else -1
    assert_same_as_eager(
        fn,
        lambda: [torch.rand(4, 3).mul_(sign).requires_grad_(), torch.rand(3, 3, requires_grad=True)],
        backward=True,
        graphs=1,
    )
