"""Chunks reshaped alike and joined; stacks and joins of joins: every position, on whole graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ferrite.options import Options
from ferrite.passes.pre_grad.split_cat import PARTS
from ferrite.pipeline import PassContext
from ferrite.rewrite import NodeRule, apply_rules
from tests.torch_level import assert_same, captured

MakeInputs = Callable[[], list[Any]]


def fired(fn: Any, make_inputs: MakeInputs, *passes: Sequence[NodeRule]) -> int:
    """How often rules fire on a function, one list after the other; it computes the same afterwards."""
    before = captured(fn, make_inputs(), "modules")
    after = before.copy()
    count = sum(apply_rules(after.gm, rules, PassContext(Options())) for rules in passes)
    assert_same(before, after, make_inputs)
    assert not any(apply_rules(after.gm, rules, PassContext(Options())) for rules in passes)
    return count


def flat(value: Any) -> Any:
    return value.reshape(-1) * 2


def numbered(shape: Sequence[int], transposed: bool = False) -> MakeInputs:
    def make_inputs() -> list[Any]:
        x = torch.arange(float(math.prod(shape))).reshape([*reversed(shape)] if transposed else [*shape])
        return [x.permute(*reversed(range(x.dim()))) if transposed else x]

    return make_inputs


def shapes(elements: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(elements,), (elements // 2, 2), (2, 1, elements // 2)]
    return [shape for shape in found if math.prod(shape) == elements]


# --- reshaped and joined ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "count", "transposed"),
    [
        *((0, 3, False), (1, 2, True)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product((0, 1), (2, 5, 8), (False, True))),
    ],
)
def test_every_shape_and_place(axis, count, transposed):
    size = [6, 6]
    size[axis] = count * 2
    total, rules = 0, (*PARTS["fuse_chunk_reshape_concat_pass"], *PARTS["fuse_chunk_reshape_unsqueeze_concat_pass"])
    for shape in shapes(12):
        wide = [(shape, dim, None) for dim in range(len(shape))]
        wide += [(shape, dim, at) for at, dim in itertools.product(range(len(shape) + 1), range(len(shape) + 1))]

        total += fired(reshaped_and_joined(count, axis, wide), numbered(size, transposed), rules)
    assert total > 0


def reshaped_and_joined(count: int, axis: int, cases: Sequence[tuple[Any, int, int | None]]) -> Callable[..., Any]:
    def one(x: Any, shape: Any, dim: int, at: int | None) -> Any:
        parts = torch.chunk(x, count, axis)
        each = [parts[i].reshape(shape) for i in range(count)]
        return flat(torch.cat(each if at is None else [part.unsqueeze(at) for part in each], dim))

    return lambda x: [one(x, *case) for case in cases]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_place_of_a_stack(axis):
    size = [4, 4, 4]
    size[axis] = 8

    def one(x: Any, shape: Any, dim: int) -> Any:
        parts = torch.split(x, 2, axis)
        return flat(torch.stack([parts[i].reshape(shape) for i in range(4)], dim))

    cases = [(shape, dim) for shape in shapes(32) for dim in range(len(shape) + 1)]
    count = fired(
        lambda x: [one(x, *case) for case in cases], numbered(size), PARTS["move_reshape_out_of_split_stack_pass"]
    )
    assert count == len(cases)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_place_of_a_squeeze(axis):
    size = [2, 3, 4]
    size[axis] = 5

    def one(x: Any, dim: int, first: int) -> Any:
        parts = torch.split(x, 1, axis)
        return flat(torch.cat([parts[i].squeeze(axis) for i in range(first, 5)], dim))

    cases = [(dim, first) for dim in (0, 1) for first in (0, 1)]
    fn = lambda x: [one(x, *case) for case in cases]  # noqa: E731
    assert fired(fn, numbered(size), PARTS["fuse_chunk_squeeze_cat_pass"]) == 2, "those of all items"
    assert fired(fn, numbered(size), PARTS["fuse_split_getitem_squeeze_cat"]) == 4


def test_a_stack_along_another_dimension_than_the_split():
    """The pieces become an axis of their own, which then moves: no elements change places with others."""

    def fn(x: Any) -> Any:
        p = torch.split(x, 2, 1)
        return flat(torch.stack([p[0].reshape(3, 4), p[1].reshape(3, 4), p[2].reshape(3, 4)], 2))

    assert fired(fn, numbered([6, 6]), PARTS["move_reshape_out_of_split_stack_pass"]) == 1


def test_foreign_operands_of_a_stack():
    def fn(x: Any) -> Any:
        p = torch.split(x, 2)
        return flat(torch.stack([x[:2].sin().reshape(6), *(p[i].reshape(6) for i in range(6))], 1))

    assert fired(fn, numbered([12, 3]), PARTS["move_reshape_out_of_split_stack_pass"]) == 1


# --- stacks and joins of joins ----------------------------------------------------------------------------------------


def test_a_stack_inside_a_join_along_every_dimension():
    for rank in range(4):
        for dim in range(-rank - 1, rank + 1):
            shape = [2, 3, 4][:rank]
            make_inputs = lambda shape=shape: [torch.rand(shape), torch.rand(shape)]  # noqa: E731
            assert (
                fired(stacks_joined(dim), make_inputs, PARTS["stack_to_unsqueeze_pass"], PARTS["merge_concats_pass"])
                == 3
            )


def stacks_joined(dim: int) -> Callable[..., Any]:
    return lambda a, b: torch.cat([torch.stack([a, b], dim), torch.stack([b], dim)], dim)


def test_a_join_has_its_limit():
    def fn(x: Any) -> Any:
        return torch.cat([torch.cat([x] * 600), torch.cat([x] * 600)])

    assert fired(fn, lambda: [torch.rand(1)], PARTS["merge_concats_pass"][:1]) == 0


def test_a_join_that_rounds_stays():
    def fn(a: Any, b: Any, c: Any) -> Any:
        return torch.cat([torch.cat([a, b]), c])

    def make_inputs() -> list[Any]:
        return [torch.tensor([2049, 4097]), torch.rand(2).half(), torch.rand(2)]

    assert fired(fn, make_inputs, PARTS["merge_concats_pass"]) == 0
