"""The algebra of pieces, checked on plain tensors: every axis and every dimension of joins, for ranks up to four."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ferrite.graph import fake_value
from ferrite.passes.pre_grad.pieces import Moves, PieceRun, operands_of, piece_of, stretches_of
from ferrite.passes.pre_grad.predicates import concat_view
from tests.torch_level import captured

pytestmark = pytest.mark.quick


def joined(base: torch.Tensor, run: PieceRun, dim: int) -> torch.Tensor:
    """What the algebra says, computed."""
    return Moves(lambda target, *args: target(*args), lambda tensor: tensor).run(base, run, dim)


def bases(rank: int, axis: int, size: int) -> Iterator[torch.Tensor]:
    """A tensor with a given size along one axis; dense, and with every other element of memory skipped."""
    shape = [2, 3, 2, 5][:rank]
    shape[axis] = size
    yield torch.arange(math.prod(shape)).reshape(shape)
    wide = torch.arange(2 * math.prod(shape)).reshape([*reversed(shape[1:]), shape[0] * 2])
    yield wide.permute(*reversed(range(rank)))[::2]


def stretches(size: int, width: int) -> Iterator[tuple[int, int]]:
    """Where a run may begin and end: everything, and one piece less on either side."""
    yield 0, size
    if size > width > 0:
        yield width, size
        yield 0, size - width


def slices(base: torch.Tensor, axis: int, lo: int, hi: int, width: int) -> list[torch.Tensor]:
    return [base.narrow(axis, start, width) for start in range(lo, hi, width)]


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_slices_joined_along_their_axis(rank):
    for axis in range(rank):
        for base in bases(rank, axis, 6):
            parts = base.split([1, 0, 3, 2], axis)
            for first, last in itertools.combinations(range(5), 2):
                lo, hi = sum([1, 0, 3, 2][:first]), sum([1, 0, 3, 2][:last])
                run = PieceRun(axis, lo, hi, "slice", last - first, whole=(lo, hi) == (0, 6))
                result = joined(base, run, axis)
                assert run.form(axis) == "stretch"
                assert torch.equal(result, torch.cat(parts[first:last], axis))
                assert result.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_slices_joined_along_another_dimension(rank):
    for axis, dim in itertools.permutations(range(rank), 2):
        for width, base in itertools.product((1, 2, 3), bases(rank, axis, 6)):
            for lo, hi in stretches(6, width):
                run = PieceRun(axis, lo, hi, "slice", (hi - lo) // width, whole=(lo, hi) == (0, 6))
                assert run.form(dim) == "slices concatenated"
                assert torch.equal(joined(base, run, dim), torch.cat(slices(base, axis, lo, hi, width), dim))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_slices_stacked(rank):
    for axis, dim in itertools.product(range(rank), range(rank + 1)):
        for width, base in itertools.product((1, 2, 3), bases(rank, axis, 6)):
            for lo, hi in stretches(6, width):
                run = PieceRun(axis, lo, hi, "slice", (hi - lo) // width, lifted=True, whole=(lo, hi) == (0, 6))
                assert run.form(dim) == "slices stacked"
                assert torch.equal(joined(base, run, dim), torch.stack(slices(base, axis, lo, hi, width), dim))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_selects_stacked_and_joined(rank):
    for axis in range(rank):
        for base in bases(rank, axis, 4):
            for lo, hi in stretches(4, 1):
                parts = base.unbind(axis)[lo:hi]
                whole = (lo, hi) == (0, 4)
                for dim in range(rank):
                    run = PieceRun(axis, lo, hi, "select", hi - lo, lifted=True, whole=whole)
                    assert run.form(dim) == "selects stacked"
                    assert torch.equal(joined(base, run, dim), torch.stack(parts, dim))
                for dim in range(rank - 1):
                    run = PieceRun(axis, lo, hi, "select", hi - lo, whole=whole)
                    assert run.form(dim) == "selects concatenated"
                    assert torch.equal(joined(base, run, dim), torch.cat(parts, dim))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_pieces_reshaped_alike(rank):
    for axis, count, width in itertools.product(range(rank), (2, 3, 8), (1, 2)):
        for base in bases(rank, axis, count * width):
            parts = slices(base, axis, 0, count * width, width)
            for shape in shapes(parts[0].numel()):
                run = PieceRun(axis, 0, count * width, "slice", count, shape=shape, whole=True)
                for dim in range(len(shape)):
                    assert run.form(dim) == "reshaped"
                    expected = torch.cat([part.reshape(shape) for part in parts], dim)
                    assert torch.equal(joined(base, run, dim), expected)
                lifted = PieceRun(axis, 0, count * width, "slice", count, True, shape, whole=True)
                for dim in range(len(shape) + 1):
                    expected = torch.stack([part.reshape(shape) for part in parts], dim)
                    assert torch.equal(joined(base, lifted, dim), expected)


def shapes(elements: int) -> Iterator[tuple[int, ...]]:
    yield (elements,)
    yield 1, elements
    if elements % 2 == 0:
        yield elements // 2, 2
        yield 2, 1, elements // 2


def test_nothing_in_every_piece():
    base = torch.empty(0, 3)
    assert joined(base, PieceRun(0, 0, 0, "slice", 4, whole=True), 1).shape == torch.cat([base] * 4, 1).shape
    assert joined(base, PieceRun(0, 0, 0, "slice", 4, True, whole=True), 1).shape == torch.stack([base] * 4, 1).shape


# --- read off a graph -------------------------------------------------------------------------------------------------


def runs_of(fn: Any, *inputs: torch.Tensor) -> list[tuple[int, int, int] | None]:
    """For the last join of a graph: where each stretch of its operands begins and ends, and in how many pieces."""
    graph = captured(fn, inputs).gm.graph
    join = [found for node in graph.nodes if (found := concat_view(node)) is not None][-1]
    value = [fake_value(node) for node in graph.nodes if concat_view(node) is not None][-1]
    found = stretches_of(operands_of(join, value.dim()), join.dim)
    return [each.run and (each.run.lo, each.run.hi, each.run.count) for each in found]


X, Y = torch.arange(24.0).reshape(4, 6), torch.arange(24.0, 48.0).reshape(4, 6)
FOREIGN = None
TABLE = {
    "in order": (lambda p, q, x: [p[0], p[1], p[2], p[3]], [(0, 6, 4)]),
    "reversed": (lambda p, q, x: [p[3], p[2], p[1], p[0]], [(5, 6, 1), (3, 5, 1), (1, 3, 1), (0, 1, 1)]),
    "repeated": (lambda p, q, x: [p[0], p[1], p[1], p[2]], [(0, 3, 2), (1, 5, 2)]),
    "part": (lambda p, q, x: [p[1], p[2]], [(1, 5, 2)]),
    "two bases": (lambda p, q, x: [p[0], p[1], q[2], q[3]], [(0, 3, 2), (3, 6, 2)]),
    "the last is the next of another": (lambda p, q, x: [p[0], p[1], p[2], q[3]], [(0, 5, 3), (5, 6, 1)]),
    "a foreign one between": (lambda p, q, x: [p[0], p[1], x.sin(), p[2]], [(0, 3, 2), FOREIGN, (3, 5, 1)]),
    "an item of no split": (lambda p, q, x: [p[0], torch.max(x, 1, True)[0], p[1]], [(0, 1, 1), FOREIGN, (1, 3, 1)]),
    "split, narrow and slice": (lambda p, q, x: [p[0], x.narrow(1, 1, 2), x[:, 3:]], [(0, 6, 3)]),
    "counted from the end": (lambda p, q, x: [x[:, -4:-1], p[3], x[:, -9:2]], [(2, 6, 2), (0, 2, 1)]),
    "in steps": (lambda p, q, x: [p[0], x[:, 1:3:2]], [(0, 1, 1), FOREIGN]),
}


@pytest.mark.parametrize("label", TABLE)
def test_runs_of_slices(label):
    pick, expected = TABLE[label]

    def fn(x: Any, y: Any) -> Any:
        return torch.cat(pick(x.split([1, 2, 2, 1], 1), y.split([1, 2, 2, 1], 1), x), 1)

    assert runs_of(fn, X, Y) == expected


def test_runs_of_selects():
    assert runs_of(lambda x: torch.stack([x[0], x.select(0, 1), x.unbind(0)[2]]), X) == [(0, 3, 3)]
    assert runs_of(lambda x: torch.stack([x[-1], x[0]]), X) == [(3, 4, 1), (0, 1, 1)]
    assert runs_of(lambda x: torch.cat([p.squeeze(1) for p in x.split(1, 1)]), X) == [(0, 6, 6)]


def test_an_axis_of_one_makes_a_stack():
    assert runs_of(lambda x: torch.cat([p.unsqueeze(1) for p in x.split(2)], 1), X) == [(0, 4, 2)]
    assert runs_of(lambda x: torch.cat([x[0].unsqueeze(0), x[1:2]]), X) == [(0, 1, 1), (1, 2, 1)]


def test_widths_must_be_equal_where_an_axis_is_made_of_them():
    unequal = runs_of(lambda x: torch.cat([p.reshape(4, -1) for p in x.split([2, 4], 1)], 1), X)
    assert unequal == [(0, 2, 1), (2, 6, 1)]


def test_shapes_must_be_equal():
    found = runs_of(lambda x: torch.cat([x[:2].reshape(4, 3), x[2:].reshape(4, 3).sin(), x[:2].reshape(4, 3)]), X)
    assert found == [(0, 2, 1), FOREIGN, (0, 2, 1)]


def test_empty_pieces_are_pieces():
    pick = runs_of(lambda x: torch.cat(x.split([2, 0, 0, 2])), X)
    assert pick == [(0, 4, 4)]
    skipped = runs_of(lambda x: torch.cat([x.split([2, 0, 2])[0], x.split([2, 0, 2])[2]]), X)
    assert skipped == [(0, 4, 2)]


def test_old_empty_operands_are_foreign():
    assert runs_of(lambda x: torch.cat([x[0][:0], x[:2], x[2:]]), X) == [FOREIGN, (0, 4, 2)]


def test_what_is_no_piece():
    gm = captured(lambda x: (x[::2], x.view(6, 4)[0], x.t(), x.max(0)[0]), [X]).gm
    known = [node for node in gm.graph.nodes if piece_of(node) is not None]
    assert [str(node.target) for node in known] == ["aten.select.int"]
