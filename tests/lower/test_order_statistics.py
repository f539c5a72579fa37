"""What a sorted row answers, and what sits beside it: pairs of rows, places of what is not zero."""

from __future__ import annotations

import pytest
import torch

from ferrite.ir.program.interpret import interpret
from ferrite.lower.graph import lower_module
from tests.lower.lowered import assert_interpreted_as_eager, eager_calls, kinds, program_of, traced

pytestmark = pytest.mark.quick
NAN = float("nan")


def test_medians_with_and_without_nan():
    def fn(a):
        return a.median(), a.nanmedian(), a.median(0), a.nanmedian(1, keepdim=True), a.median(1)

    assert_interpreted_as_eager(fn, lambda: [torch.randn(4, 5)])
    assert_interpreted_as_eager(
        fn, lambda: [torch.tensor([[1.0, NAN, 3.0, 2.0], [NAN, NAN, 0.5, 7.0], [4.0, 5.0, 6.0, 8.0]])], exact=False
    )


def test_a_median_alone_is_lowered_for_every_type():
    for dtype in (torch.int64, torch.bfloat16):
        program = program_of(lambda a: a.median(), torch.randint(0, 9, (3, 4)).to(dtype))
        assert not eager_calls(program)


def test_the_greatest_few_and_the_kth():
    def fn(a):
        return a.topk(3), a.topk(2, dim=0, largest=False), a.kthvalue(2), a.kthvalue(1, 0, True).values

    assert_interpreted_as_eager(fn, lambda: [torch.randn(5, 7)])
    assert kinds(program_of(lambda a: a.topk(2)[0], torch.randn(4, 9))) == ["sort", "compute"]


def test_where_equals_are_likely_the_order_is_left_to_torch():
    (call,) = eager_calls(program_of(lambda a: a.topk(2)[1], torch.randint(0, 3, (9,))))
    assert "equal elements" in call.reason


EQUALS = {
    "topk": lambda a: a.topk(3)[0],
    "kthvalue": lambda a: a.kthvalue(4).values,
    "median": lambda a: a.median(0, keepdim=True)[0],
    "nanmedian": lambda a: a.nanmedian(-1).values,
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", EQUALS)
def test_values_without_their_places_are_lowered_for_every_type(name):
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        assert not eager_calls(program_of(EQUALS[name], torch.randint(0, 3, (6, 9)).to(dtype)))


def test_the_place_of_the_kth_is_eagers_among_equals():
    rows = torch.randint(0, 3, (20, 9)).float()
    (call,) = eager_calls(program_of(lambda a: a.kthvalue(4), rows))
    assert "equal elements" in call.reason
    assert not eager_calls(program_of(lambda a: a.kthvalue(1), torch.tensor(3.0)))


def test_equal_elements_that_are_named_are_really_there():
    """Which of them, torch leaves open; that they are distinct and equal to the values, it does not."""
    rows = torch.randint(0, 3, (20, 9)).float()
    lowered = lower_module(traced(lambda a: [*a.topk(4), *a.median(1)], rows))
    values, places, middle, place = interpret(lowered.program, [rows], lowered.objects)
    assert torch.equal(values, rows.topk(4).values)
    assert torch.equal(rows.gather(1, places), values)
    assert all(row.unique().numel() == 4 for row in places)
    assert torch.equal(middle, rows.median(1).values)
    assert torch.equal(rows.gather(1, place[:, None])[:, 0], middle)


@pytest.mark.lengthy
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, float("inf")])
def test_distances_of_pairs(p):
    for rows in (2, 7):
        program = program_of(lambda a: torch.pdist(a, p), torch.randn(rows, 3))
        assert not eager_calls(program)


def test_places_of_what_is_not_zero_fill_up():
    def fn(a):
        return a.nonzero_static(size=3), a.nonzero_static(size=20, fill_value=-7), a[0].nonzero_static(size=1)

    assert_interpreted_as_eager(fn, lambda: [torch.tensor([[0, 1, 0, 2], [3, 0, 0, 4]])])


def test_a_histogram_of_a_given_range():
    x = torch.tensor([0.0, 0.1, 0.5, 0.99, 1.0, 1.5, -0.2, NAN])
    assert_interpreted_as_eager(lambda a: a.histc(4, 0.0, 1.0), lambda: [x.clone()], exact=False)
