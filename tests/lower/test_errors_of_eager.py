"""Calls that eager refuses, or that touch tensors without elements: the same class of error, never a number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ferrite
from tests.compare import assert_same_as_eager, compile_strict, reset

ONE = torch.tensor([3])


def both(fn, *given, dynamic=None):
    """The classes of error of eager and of the compiled function; a result is no error."""
    reset()
    found = []
    for call in (fn, compile_strict(fn, dynamic=dynamic)):
        try:
            call(*(item.clone() if isinstance(item, torch.Tensor) else item for item in given))
            found.append(None)
        except Exception as problem:
            found.append(type(problem))
    return found


def set_columns(x, mask):
    x[:, mask] = 7.0
    return x


REFUSED = {
    "max of nothing": (lambda x: x.max(), torch.ones(0, 3)),
    "min of empty rows": (lambda x: x.min(0), torch.ones(0, 3)),
    "adaptive pool of integers": (lambda x: F.adaptive_max_pool2d(x, 2), torch.ones(1, 1, 4, 4, dtype=torch.int64)),
    "pool of truths": (lambda x: F.avg_pool2d(x, 2), torch.ones(1, 1, 4, 4, dtype=torch.bool)),
    "a mask of bytes": (lambda x, m: x.index_put((m,), torch.tensor(1.0)), torch.ones(3), torch.ones(3).byte()),
    "a mask too short": (set_columns, torch.ones(2, 4), torch.ones(3) > 0),
    "masked_scatter by bytes": (lambda x, m: x.masked_scatter(m, x), torch.ones(3), torch.ones(3).byte()),
    "selected rows of nothing": (lambda x, i: x.index_select(0, i), torch.ones(0, 3), ONE),
    "gather of one": (lambda x, i: x.gather(0, i), torch.ones(1), ONE),
    "scatter to one": (lambda x, i: x.scatter(0, i, 2.0), torch.ones(1), ONE),
    "index_put to one": (lambda x, i: x.index_put((i,), torch.tensor(2.0)), torch.ones(1, 1), ONE),
    "take from one": (lambda x, i: x.take(i), torch.ones(1, 1), ONE),
    "a table of one row": (lambda x, i: F.embedding(i, x), torch.ones(1, 4), ONE),
    "one class": (lambda x, i: F.nll_loss(x, i), torch.ones(1, 1), ONE),
    "scatter to nothing": (lambda x, i: x.scatter(0, i, 2.0), torch.ones(0), ONE),
    "unpool to one": (lambda x, i: F.max_unpool2d(x, i, 1), torch.ones(1, 1, 1, 1), ONE.view(1, 1, 1, 1)),
    "unpool too far": (lambda x, i: F.max_unpool2d(x, i, 2), torch.ones(1, 1, 1, 1), ONE.view(1, 1, 1, 1) * 9),
    "a bag too far": (lambda x, i: F.embedding_bag(i, x), torch.ones(2, 4), torch.tensor([[5, 0], [0, 1]])),
    "bags that begin late": (
        lambda x, i, o: F.embedding_bag(i, x, o),
        torch.ones(4, 2),
        torch.tensor([0, 1, 2]),
        torch.tensor([1, 2]),
    ),
    "gather of a number": (lambda x, i: x.gather(0, i), torch.tensor(1.0), ONE),
    "index_fill of a number": (lambda x, i: x.index_fill(0, i, 2.0), torch.tensor(1.0), ONE),
    "a view too wide": (lambda x: torch.as_strided(x, (2, 2), (1, 2)) + 1, torch.ones(3)),
    "a copy of a view of nothing": (lambda x: torch.as_strided_copy(x, (2, 2), (1, 2)), torch.ones(0)),
    "parts of two types": (lambda x: torch.complex(x, x.double()), torch.ones(3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_class_of_the_error_is_eagers(name):
    eager, ours = both(*REFUSED[name])
    assert eager is not None, "eager does not refuse it any more"
    assert ours is eager


NEAR_MISSES = {
    "no rows selected of nothing": (lambda x, i: x.index_select(0, i), torch.ones(0, 3), ONE[:0]),
    "max of one": (lambda x: x.max(), torch.ones(1, 1)),
    "max of nothing at all, over rows": (lambda x: x.max(1), torch.ones(0, 3)),
    "pool of whole numbers": (lambda x: F.avg_pool2d(x, 2), torch.ones(1, 1, 4, 4, dtype=torch.int64)),
    "a mask": (set_columns, torch.ones(2, 3), torch.arange(3) > 1),
    "gather of one": (lambda x, i: x.gather(0, i), torch.ones(1), ONE * 0),
    "scatter to one": (lambda x, i: x.scatter(0, i, 2.0), torch.ones(1), ONE * 0),
    "scatter of nothing to nothing": (lambda x, i: x.scatter(0, i, 2.0), torch.ones(0), ONE[:0]),
    "a table of one row": (lambda x, i: F.embedding(i, x), torch.ones(1, 4), ONE * 0),
    "one bag": (lambda x, i: F.embedding_bag(i, x), torch.ones(2, 4), torch.tensor([[1, 0]])),
    "unpool to nothing": (lambda x, i: F.max_unpool1d(x, i, 2, 2, 1), torch.ones(1, 1, 1), torch.zeros(1, 1, 1).long()),
    "nothing filled in a number": (lambda x, i: x.index_fill(0, i, 2.0), torch.tensor(1.0), ONE[:0]),
    "a view": (lambda x: torch.as_strided(x, (2, 2), (1, 2)) + 1, torch.arange(4.0)),
    "arc tangent beside a NaN": (
        torch.atan2,
        torch.tensor([0.0, -0.0, 0.0, 1.0]),
        torch.tensor([torch.nan, 0, -1, -0.0]),
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_eager_computes_is_computed(name):
    function, *given = NEAR_MISSES[name]
    assert_same_as_eager(lambda *args: function(*args), lambda: [tensor.clone() for tensor in given])


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_turn_out_empty_have_no_greatest_element():
    for fn in (lambda x: x[x > 5].max(), lambda x: x[x > 5].min(0)):
        eager, ours = both(fn, torch.ones(3))
        assert eager is not None
        assert ours is eager


SELECTING = {
    "by a number": (lambda x, n: x.select(0, n) + 1, lambda n: n),
    "by data": (lambda x, n: x[(n + 0).item()] + 1, torch.tensor),
    "by data, along columns": (lambda x, n: x.t().select(-1, (n + 0).item()) + 1, torch.tensor),
    "to write": (lambda x, n: torch.select_scatter(x, x.sum(0), 0, (n + 0).item()), torch.tensor),
}


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SELECTING)
def test_an_element_that_is_not_there_is_not_read(name, dynamic):
    """torch's fake value of a selection does not look whether there is such an element."""
    function, number = SELECTING[name]
    x = torch.arange(12.0).view(3, 4)
    reset()
    compiled = compile_strict(function, dynamic=dynamic, options={"check_bounds": True})
    for there in (2, 0, -1, -3):
        assert torch.equal(compiled(x, number(there)), function(x, number(there)))
    before = () if name == "by a number" else (-4,)  # with an error of Dynamo's own, while it traces
    for missing in (3, 17, *before):
        with pytest.raises(IndexError):
            compiled(x, number(missing))
    with pytest.raises(IndexError):
        compiled(x[:0], number(1))


def test_an_element_that_bounds_say_is_there_costs_no_question():
    reset()
    compile_strict(lambda x: x[1] + x[-2], dynamic=True)(torch.ones(5, 4))
    assert "raise IndexError" not in ferrite.last_compile().graphs[0].source


@pytest.mark.parametrize("steps", [(-1, -1.0, -3), (2, 2.5, -2.0)])
def test_ranges_by_a_step_of_any_sign(steps):
    def fn(step):
        return torch.arange(64, -64, step) if step < 0 else torch.arange(-64, 64, step)

    reset()
    compiled = compile_strict(fn, dynamic=True)
    for step in steps:
        torch.testing.assert_close(compiled(step), fn(step), rtol=0, atol=0)


@pytest.mark.parametrize("by", [(-3, -2), (3, 2, -4)])
def test_sizes_divided_by_a_number_of_either_sign(by):
    def fn(x, n):
        return x.new_ones(x.shape[0] // n + 20) + x.shape[0] % n

    reset()
    compiled = compile_strict(fn, dynamic=True)
    for n in by:
        torch.testing.assert_close(compiled(torch.ones(9), n), fn(torch.ones(9), n), rtol=0, atol=0)
