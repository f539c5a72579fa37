"""Elementwise operators: eager's rules of types, numbers, edges and errors, and what they become."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ferrite.ir.expr import Cast, Op, nodes_of
from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.loop_operations import Compute
from ferrite.ir.program.nodes import Program
from ferrite.ir.program.operation_facts import roots_of
from ferrite.lower.graph import lower_module
from ferrite.lower.ops import special
from ferrite.machines import Machine
from tests.lower.lowered import assert_lowered, calls, traced

pytestmark = pytest.mark.quick
aten = torch.ops.aten

EDGES = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.5, 7.3, 1e4, math.inf, -math.inf, math.nan])


def operators(program: Program) -> list[str]:
    """The scalar operators of a program, each once."""
    roots = [root for operation in program.operations for root in roots_of(operation)]
    return [node.name for node in nodes_of(*roots) if isinstance(node, Op)]


def assert_exact(fn: Any, *inputs: torch.Tensor) -> Program:
    """Lowered without a call, and every bit as in eager."""
    lowered = lower_module(traced(fn, *inputs))
    assert not calls(lowered.program)
    (mine,) = interpret(lowered.program, [each.clone() for each in inputs], lowered.objects)
    theirs = fn(*inputs)
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all()), (mine, theirs)
    return lowered.program


def test_a_chain_is_one_loop():
    program = assert_lowered(lambda x, y: ((x + y).sin() * 2 - y).sigmoid(), torch.randn(3, 4), torch.randn(4))
    assert [type(item) for item in program.operations] == [Compute]
    assert operators(program) == ["add", "sin", "mul", "sub", "sigmoid"]


def test_arithmetic_on_sixteen_bits_is_written_as_arithmetic_on_thirty_two():
    program = assert_lowered(lambda x, y: x * y, torch.randn(4).bfloat16(), torch.randn(4).bfloat16())
    nodes = nodes_of(*roots_of(program.operations[0]))
    assert [node.dtype for node in nodes if isinstance(node, Op)] == [torch.float32]
    assert sum(isinstance(node, Cast) for node in nodes) == 3


def test_truth_values_are_joined_not_added():
    a, b = torch.tensor([True, False, True]), torch.tensor([True, False, False])
    assert operators(assert_exact(torch.add, a, b)) == ["logical_or"]
    assert operators(assert_exact(torch.mul, a, b)) == ["logical_and"]
    assert_exact(lambda a, b: torch.add(a, b, alpha=False), a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [0.1, -0.3, 7.7])
@pytest.mark.lengthy
def test_numbers_meet_sixteen_bits_as_in_eager(dtype, number):
    """Rounded first in sums, remainders, powers and comparisons; not in products and quotients."""
    x = torch.linspace(-9, 9, 97).to(dtype)
    for fn in (
        lambda x: x + number,
        lambda x: number - x,
        lambda x: x * number,
        lambda x: x / number,
        lambda x: torch.div(x, number, rounding_mode="trunc"),
        lambda x: torch.div(x, number, rounding_mode="floor"),
        lambda x: x % number,
        lambda x: torch.fmod(x, number),
        lambda x: x.abs() ** number,
        lambda x: x > number,
        lambda x: torch.clamp(x, max=number),
        lambda x: torch.lerp(x, x + 1, number),
    ):
        assert_exact(fn, x)


def test_a_number_is_rounded_before_it_is_compared():
    assert_exact(lambda x: x == 0.1, torch.tensor([0.1], dtype=torch.bfloat16))
    assert_exact(lambda x: x == 16777217.0, torch.tensor([16777216]))  # integers meet a fraction as 32-bit floats


def test_a_quotient_of_sixteen_bits_is_rounded_before_its_fraction_is_dropped():
    """Unless there is one divisor alone, which eager takes for a number."""
    ones, tenth = torch.ones(4).bfloat16(), torch.full((4,), 0.1).bfloat16()
    truncated = lambda x, y: torch.div(x, y, rounding_mode="trunc")  # noqa: E731
    assert_exact(truncated, ones, tenth)
    assert_exact(truncated, ones, tenth[:1])
    assert_exact(truncated, ones[:1], tenth[:1])


@pytest.mark.parametrize("name", ["floor_divide", "remainder", "fmod"])
def test_integers_divided_by_zero_raise_as_in_eager(name):
    fn, inputs = getattr(torch, name), (torch.tensor([3, 4]), torch.tensor([1, 0]))
    with pytest.raises(RuntimeError) as theirs:
        fn(*inputs)
    lowered = lower_module(traced(fn, *inputs))
    assert not calls(lowered.program)
    with pytest.raises(RuntimeError) as ours:
        interpret(lowered.program, list(inputs), lowered.objects)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: x - True, torch.ones(2)),
        (lambda x: torch.clamp(x, max=1e9), torch.ones(2).half()),
        (lambda x: torch.bitwise_and(x, x), torch.ones(2)),
        (torch.frac, torch.ones(2, dtype=torch.int64)),
        (lambda x: x**-1, torch.ones(2, dtype=torch.int64)),
        (torch.special.log_ndtr, torch.ones(2).bfloat16()),
        (torch.nn.functional.gelu, torch.ones(2, dtype=torch.int32)),
    ],
    ids=["truth", "number too large", "bits of floats", "frac", "negative power", "sixteen bits", "gelu"],
)
def test_what_eager_refuses_raises_its_error(fn, x):
    with pytest.raises((RuntimeError, NotImplementedError)) as theirs:
        fn(x)
    lowered = lower_module(traced(fn, x))
    with pytest.raises(type(theirs.value)) as ours:
        interpret(lowered.program, [x], lowered.objects)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64], ids=str)
def test_shifts_beyond_the_width_are_eagers(dtype):
    x = torch.tensor([1, 5, 100], dtype=dtype)
    for shift in (0, 7, 8, 31, 32, 63, 64, 100):
        assert_exact(lambda x, shift=shift: x << shift, x)
        assert_exact(lambda x, shift=shift: x >> shift, x)


def test_nan_wins_in_maximum_and_loses_in_fmax():
    x, y = EDGES, EDGES.flip(0)
    for fn in (torch.maximum, torch.minimum, torch.fmax, torch.fmin):
        assert_exact(fn, x, y)
    assert_exact(lambda x: x.clamp(-1, 2), x)
    assert_exact(lambda x: x.clamp(5, 2), x)  # bounds that cross
    assert_exact(lambda x: x.clamp(math.nan, 2), x)
    assert_exact(torch.relu, x)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_negative_zero_stays_one_where_eager_keeps_it(keeps, monkeypatch):
    monkeypatch.setattr(special, "host_machine", lambda: Machine(relu_keeps_negative_zero=keeps))
    x = EDGES.repeat(2)
    lowered = lower_module(traced(torch.relu, x))
    (mine,) = interpret(lowered.program, [x.clone()], lowered.objects)
    torch.testing.assert_close(mine, torch.relu(x), equal_nan=True)
    assert bool(mine[1].signbit()) == keeps


def test_remainders_of_quotients_beyond_the_type():
    x, y = torch.full((9,), -545460846592.0).bfloat16(), torch.full((9,), 1.5587891487167193e-27).bfloat16()
    assert_exact(torch.fmod, x, y)
    assert_exact(torch.fmod, x[::2].float(), y[::2].float())  # eager's scalar code; its vector code says NaN


def test_choices_and_sums_of_mixed_types():
    x, y = torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.5, 2.5], dtype=torch.float16)
    assert assert_exact(lambda x, y: torch.where(x > 1, x, y), x, y).buffers[-1].dtype is torch.float16
    assert_exact(lambda x, y: torch.where(x > 1, x, 2.5), x, y)
    assert_exact(lambda x, y: x + y, x, y[0])  # a tensor without dimensions raises the kind alone
    assert_exact(lambda x, y: y + x, x[0], y)
    assert_exact(lambda x, y: y + torch.tensor(0.1, dtype=torch.float64), x, y)


def test_in_place_is_computed_in_the_common_type():
    x, y = torch.tensor([1.0, 2.0, 7.0]), torch.full((3,), 0.1, dtype=torch.float64)
    assert_exact(lambda x, y: x.clone().div_(y, rounding_mode="floor"), x, y)
    assert_exact(lambda x, y: x.clone().copy_(y), x, y)


def test_whole_powers_are_products():
    x = EDGES
    assert operators(assert_exact(lambda x: x**2, x)) == ["mul"]
    assert operators(assert_lowered(lambda x: x**3, x)) == ["mul", "mul"]
    assert operators(assert_exact(lambda x: x**0, x)) == []
    assert operators(assert_exact(lambda x: x**-1, x)) == ["reciprocal"]
    assert operators(assert_exact(lambda x: x**0.5, x)) == ["sqrt"]
    assert operators(assert_lowered(lambda x: x**2.5, x)) == ["pow"]
    assert operators(assert_lowered(lambda x: 2**x, x)) == ["exp2"]
    assert operators(assert_exact(lambda x: x**13, torch.tensor([3, -7, 1 << 40]))) == ["mul"] * 5  # wraps around


def test_a_scaled_sum_is_fused():
    x, y = torch.tensor([3e38, 1.0]), torch.tensor([-3e38, 2.0])
    assert operators(assert_exact(lambda x, y: torch.add(x, y, alpha=2), x, y)) == ["fma"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_product_that_is_added_is_fused_as_in_eager(dtype):
    torch.manual_seed(0)
    start, a, b = (torch.randn(1000, dtype=dtype) for _ in range(3))
    for fn in (
        lambda start, a, b: torch.addcmul(start, a, b),
        lambda start, a, b: torch.addcmul(start, a, b, value=0.37),
        lambda start, a, b: torch.lerp(start, a, 0.3) + torch.lerp(start, b, 0.7),
        lambda start, a, b: torch.lerp(start, a, b),
        lambda start, a, b: torch._foreach_addcmul([start], [a], [b], value=-2.5)[0],
    ):
        assert_exact(fn, start, a, b)


def test_a_factor_of_another_type_is_not_rounded_first():
    """Dynamo keeps a factor that is a tensor in the graph, and gives it to an operator of its own."""
    x = torch.tensor([5.0, 3.0, 7.0]).bfloat16()
    factor = torch.tensor(2.7, dtype=torch.float64)  # in 16 bits it would be 2.703125, and one result 27.375
    found = torch.compile(lambda x, f: x.clone().addcmul_(x, x, value=f), backend="ferrite", options={"strict": True})
    assert found(x, factor).tolist() == x.clone().addcmul_(x, x, value=factor).tolist() == [72.5, 27.25, 139.0]


def test_the_next_number_of_sixteen_bits():
    for dtype in (torch.bfloat16, torch.float16):
        x = EDGES.to(dtype)
        assert_exact(torch.nextafter, x.repeat(len(x)), x.repeat_interleave(len(x)))


def test_rounding_integers_copies_them():
    for fn in (torch.ceil, torch.floor, torch.trunc, torch.round):
        assert operators(assert_exact(fn, torch.arange(4))) == []
    assert_exact(lambda x: torch.round(x, decimals=2), torch.tensor([1e4, 0.125], dtype=torch.float16))


def test_results_of_several_types():
    mantissa_and_exponent = assert_lowered(torch.frexp, EDGES[:7])
    assert [buffer.dtype for buffer in mantissa_and_exponent.buffers[1:]] == [torch.float32, torch.int32]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_one_loop_and_one_rounding(approximate):
    x = torch.randn(64).bfloat16()
    program = assert_lowered(lambda x: torch.nn.functional.gelu(x, approximate=approximate), x)
    nodes = nodes_of(*roots_of(program.operations[0]))
    assert sum(isinstance(node, Cast) for node in nodes) == 2  # in and out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_keeps_its_digits_where_it_is_small(dtype):
    """Eager adds one to erf, and has none left."""
    x = torch.tensor([-3, -7, -12], dtype=dtype)
    share = torch.tensor([0.0013498980316300945, 1.279812543885835e-12, 1.776482112077679e-33], dtype=dtype)
    lowered = lower_module(traced(torch.nn.functional.gelu, x))
    (result,) = interpret(lowered.program, [x], lowered.objects)
    assert operators(lowered.program) == ["special_ndtr", "mul"]
    torch.testing.assert_close(result, x * share, rtol=100 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "silu",
        "mish",
        "softplus",
        "elu",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "leaky_relu",
        "softshrink",
        "hardshrink",
    ],
)
def test_activations_and_their_gradients(name):
    function = getattr(torch.nn.functional, name)

    def both(x):
        x = x.detach().requires_grad_()
        y = function(x)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    program = assert_lowered(both, torch.tensor([-30.0, -3.0, -1.0, -0.25, 0.0, 0.25, 1.0, 3.0, 30.0]))
    assert not calls(program)


def test_special_functions_are_single_operators():
    x = torch.rand(5) + 1
    for fn in (torch.special.bessel_j0, torch.special.i1e, torch.special.erfcx, torch.lgamma):
        assert len(operators(assert_exact(fn, x))) == 1
    assert_exact(torch.igamma, x, x + 1)
    assert_exact(torch.special.zeta, x, x)
    assert_exact(lambda x: torch.special.chebyshev_polynomial_t(x, 3), x)
    assert_exact(lambda x: torch.polygamma(2, x), x)
