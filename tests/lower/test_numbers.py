"""Fractions and truths computed from sizes and data, as operands and as sizes."""

from __future__ import annotations

import math

import pytest
import torch

from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.nodes import Item
from ferrite.lower.graph import lower_module
from tests.compare import compile_strict, reset
from tests.lower.lowered import INTERPRETER, calls, operations, run

pytestmark = pytest.mark.quick


def assert_right_at_two_sizes(fn, first: torch.Tensor, second: torch.Tensor):
    """Compiled once for any size; right at two of them. The last program."""
    from tests.compare import compiled_graphs

    reset()
    compiled = compile_strict(fn, options=INTERPRETER, dynamic=True)
    for x in (first, second):
        torch.testing.assert_close(compiled(x), fn(x))
    assert compiled_graphs() == 1


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * (x.shape[1] ** -0.5),
        lambda x: x / math.sqrt(x.shape[0]) + 1.0 / x.shape[1],
        lambda x: x * (x.shape[0] / (x.shape[1] + 1)) - x.shape[0] % 3,
        lambda x: torch.clamp(x, max=x.shape[0] * 0.01),
        lambda x: torch.add(x, x, alpha=x.shape[0] * 0.5),
        lambda x: x * max(x.shape[0], 2 * x.shape[1]),
        lambda x: torch.nn.functional.leaky_relu(x, 1 / x.shape[0]),
        lambda x: torch.full_like(x, x.shape[0] / 7),
    ],
)
def test_fractions_of_sizes_are_operands(fn):
    assert_right_at_two_sizes(fn, torch.randn(5, 6), torch.randn(9, 4))


def test_a_size_that_goes_through_fractions_is_computed_once():
    def fn(x):
        n = torch.sym_int(x.shape[0] * 1.5)
        return x.new_zeros(n) + n, x.sum() * n

    from torch.fx.experimental.proxy_tensor import make_fx

    lowered = lower_module(make_fx(fn, tracing_mode="symbolic")(torch.randn(4, 6)))
    assert len(operations(lowered.program, Item)) == 1
    assert not calls(lowered.program)
    for x in (torch.randn(4, 6), torch.randn(9, 3)):
        torch.testing.assert_close(interpret(lowered.program, [x], lowered.objects), list(fn(x)))


@pytest.mark.lengthy
def test_bits_of_sizes():
    """As results, operands and sizes; of truths, `|` is another operator."""
    reset()

    def fn(x):
        rows, columns = x.shape
        sizes = torch.arange(rows | 4), x.new_zeros((rows & 3) + 1), x[: (rows ^ columns) + 1] * 2
        return *sizes, x * (rows & columns), rows ^ columns, (rows | rows >> 1) % 6, (rows > 4) | (columns > 9)

    compiled = compile_strict(fn, fullgraph=True, dynamic=True)
    for sizes in ((3, 5), (6, 3), (8, 12)):
        x = torch.randn(sizes)
        torch.testing.assert_close(compiled(x), fn(x))


@pytest.mark.lengthy
def test_resampling_by_a_factor_at_two_sizes():
    fn = lambda x: torch.nn.functional.interpolate(x, scale_factor=1.5)  # noqa: E731
    assert_right_at_two_sizes(fn, torch.randn(2, 3, 4, 6), torch.randn(2, 3, 7, 5))


@pytest.mark.lengthy
def test_a_number_that_comes_in_is_an_operand():
    reset()
    fn = lambda x, s: (x * s, torch.where(x > s, x, s), torch.clamp(x, -s, s))  # noqa: E731
    compiled = compile_strict(fn, options=INTERPRETER)
    for s in (0.5, 0.7, 0.9):
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x, s), fn(x, s))


def test_a_number_read_from_memory_is_an_operand():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        program = run(lambda x, s: (x * s.item()).exp() + s.item() ** 2, lambda: [torch.randn(4), torch.tensor(0.3)])
    assert not calls(program)


def test_a_number_read_from_memory_passes_through_a_decomposition():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        fn = lambda x, s: torch.nn.functional.celu(x, s.item() + 1.0)  # noqa: E731
        run(fn, lambda: [torch.randn(4), torch.tensor(0.3)])


def bits_of_a_size(x):
    n = x.shape[0]
    return x * (n | 3), x * (n ^ 5), x * (n >> 1), x * ((n > 3) & (n < 9)), x.new_zeros((n & 6) + (n << 1))


def rounded_to_a_digit(x):
    return x * round(x.shape[0] / 2 * 123.45, 1), x + round(x.shape[0] / 2)


@pytest.mark.parametrize("fn", [bits_of_a_size, rounded_to_a_digit])
def test_bits_and_decimals_of_sizes(fn):
    """Of whole numbers `|` is that of bits, of truths the logical one. Python alone rounds to decimals as Python does:
    such a graph runs one operator after the other."""
    reset()
    compiled = compile_strict(fn, dynamic=True, fullgraph=True)
    for size in (5, 8, 13):
        x = torch.randn(size)
        for found, expected in zip(compiled(x), fn(x), strict=True):
            assert torch.equal(found, expected)
