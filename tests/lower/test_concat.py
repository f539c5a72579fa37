"""Joining, repeating, padding and shifting as loop programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.loop_operations import Compute
from tests.lower.lowered import assert_interpreted_as_eager, eager_calls, kinds, operations, program_of

pytestmark = pytest.mark.quick


def test_parts_are_computed_straight_into_the_joined_tensor():
    program = program_of(lambda a, b: torch.cat([a.sin(), b + 1], 1), torch.randn(3, 2), torch.randn(3, 4))
    assert kinds(program) == ["compute", "compute"]
    (joined,) = {store.buffer for item in operations(program, Compute) for store in item.stores}
    assert program.outputs == (joined,)
    assert [buffer.kind for buffer in program.buffers].count("owned") == 1


def test_a_stack_is_written_once():
    program = program_of(lambda a, b: torch.stack([a + 1, b], 1), torch.randn(3, 2), torch.randn(3, 2))
    assert kinds(program) == ["compute", "compute"]


def test_empty_parts_of_one_dimension_join_anything():
    def fn(a, b):
        return torch.cat([torch.empty(0), a, b]), torch.cat([torch.empty(0), torch.empty(0)])

    assert_interpreted_as_eager(fn, lambda: [torch.randn(2, 3), torch.randn(1, 3)])


def test_channels_last_stays():
    def fn(a, b):
        return torch.cat([a, b], 1)

    def make():
        return [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last) for _ in range(2)]

    assert_interpreted_as_eager(fn, make)
    assert fn(*make()).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.lengthy
def test_types_of_parts_are_promoted():
    assert_interpreted_as_eager(
        lambda a, b: torch.cat([a, b]), lambda: [torch.ones(2, dtype=torch.int8), torch.randn(3, dtype=torch.bfloat16)]
    )
    assert_interpreted_as_eager(lambda a, b: torch.cat([a, b]), lambda: [torch.ones(2, dtype=torch.int8)] * 2)


@pytest.mark.lengthy
def test_joins_of_symbolic_sizes():
    def fn(a, b):
        return (
            torch.cat([a, b, a]),
            torch.stack([a, a], 1),
            a.repeat(2, 3),
            F.pad(a, (1, 2, 3, 0)),
            a.roll(2, 0),
            a.flip(0),
        )

    assert_interpreted_as_eager(fn, lambda: [torch.randn(3, 4), torch.randn(5, 4)], dynamic=True)
    assert not eager_calls(program_of(fn, torch.randn(3, 4), torch.randn(5, 4), dynamic=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.lengthy
def test_moving_elements_is_exact(dtype):
    def fn(a):
        return (
            a.roll(1),
            a.roll((1, -2), (0, 1)),
            a.flip(0, 1),
            a.rot90(),
            a.repeat(2, 1, 2),
            a.tile(2),
            F.pad(a, (-1, 1)),
            a.repeat_interleave(2, 0),
        )

    assert_interpreted_as_eager(fn, lambda: [torch.randn(3, 4).to(dtype)], exact=False)


def test_padding_is_read_through_not_written():
    program = program_of(lambda a: F.pad(a.sin(), (1, 1), value=3.0) * 2, torch.randn(4))
    assert kinds(program) == ["compute"]


@pytest.mark.lengthy
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pads_that_repeat_the_inside(mode):
    def fn(a):
        return F.pad(a, (2, 1, 1, 2), mode=mode)

    assert_interpreted_as_eager(fn, lambda: [torch.randn(1, 2, 4, 5, requires_grad=True)], backward=True)
    program = program_of(fn, torch.randn(1, 2, 4, 5))
    assert set(kinds(program)) == {"compute"}
    verify_program(program)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_pads_of_symbolic_sizes(mode):
    assert_interpreted_as_eager(lambda a: F.pad(a, (2, 1), mode=mode), lambda: [torch.randn(2, 3, 6)], dynamic=True)


@pytest.mark.parametrize(("sizes", "widths"), [((1, 3), (1, 2)), ((1, 1, 2, 2), (1, 1, 1, 1))])
def test_gradients_of_pads_as_wide_as_the_tensor_is(sizes, widths):
    """Each element is added to several times, in a row of single precision that is proven to hold all its places."""
    assert_interpreted_as_eager(
        lambda a: F.pad(a, widths, mode="reflect"),
        lambda: [torch.randn(sizes).half().requires_grad_()],
        backward=True,
    )
