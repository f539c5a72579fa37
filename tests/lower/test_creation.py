"""Tensors made of nothing, copies and conversions, lists of tensors, and small integers for floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.capture import torch_api
from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.loop_operations import Compute
from ferrite.ir.program.nodes import Allocate
from ferrite.lower.graph import lower_module
from tests.lower.lowered import assert_lowered, calls, run, traced

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def test_memory_without_contents_is_allocated_and_not_computed():
    lowered = lower_module(traced(lambda x: [torch.empty_like(x), x.new_empty(3), torch.empty(2, 2)], torch.ones(2)))
    verify_program(lowered.program)
    assert [type(operation) for operation in lowered.program.operations] == [Allocate] * 3
    made = interpret(lowered.program, [torch.ones(2)], lowered.objects)
    assert [tuple(tensor.shape) for tensor in made] == [(2,), (3,), (2, 2)]


def test_memory_without_contents_of_unknown_size():
    fn = lambda x: torch.empty(x.shape[0] + 1, 2).zero_() + x.new_empty(2, x.shape[0]).shape[1]  # noqa: E731
    assert not calls(run(fn, lambda: [torch.randn(5)], dynamic=True))
    gm = make_fx(lambda x: x.new_empty(2, x.shape[0] * 2), tracing_mode="symbolic")(torch.randn(3))
    lowered = lower_module(with_list_output(gm))
    (made,) = interpret(verify_program(lowered.program), [torch.randn(7)], lowered.objects)
    assert made.shape == (2, 14)


def with_list_output(gm):
    output = gm.graph.output_node()
    output.args = (list(output.all_input_nodes),)
    return gm


def test_constants_are_written_where_they_are_used():
    program = assert_lowered(lambda x: x * torch.full((3,), 2.5) + torch.ones(3), torch.randn(3))
    assert len(program.operations) == 1
    assert [buffer.name for buffer in program.buffers if buffer.kind == "owned"] == [program.outputs[0]]


def test_ranges():
    assert not calls(assert_lowered(lambda x: x + torch.arange(5), torch.randn(5)))
    assert_lowered(lambda x: x + torch.arange(5, 0, -1, dtype=torch.float16), torch.randn(5))
    assert_lowered(lambda x: x + torch.arange(0.0, 1.0, 0.1), torch.randn(10))
    assert_lowered(lambda x: (torch.linspace(0, 1, 7), torch.linspace(3, -4, 5, dtype=torch.int64)), torch.randn(1))
    assert_lowered(lambda x: (torch.eye(3, 4), x.tril(), x.triu(1), x.bool().tril(-1)), torch.randn(2, 4, 4))


def test_ranges_of_unknown_length():
    def fn(x):
        places = torch.arange(x.shape[0])
        return x * places.unsqueeze(1), x.new_full((x.shape[1],), x.shape[0]), x.triu(x.shape[0] - 2)

    program = run(fn, lambda: [torch.randn(5, 4)], dynamic=True)
    assert not calls(program)


def test_conversions_keep_strides():
    x = torch.randn(3, 4).t()
    program = assert_lowered(lambda x: (x.to(torch.float16), x.to(torch.int32), x.double()), x)
    assert [str(buffer.strides) for buffer in program.buffers[1:]] == [str(program.buffers[0].strides)] * 3


# --- lists ------------------------------------------------------------------------------------------------------------


def pair():
    return torch.tensor([1.0, -2.0, 3.0]), torch.rand(2, 2) + 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch._foreach_add([a, b], 2),
        lambda a, b: torch._foreach_add([a, b], [b.sum(), a.sum()], alpha=3),
        lambda a, b: torch._foreach_mul([a, b], [2.0, 3.0]),
        lambda a, b: torch._foreach_sub([a, b], [a, b]),
        lambda a, b: torch._foreach_div([a, b], b.sum()),
        lambda a, b: torch._foreach_maximum([a, b], 1.5),
        lambda a, b: torch._foreach_clamp_max([a, b], [0.5, 1.5]),
        lambda a, b: torch._foreach_addcmul([a, b], [a, b], [a, b], value=0.5),
        lambda a, b: torch._foreach_addcdiv([a, b], [a, b], [a, b], [0.5, 2.0]),
        lambda a, b: torch._foreach_lerp([a, b], [b.sum() + a, b * 2], 0.25),
        lambda a, b: torch._foreach_pow([a, b], 2),
        lambda a, b: torch._foreach_pow(2.0, [a, b]),
        lambda a, b: torch._foreach_sqrt(torch._foreach_abs([a, b])),
        lambda a, b: torch._foreach_neg([a, b]),
        lambda a, b: torch._foreach_norm([a, b]),
        lambda a, b: torch._foreach_max([a, b]),
    ],
)
def test_lists_are_loops_without_calls(fn):
    a, b = pair()
    assert not calls(assert_lowered(fn, a, b))


def test_lists_in_place():
    def step(a, b):
        torch._foreach_mul_([a, b], 0.5)
        torch._foreach_addcdiv_([a, b], [a, b], [b.sum(), b], value=-0.1)
        torch._foreach_copy_([a], [b.sum().expand(3)])
        torch._foreach_zero_([b])
        return a, b

    def both(a, b):
        return step(a.clone(), b.clone())

    program = assert_lowered(both, *pair())
    assert not calls(program)
    program = run(step, lambda: list(pair()))
    assert not calls(program)


def test_an_element_of_a_list_sees_what_was_written_before_it():
    def fn(a):
        b = a.clone()
        torch._foreach_add_([b, b], [b, b])
        return b

    assert not calls(assert_lowered(fn, torch.tensor([1.0, 2.0])))


# --- small integers ---------------------------------------------------------------------------------------------------

decomposed = torch_api.quantized_decomposed()
quantized = pytest.mark.skipif(decomposed is None, reason="this torch has no such operators")


@quantized
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_as_small_integers_and_back(dtype):
    def fn(x, scale, zero):
        small = decomposed.quantize_per_tensor.default(x, 0.03, 3, -128, 127, torch.int8)
        other = decomposed.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
        back = decomposed.dequantize_per_tensor.default(small, 0.03, 3, -128, 127, torch.int8, out_dtype=dtype)
        return small, other, back, decomposed.dequantize_per_tensor.tensor(other, scale, zero, 0, 255, torch.uint8)

    inputs = torch.linspace(-9, 9, 301).to(dtype), torch.tensor(0.07), torch.tensor(128)
    assert not calls(assert_lowered(fn, *inputs))


@quantized
def test_channels_as_small_integers_and_back():
    def fn(x, scales, zeros):
        small = decomposed.quantize_per_channel.default(x, scales, zeros, 1, -128, 127, torch.int8)
        return small, decomposed.dequantize_per_channel.default(small, scales, zeros, 1, -128, 127, torch.int8)

    program = assert_lowered(fn, torch.randn(4, 3, 5), torch.rand(3) / 9 + 0.01, torch.tensor([0, 5, -7]))
    assert not calls(program)
    assert all(isinstance(operation, Compute) for operation in program.operations)


@quantized
def test_bounds_that_eager_refuses_are_left_to_it():
    fn = lambda x: decomposed.quantize_per_tensor.default(x, 0.1, 0, -300, 300, torch.int8)  # noqa: E731
    assert len(calls(lower_module(traced(fn, torch.randn(3))).program)) == 1


def test_memory_that_is_filled_at_once_is_never_written():
    program = run(lambda a: torch.empty(4).fill_(1) + a, lambda: [torch.randn(4)])
    assert [type(operation) for operation in program.operations] == [Compute]
    assert [buffer.kind for buffer in program.buffers] == ["input", "owned"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_round_trip_through_small_integers(dtype):
    x = torch.cat([torch.linspace(-40, 40, 301), torch.tensor([float("nan"), float("inf")])]).to(dtype)
    assert not calls(assert_lowered(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 7, -128, 127), x))
    scale, zero = torch.tensor(0.25), torch.tensor(7, dtype=torch.int32)
    both = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    for on in (0, 1):
        fn = lambda x, scale, zero, on: both(x, scale, zero, on, -128, 127)  # noqa: E731
        assert not calls(assert_lowered(fn, x, scale, zero, torch.tensor([on])))


def test_the_round_trip_of_channels():
    fn = lambda x, s, z: aten.fake_quantize_per_channel_affine_cachemask(x, s, z, 1, -8, 7)  # noqa: E731
    zeros = torch.tensor([0, 2, -3], dtype=torch.int32)
    assert not calls(assert_lowered(fn, torch.randn(4, 3, 5) * 5, torch.rand(3) + 0.1, zeros))


def test_small_literals_are_part_of_the_expression():
    def fn(x):
        literals = torch.tensor(2.5), torch.tensor([3, 3]), torch.tensor([True, False]), torch.tensor(math.nan)
        return x * literals[0], x[torch.tensor([3, 2, 1, 0])], *literals[1:], torch.tensor([0.5, 1.5])

    program = str(run(fn, lambda: [torch.randn(4)], exact=False))
    assert program.count("= constant(") == 1  # the last one has no even steps
    assert "arg0_1[-i0 + 3]" in program  # nothing to check either


def test_zeros_of_both_signs_are_no_one_number():
    program = run(lambda x: x / torch.tensor([0.0, -0.0]), lambda: [torch.ones(2)], exact=False)
    assert "= constant(" in str(program)
