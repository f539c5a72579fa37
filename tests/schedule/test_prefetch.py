"""While a row is gone through once more, the next one is asked for: where rows are neither short nor long, and many."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ferrite.ir.kernel.nodes import Prefetch, walk
from tests.compare import assert_same_as_eager
from tests.schedule.plans import plan_of

quick = pytest.mark.quick


def normalized(x):
    return F.layer_norm(x, x.shape[-1:])


def added(x, y):
    return F.layer_norm(x + y, x.shape[-1:])


def kept(x, y):
    total = x + y
    return F.layer_norm(total, x.shape[-1:]), total


def prefetches(fn, *inputs):
    plan = plan_of(fn, *inputs)
    return [
        (item.buffer, str(item.coordinates[0]))
        for launch in plan.launches
        for item in walk(launch.kernel.body)
        if isinstance(item, Prefetch)
    ]


@quick
def test_the_next_row_is_asked_for_in_the_second_loop():
    assert prefetches(normalized, torch.randn(2048, 1024)) == [("p1", "1024*i0 + i2 + 1024")]


@quick
def test_it_is_asked_for_of_every_tensor():
    found = prefetches(added, torch.randn(2048, 1024), torch.randn(2048, 1024))
    assert len({buffer for buffer, _ in found}) == len(found) == 2


@quick
def test_nothing_is_asked_for_where_the_first_loop_writes():
    assert prefetches(kept, torch.randn(2048, 1024), torch.randn(2048, 1024)) == []


@quick
@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (normalized, (64, 1024)),  # all of it is in a cache
        (normalized, (16384, 128)),  # short rows come with those before them
        (normalized, (64, 65536)),  # two long ones are more than a cache holds
        (lambda x: x.sum(-1), (2048, 1024)),  # gone through once
        (lambda x: x * 2 + 1, (2048, 1024)),
    ],
    ids=["small", "short rows", "long rows", "one loop", "no rows"],
)
def test_others_ask_for_nothing(fn, sizes):
    assert prefetches(fn, torch.randn(sizes)) == []


def test_the_result_is_the_same():
    assert_same_as_eager(normalized, lambda: [torch.randn(2048, 1024)], terms=4.0)
    assert_same_as_eager(added, lambda: [torch.randn(1025, 1023), torch.randn(1025, 1023)], terms=4.0)
