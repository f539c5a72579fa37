"""Tensors that are concatenated, and read in part beside being read whole: no reader goes beyond its own end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compare import assert_same_as_eager, compile_strict, reset

quick = pytest.mark.quick


def whole_and(part: Callable[[torch.Tensor], torch.Tensor], dim: int = 0) -> Callable[..., Any]:
    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        joined = torch.cat([a.sin(), b], dim)
        return joined.sigmoid(), part(joined).cos()

    return fn


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inside the first": lambda c: c[:2],
    "the first": lambda c: c[:4],
    "across the joint": lambda c: c[:6],
    "all but one": lambda c: c[:8],
    "from inside": lambda c: c[2:7],
    "the second": lambda c: c[4:],
    "one row": lambda c: c[3],
    "every second": lambda c: c[::2],
    "none": lambda c: c[:0],
    "narrow": lambda c: c.narrow(0, 1, 4),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_rows(part: str):
    assert_same_as_eager(whole_and(PARTS[part]), lambda: [torch.randn(4, 8), torch.randn(5, 8)])


@pytest.mark.parametrize("part", ["inside the first", "across the joint", "from inside"])
def test_a_part_of_columns(part: str):
    fn = whole_and(lambda c: PARTS[part](c.t()), dim=1)
    assert_same_as_eager(fn, lambda: [torch.randn(8, 4), torch.randn(8, 5)])


@quick
def test_a_part_is_part_of_another_concatenation():
    def fn(a, b):
        joined = torch.cat([a, b])
        return joined.sin(), torch.cat([joined[:2], a, joined[3:7]]).cos(), torch.cat([joined[:5], joined[:3]], 0)[:6]

    assert_same_as_eager(fn, lambda: [torch.randn(4, 8), torch.randn(5, 8)])


def test_three_parts_and_three_readers():
    def fn(a, b, c):
        joined = torch.cat([a.exp(), b, c * 2])
        return joined.sin(), joined[:5] + 1, joined[:9].sum(0), joined[2:]

    assert_same_as_eager(fn, lambda: [torch.randn(4, 8), torch.randn(3, 8), torch.randn(6, 8)])


def test_gradients_of_parts():
    def fn(a, b):
        joined = torch.cat([a, b])
        return joined.sin(), joined[:6].cos(), joined[:2].exp()

    assert_same_as_eager(
        fn, lambda: [torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)], backward=True
    )


@pytest.mark.parametrize(
    "part", [lambda c, a: c[:2], lambda c, a: c[: a.shape[0]], lambda c, a: c[: a.shape[0] + 1], lambda c, a: c[1:]]
)
def test_ends_that_are_known_when_it_runs(part):
    def fn(a, b):
        joined = torch.cat([a, b])
        return joined.sin(), part(joined, a).cos()

    reset()
    compiled = compile_strict(fn, dynamic=True)
    for first, second in ((4, 5), (7, 2), (2, 9), (1, 3), (3, 1)):
        given = torch.randn(first, 8), torch.randn(second, 8)
        for found, expected in zip(compiled(*given), fn(*given), strict=True):
            torch.testing.assert_close(found, expected)
