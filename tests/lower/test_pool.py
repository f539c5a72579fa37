"""Pooling, columns and distances as loop programs, with their gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ferrite.ir.program.loop_operations import Reduce
from ferrite.ir.program.nodes import Template
from tests.lower.lowered import assert_interpreted_as_eager, eager_calls, kinds, operations, program_of, programs_of

aten = torch.ops.aten


def image(*sizes, **settings):
    return lambda: [torch.randn(*sizes, requires_grad=True, **settings)]


POOLS = {
    "max": lambda a: F.max_pool2d(a, 3, 2, 1),
    "dilated": lambda a: F.max_pool2d(a, 2, 1, 1, dilation=2, ceil_mode=True),
    "mean": lambda a: F.avg_pool2d(a, 3, 2, 1, count_include_pad=False),
    "padded mean": lambda a: F.avg_pool2d(a, (3, 2), 2, 1, ceil_mode=True),
    "divided": lambda a: F.avg_pool2d(a, 2, divisor_override=3),
    "adaptive": lambda a: F.adaptive_avg_pool2d(a, (3, 4)),
    "adaptive max": lambda a: F.adaptive_max_pool2d(a, (3, 4)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_and_their_gradients(name):
    assert_interpreted_as_eager(POOLS[name], image(2, 3, 7, 9), backward=True)


@pytest.mark.parametrize("name", POOLS)
def test_pools_are_loops(name):
    program = program_of(POOLS[name], torch.randn(2, 3, 7, 9))
    assert not eager_calls(program)
    assert len(operations(program, Reduce)) == 1


@pytest.mark.parametrize("name", POOLS)
def test_gradients_of_pools_are_loops(name):
    forward, backward = programs_of(POOLS[name], torch.randn(2, 3, 7, 9, requires_grad=True), grad=True)
    assert not eager_calls(forward)
    assert not eager_calls(backward)


@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_of_no_results(dynamic):
    """Among no results nothing is shared out: no size is divided by zero."""

    def fn(a, b):
        means = [F.adaptive_avg_pool1d(a, 0), F.adaptive_avg_pool2d(a, (2, 0)), F.adaptive_avg_pool3d(b, (0, 3, 0))]
        return *means, F.adaptive_max_pool2d(a, (0, 3)), F.adaptive_avg_pool2d(a, (2, 1))

    given = torch.randn(2, 7, 9), torch.randn(1, 2, 4, 5, 6)
    compiled = torch.compile(fn, backend="ferrite", fullgraph=True, dynamic=dynamic, options={"strict": True})
    for mine, eager in zip(compiled(*given), fn(*given), strict=True):
        assert mine.stride() == eager.stride()
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 0), (2, 3, 0, 4), (2, 0, 4, 4), (0, 3, 4, 4)])
def test_windows_into_no_elements(sizes, dynamic):
    """Eager refuses the first two, which shows when they run: tracing lets them pass."""

    def fn(a):
        return F.adaptive_avg_pool2d(a, (2, 2))

    a = torch.randn(sizes)
    compiled = torch.compile(fn, backend="ferrite", fullgraph=True, dynamic=dynamic, options={"strict": True})
    if 0 in sizes[2:]:
        with pytest.raises(RuntimeError, match="Expected input to have non-zero size"):
            fn(a)
        with pytest.raises(RuntimeError, match="Expected input to have non-zero size"):
            compiled(a)
    else:
        assert compiled(a).stride() == fn(a).stride()


def test_the_last_nan_of_a_window_counts():
    def fn(a):
        pools = F.max_pool2d(a, 3, 2, 1, return_indices=True), F.max_pool1d(a[0, 0], 4, 2, return_indices=True)
        return *pools, F.adaptive_max_pool2d(a, (3, 4), return_indices=True)

    assert_interpreted_as_eager(fn, lambda: [torch.where(torch.rand(2, 3, 7, 9) < 0.4, math.nan, 1.0)], exact=False)
    assert_interpreted_as_eager(lambda a: F.max_pool2d(a, 3, 2), lambda: [nan_image()], backward=True)


def nan_image():
    return torch.where(torch.rand(1, 2, 7, 9) < 0.4, math.nan, torch.randn(1, 2, 7, 9)).requires_grad_()


def test_pools_in_one_and_three_dimensions():
    def fn(a, b):
        return (
            F.max_pool1d(a, 2),
            F.avg_pool1d(a, 3, 1, 1),
            F.adaptive_avg_pool1d(a, 3),
            F.max_pool3d(b, 2, 1),
            F.avg_pool3d(b, 2, 1, 1),
            F.adaptive_avg_pool3d(b, 2),
            F.adaptive_max_pool3d(b, 2),
        )

    assert_interpreted_as_eager(
        fn,
        lambda: [torch.randn(2, 3, 7, requires_grad=True), torch.randn(1, 2, 3, 4, 5, requires_grad=True)],
        backward=True,
    )


def test_pools_of_symbolic_sizes():
    def fn(a):
        return F.max_pool2d(a, 3, 2, 1), F.avg_pool2d(a, 2), F.adaptive_avg_pool2d(a, 2)

    assert_interpreted_as_eager(fn, image(2, 3, 8, 10), dynamic=True, backward=True)


def test_the_first_of_equals_is_chosen_never_the_padding():
    def fn(a):
        return F.max_pool2d(a, 3, 2, 1, return_indices=True)

    assert_interpreted_as_eager(fn, lambda: [torch.full((1, 1, 4, 5), -math.inf)])
    assert_interpreted_as_eager(fn, lambda: [torch.zeros(1, 1, 4, 5)])


def test_channels_last_pools_keep_their_strides():
    assert_interpreted_as_eager(
        lambda a: (F.max_pool2d(a, 2), F.avg_pool2d(a, 2)),
        lambda: [torch.randn(2, 3, 4, 6).to(memory_format=torch.channels_last)],
    )


def test_unpooling_puts_elements_back():
    def fn(a):
        best, places = F.max_pool2d(a, 2, return_indices=True)
        return F.max_unpool2d(best, places, 2)

    assert_interpreted_as_eager(fn, image(1, 2, 4, 6), backward=True)


def test_fractional_windows_follow_their_random_numbers():
    def fn(a, samples):
        return aten.fractional_max_pool2d(a, [2, 3], [3, 2], samples)

    make = lambda: [torch.randn(2, 3, 7, 8), torch.rand(2, 3, 2)]  # noqa: E731
    assert_interpreted_as_eager(fn, make)
    assert not eager_calls(program_of(fn, *make()))


def test_windows_as_columns_and_back():
    def fn(a):
        columns = F.unfold(a, (2, 3), dilation=(2, 1), padding=1, stride=2)
        return columns, F.fold(columns, (7, 8), (2, 3), dilation=(2, 1), padding=1, stride=2)

    assert_interpreted_as_eager(fn, image(2, 3, 7, 8), backward=True)
    assert not eager_calls(program_of(fn, torch.randn(2, 3, 7, 8)))


def test_many_columns_added_up_are_no_farther_from_double_precision_than_eagers():
    """Each element is the sum of 1024 numbers, most of which are of the other sign by turns."""

    def fn(columns):
        return F.fold(columns, (64, 64), (32, 32))

    columns = torch.randn(1, 1024, 33 * 33)
    exact = fn(columns.double())
    ours, eager = torch.compile(fn, backend="ferrite", options={"strict": True})(columns), fn(columns)
    assert (ours - exact).abs().max() <= (eager - exact).abs().max()


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, math.inf])
def test_distances_between_rows(p):
    def fn(a, b):
        return torch.cdist(a, b, p)

    make = lambda: [torch.randn(2, 4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)]  # noqa: E731
    assert_interpreted_as_eager(fn, make, backward=True)
    assert not eager_calls(program_of(fn, *[each.detach() for each in make()]))


def test_many_rows_are_left_to_a_matrix_product():
    program = program_of(lambda a, b: torch.cdist(a, b), torch.randn(40, 3), torch.randn(30, 3))
    assert [item.kind for item in operations(program, Template)] == ["matmul"]


def test_the_places_of_greatest_elements_are_kept_only_where_somebody_reads_them():
    (loop,) = operations(program_of(lambda a: F.max_pool2d(a, 2), torch.randn(1, 2, 4, 6)), Reduce)
    assert loop.destinations[0] is not None
    assert loop.destinations[1] is None


def test_pixels_and_channels_change_places_inside_a_loop():
    fn = lambda a: F.pixel_unshuffle(F.pixel_shuffle(a, 2) + 1, 2)  # noqa: E731
    assert_interpreted_as_eager(fn, lambda: [torch.randn(2, 8, 3, 5)])
    assert kinds(program_of(fn, torch.randn(2, 8, 3, 5))) == ["compute"]
