"""Indexing, gathering and scattering as loop programs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from tests.compare import compile_strict
from tests.lower.lowered import assert_interpreted_as_eager, eager_calls, kinds, program_of

aten = torch.ops.aten


def interpreted(fn, **settings):
    return compile_strict(fn, options={"executor": "interpreter"}, **settings)


def indices(*values):
    return torch.tensor(values)


def test_a_gather_is_part_of_the_loop_that_uses_it():
    program = program_of(lambda a, i: a.sin()[i] * 2, torch.randn(8, 4), indices(1, 5, -1))
    assert kinds(program) == ["compute"]


def test_indices_that_follow_from_the_loop_are_plain():
    program = program_of(lambda a: a[torch.arange(4) * 2], torch.randn(8, 4))
    assert kinds(program) == ["compute"]
    assert "data(" not in str(program)


def test_every_form_of_advanced_indexing():
    def fn(a, i, j):
        return a[i], a[:, i], a[i, j], a[i, :, j], a[:, i, j], a[i[:, None], j], a[..., i], a[i, None, 1:], a[i, 2]

    assert_interpreted_as_eager(fn, lambda: [torch.randn(5, 6, 7), indices(0, -1, 3), indices(2, 2, -5)])


def test_indexing_symbolic_sizes():
    def fn(a, i):
        return a[i] + 1, a[:, i], a.gather(0, i[:, None]), a.index_select(0, i), a.take(i)

    make = lambda: [torch.randn(6, 5), indices(1, 0, 4)]  # noqa: E731
    assert_interpreted_as_eager(fn, make, dynamic=True)
    assert not eager_calls(program_of(fn, *make(), dynamic=True))


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, i: a[i],
        lambda a, i: a.index_put((i,), torch.zeros(())),
        lambda a, i: F.embedding(i, a),
        lambda a, i: a.index_select(0, i),
    ],
)
def test_an_index_outside_is_an_error_as_in_eager(fn):
    a, wrong = torch.randn(3, 2), indices(0, 3)
    with pytest.raises((IndexError, RuntimeError)) as said:
        fn(a, wrong)
    with pytest.raises(said.type, match=re.escape(str(said.value).splitlines()[0])):
        interpreted(fn)(a, wrong)


def test_an_index_of_the_loop_that_leaves_the_tensor_is_an_error_too():
    fn = lambda a: a[torch.arange(4)]  # noqa: E731
    with pytest.raises(IndexError):
        interpreted(fn)(torch.randn(3))


def test_gather_and_scatter_do_not_count_from_the_end():
    for fn in (lambda a, i: a.gather(0, i), lambda a, i: a.scatter(0, i, 1.0), lambda a, i: a.index_add(0, i, a[:1])):
        with pytest.raises((IndexError, RuntimeError)) as said:
            fn(torch.randn(3), indices(-1))
        with pytest.raises(said.type):
            interpreted(fn)(torch.randn(3), indices(-1))


def test_writing_at_indices_copies_once_and_stores():
    fn = lambda a, i, v: (a.index_put((i,), v), a.index_put((i,), v, accumulate=True))  # noqa: E731
    inputs = torch.randn(8, 4), indices(1, -2), torch.randn(2, 4)
    assert_interpreted_as_eager(fn, lambda: list(inputs))
    assert kinds(program_of(fn, *inputs)) == ["compute"] * 4


def test_repeated_indices_add_up():
    fn = lambda a, i, v: a.index_put((i,), v, accumulate=True)  # noqa: E731
    assert_interpreted_as_eager(fn, lambda: [torch.zeros(3), indices(1, 1, 1, 2), torch.ones(())])


def test_a_mask_with_one_value_is_a_choice():
    def fn(a, m, v):
        b = a.clone()
        b[m] = 2.5
        return b, a.masked_fill(m, -1.0), a.index_put((m,), v, accumulate=True)

    make = lambda: [torch.randn(4, 3), torch.tensor([True, False, True, True])[:, None].expand(4, 3), torch.tensor(2.0)]  # noqa: E731
    assert_interpreted_as_eager(fn, make)
    assert not eager_calls(program_of(fn, *make()))


def test_a_mask_with_rows_is_a_choice():
    fn = lambda a, m, v: a.index_put((m,), v)  # noqa: E731
    make = lambda: [torch.randn(4, 3), torch.tensor([True, False, True, True]), torch.randn(3)]  # noqa: E731
    assert_interpreted_as_eager(fn, make)
    assert kinds(program_of(fn, *make())) == ["compute"]


def test_a_mask_that_decides_a_size_is_called_with_a_reason():
    program = program_of(
        lambda a, m, v: a.index_put((m,), v), torch.randn(4), torch.tensor([True, False, True, False]), torch.randn(2)
    )
    (call,) = eager_calls(program)
    assert "known only when it runs" in call.reason


def test_scattering_in_every_mode():
    def fn(a, i, s):
        results = [
            a.scatter(0, i, s),
            a.scatter(1, i % 3, 2.0),
            a.scatter_add(0, i, s),
            a.scatter(0, i, s, reduce="multiply"),
        ]
        for reduce in ("sum", "prod", "mean", "amax", "amin"):
            for include in (True, False):
                results.append(a.scatter_reduce(0, i, s, reduce, include_self=include))
        return results

    make = lambda: [torch.randn(4, 3), torch.tensor([[0, 1, 2], [3, 1, 0]]), torch.randn(2, 3)]  # noqa: E731
    assert_interpreted_as_eager(fn, make)
    assert not eager_calls(program_of(fn, *make()))


def test_writing_slices_in_every_mode():
    def fn(a, i, s):
        results = [a.index_add(0, i, s, alpha=2), a.index_copy(0, i, s), a.index_fill(0, i, 3.0), a.put(i, s[:, 0])]
        return results + [a.index_reduce(0, i, s, mode) for mode in ("prod", "mean", "amax", "amin")]

    make = lambda: [torch.randn(4, 3), indices(2, 0), torch.randn(2, 3)]  # noqa: E731
    assert_interpreted_as_eager(fn, make)
    assert not eager_calls(program_of(fn, *make()))


def test_a_tensor_scattered_into_is_not_copied_when_it_is_written_in_place():
    def fn(a, i, v):
        a.index_put_((i,), v)
        a.scatter_add_(0, i, v)

    assert_interpreted_as_eager(fn, lambda: [torch.randn(5), indices(3, 1), torch.randn(2)])


def test_masked_scatter_takes_elements_in_order():
    fn = lambda a, m, s: a.masked_scatter(m, s)  # noqa: E731
    make = lambda: [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4) > 0, torch.randn(12, requires_grad=True)]  # noqa: E731
    assert_interpreted_as_eager(fn, make, backward=True)
    assert kinds(program_of(fn, *[each.detach() for each in make()])) == ["scan", "compute"]


@pytest.mark.parametrize("given", [0, 2, 3, 4])
def test_masked_scatter_of_too_few_elements_raises_as_in_eager(given):
    compiled = compile_strict(lambda a, m, s: a.masked_scatter(m, s) + 1, fullgraph=True)
    x, mask, source = torch.zeros(2, 2), torch.tensor([[True, False], [True, True]]), torch.arange(float(given))
    if given < 3:
        with pytest.raises(RuntimeError, match="Number of elements of source < number of ones in mask"):
            compiled(x, mask, source)
    else:
        assert torch.equal(compiled(x, mask, source), x.masked_scatter(mask, source) + 1)


@pytest.mark.parametrize("right", [True, False])
def test_binary_search_finds_what_eager_finds(right):
    def fn(line, values):
        return torch.searchsorted(line, values, right=right), torch.bucketize(
            values, line[0], right=right, out_int32=True
        )

    line = torch.randn(2, 7).sort(-1).values
    values = torch.cat([torch.randn(2, 5), line[:, :2], torch.tensor([[torch.nan], [torch.inf]])], 1)
    assert_interpreted_as_eager(fn, lambda: [line, values])
    assert not eager_calls(program_of(fn, line, values))


def test_embeddings_and_their_gradient():
    def fn(weight, i):
        return F.embedding(i, weight, padding_idx=1).sin(), F.embedding(i, weight, scale_grad_by_freq=True)

    make = lambda: [torch.randn(6, 3, requires_grad=True), torch.tensor([[0, 1], [5, 5]])]  # noqa: E731
    assert_interpreted_as_eager(fn, make, backward=True)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(mode):
    def fn(weight, i, offsets):
        return F.embedding_bag(i, weight, offsets, mode=mode, padding_idx=2)

    make = lambda: [torch.randn(10, 3, requires_grad=True), indices(1, 2, 4, 5, 4, 3, 2, 9), indices(0, 4, 4)]  # noqa: E731
    assert_interpreted_as_eager(fn, make, backward=True)
    assert not eager_calls(program_of(fn, *[each.detach() for each in make()]))


def test_losses_over_classes():
    def fn(x, t, w):
        return (
            F.cross_entropy(x, t, w),
            F.nll_loss(x.log_softmax(1), t, ignore_index=1),
            F.cross_entropy(x, t, label_smoothing=0.1),
        )

    make = lambda: [torch.randn(4, 5, requires_grad=True), indices(1, 0, 4, 2), torch.rand(5)]  # noqa: E731
    assert_interpreted_as_eager(fn, make, backward=True)
    assert not eager_calls(program_of(fn, *[each.detach() for each in make()]))


def test_jagged_rows_and_back():
    def fn(values, offsets):
        padded = aten._jagged_to_padded_dense_forward(values, [offsets], [4], -1.0)
        return padded, aten._padded_dense_to_jagged_forward(padded, [offsets], 6)

    make = lambda: [torch.arange(12.0).reshape(6, 2), indices(0, 2, 2, 6)]  # noqa: E731
    assert_interpreted_as_eager(fn, make)
    assert not eager_calls(program_of(fn, *make()))
