"""Values that only loops see lie as what is beside them; the last reader of several is in memory before a call."""

from __future__ import annotations

import pytest
import torch

from tests.compare import assert_same_as_eager
from tests.schedule.plans import memory, plan_of

quick = pytest.mark.quick


def running(x, y):
    """Turned, summed, and turned back: eager has the sums by the turned dimension."""
    return (x.transpose(1, 2).cumsum(0) * y.transpose(1, 2)).transpose(1, 2).contiguous()


def enlarged(x):
    """Channels are side by side in what comes and in what goes; what is picked between has two readers each."""
    rows, image = torch.arange(8) // 2, x.permute(0, 3, 1, 2)
    first, second = image[:, :, rows][:, :, :, rows].exp(), image[:, :, 3 - rows][:, :, :, rows].exp()
    return ((first - second) * (first + second) + first / second).permute(0, 2, 3, 1).contiguous()


def strides(plan, *sizes):
    return {
        tuple(map(int, map(str, buffer.strides)))
        for buffer in plan.program.buffers
        if buffer.kind == "owned" and tuple(map(str, buffer.sizes)) == tuple(map(str, sizes))
    }


@quick
def test_what_is_private_goes_along_what_is_beside_it():
    assert strides(plan_of(running, torch.randn(4, 40, 50), torch.randn(4, 40, 50)), 4, 50, 40) == {(2000, 1, 50)}
    plan = plan_of(enlarged, torch.randn(2, 4, 4, 96))
    assert strides(plan, 2, 96, 8, 8) == {(6144, 1, 768, 96)}
    assert len(plan.launches) == len(memory(plan)) == 1  # so that all of it is one kernel


@quick
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.transpose(1, 2).cumsum(0),  # it is returned
        lambda x: x.transpose(1, 2).cumsum(0) @ x[0],  # a call reads it
        lambda x: x.transpose(1, 2).contiguous().cumsum(0).transpose(1, 2) + x.sum((0, 1), keepdim=True),
    ],
    ids=["returned", "called", "read both ways"],
)
def test_other_values_lie_as_in_eager(fn):
    found = strides(plan_of(fn, torch.randn(4, 40, 50)), 4, 50, 40)
    assert {each[-1] for each in found} == {1}


def halves(x, w):
    first, second = (x * 2).exp().sin(), (x + 1).exp().cos()
    both = first * second + first / second
    return torch.mm(x, w) + both


def halves_again(x, w):
    first, second = (x * 2).exp().sin(), (x + 1).exp().cos()
    both = first * second + first / second
    return torch.mm(x, w) + both + torch.mm(w, x) * first * second


@quick
def test_the_last_reader_of_several_is_there_before_a_call():
    plan = plan_of(halves, torch.randn(30, 30), torch.randn(30, 30))
    assert [len(launch.operations) for launch in plan.launches] == [3, 1]
    assert len(memory(plan)) == 2  # it, and the result: not what it reads


@quick
def test_what_others_read_later_is_kept_as_it_is():
    plan = plan_of(halves_again, torch.randn(30, 30), torch.randn(30, 30))
    assert len(plan.launches[0].operations) == 2


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (running, ((4, 40, 50), (4, 40, 50))),
        (enlarged, ((2, 4, 4, 96),)),
        (halves, ((30, 30), (30, 30))),
        (halves_again, ((30, 30), (30, 30))),
    ],
)
def test_values_are_eager_s(fn, shapes):
    assert_same_as_eager(fn, lambda: [torch.randn(shape) for shape in shapes])
