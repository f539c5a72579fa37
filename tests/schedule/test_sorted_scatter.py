"""Rows that are added to a table where memory says: sorted by row, every row of the table is made once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrite.ir.expr import data_of
from ferrite.ir.kernel.nodes import Kernel, Store, When, walk
from ferrite.schedule.steps import Plan
from tests.compare import assert_same_as_eager, compile_strict
from tests.schedule.plans import extent, loops, plan_of

quick = pytest.mark.quick


def added(table, ids, rows):
    return table.index_add(0, ids, rows)


def scaled(table, ids, rows):
    return table.index_add(0, ids, rows.exp(), alpha=2)


def to_zeros(table, ids, rows):
    return torch.zeros_like(table).index_put((ids,), rows, accumulate=True)


def in_place(table, ids, rows):
    table.index_add_(0, ids, rows)
    return table.sum()


def two_axes(table, ids, rows):
    """As the gradient of an embedding of a batch of texts."""
    return torch.zeros_like(table).index_put((ids.view(4, -1),), rows.view(4, -1, rows.shape[1]), accumulate=True)


def greatest(table, ids, rows):
    return table.index_reduce(0, ids, rows, "amax")


def least_of_rows_alone(table, ids, rows):
    return table.scatter_reduce(0, ids[:, None].expand_as(rows), rows, "amin", include_self=True)


def multiplied(table, ids, rows):
    return table.index_reduce(0, ids, rows, "prod")


def few_sources(table, ids, rows):
    """All rows are gone through, as they have to be copied."""
    return table.index_add(0, ids[:2], rows[:2])


def doubled_after(table, ids, rows):
    return table.index_add(0, ids, rows) * 2 + table


def narrowed_after(table, ids, rows):
    """As the gradient of an embedding in half precision."""
    return torch.zeros_like(table, dtype=torch.float32).index_put((ids,), rows.float(), accumulate=True).bfloat16()


ONLY_ADDED = (added, scaled, to_zeros, in_place, two_axes, greatest, least_of_rows_alone, multiplied, few_sources)
READ_AFTER = (doubled_after, narrowed_after)
SORTED = {fn.__name__: fn for fn in (*ONLY_ADDED, *READ_AFTER)}


def inputs(rows: int = 12, sources: int = 40, width: int = 96, dtype: torch.dtype = torch.float32):
    table, more = torch.randn(rows, width), torch.randn(sources, width)
    if not dtype.is_floating_point:
        table, more = table * 100, more * 100
    return [table.to(dtype), torch.randint(0, rows - 1, (sources,)), more.to(dtype)]


def is_sorted(kernel: Kernel) -> bool:
    """Whether sources are gone through row by row of the table."""
    return any(data_of(loop.axis.extent) for loop in loops(kernel, "serial"))


def kernels(plan: Plan) -> list[Kernel]:
    return [launch.kernel for launch in plan.launches]


@quick
@pytest.mark.parametrize("name", SORTED)
def test_rows_of_the_table_are_made_one_by_one(name):
    found = [kernel for kernel in kernels(plan_of(SORTED[name], *inputs())) if is_sorted(kernel)]
    assert len(found) == 1
    (rows,) = loops(found[0], "parallel")
    assert extent(rows) == 12
    pointers = {pointer.name for pointer in found[0].pointers}
    cases = [item for item in walk(rows.body) if isinstance(item, When)]
    assert len(cases) == 2, "rows with sources, and without"
    for case in cases:
        stored = [item for item in walk(case.body) if isinstance(item, Store) and item.buffer in pointers]
        assert [item.mode for item in stored] == ["set"], "an element of the table is written once"


@quick
@pytest.mark.parametrize("fn", [added, scaled, to_zeros, two_axes, few_sources, *READ_AFTER])
def test_what_fills_and_reads_the_table_is_in_the_same_kernel(fn):
    assert len(kernels(plan_of(fn, *inputs()))) == 1


@quick
@pytest.mark.parametrize("fn", READ_AFTER)
def test_a_table_that_is_only_read_once_needs_no_memory(fn):
    (kernel,) = kernels(plan_of(fn, *inputs()))
    given = 2 if fn is narrowed_after else 3
    assert [pointer.access for pointer in kernel.pointers] == ["write"] + ["read"] * given


@quick
def test_a_table_that_leaves_is_also_in_memory():
    def both(table, ids, rows):
        made = table.index_add(0, ids, rows)
        return made, made.bfloat16()

    (kernel,) = kernels(plan_of(both, *inputs()))
    assert is_sorted(kernel)
    assert len([pointer for pointer in kernel.pointers if pointer.access != "read"]) == 2
    assert_same_as_eager(both, inputs)


def turned_after(table, ids, rows):
    return table.index_add(0, ids, rows).t().contiguous() * 2


def into_the_sources(table, ids, rows):
    """Rows that are finished must not be written over others that are still to be added."""
    rows.copy_(torch.zeros_like(rows).index_put((ids,), rows, accumulate=True) * 2)


def into_the_table(table, ids, rows):
    table.copy_(table.index_add(0, ids, rows).exp())


def read_twice(table, ids, rows):
    made = table.index_add(0, ids, rows)
    return made * made.flip(0)


@pytest.mark.parametrize("fn", [turned_after, into_the_sources, into_the_table, read_twice])
def test_what_reads_the_table_otherwise_is_right(fn):
    assert_same_as_eager(fn, inputs)


@quick
@pytest.mark.parametrize("fn", [turned_after, into_the_sources, read_twice])
def test_what_reads_the_table_otherwise_is_another_kernel(fn):
    assert len(kernels(plan_of(fn, *inputs()))) > 1


def narrow(table, ids, rows):
    return table[:, :63].index_add(0, ids, rows[:, :63])


def few_sources_in_place(table, ids, rows):
    table.index_put_((ids[:2],), rows[:2], accumulate=True)
    return table.sum()


def half(table, ids, rows):
    return table.bfloat16().index_add(0, ids, rows.bfloat16())


def along_rows(table, ids, rows):
    return table.t().contiguous().index_add(1, ids, rows.t())


def every_element_elsewhere(table, ids, rows):
    return table.scatter_add(0, (ids[:, None] + torch.arange(rows.shape[1])) % table.shape[0], rows)


def last_wins(table, ids, rows):
    return table.index_copy(0, ids, rows)


NEAR_MISSES = {
    fn.__name__: fn for fn in (narrow, few_sources_in_place, half, along_rows, every_element_elsewhere, last_wins)
}


@quick
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_others_are_not_sorted(name):
    assert not any(map(is_sorted, kernels(plan_of(NEAR_MISSES[name], *inputs()))))


@quick
def test_how_many_sources_there_are_must_be_known():
    assert not any(map(is_sorted, kernels(plan_of(added, *inputs(), dynamic=True))))


@quick
def test_the_table_is_not_filled_in_the_same_kernel_where_it_is_needed_before():
    plan = plan_of(lambda table, ids, rows: ((t := table.exp()).index_add(0, ids, rows), t), *inputs())
    first, second = kernels(plan)
    assert not is_sorted(first)
    assert is_sorted(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SORTED)
def test_the_numbers_are_those_of_eager(name, dtype):
    if name == "scaled" and not dtype.is_floating_point:
        dtype = torch.float64  # exp of integers is no integer
    assert_same_as_eager(SORTED[name], lambda: inputs(dtype=dtype))


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_right(name):
    assert_same_as_eager(NEAR_MISSES[name], inputs)


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 50, 65), (100, 25, 131), (3, 4097, 64)], ids=str)
def test_rows_with_none_and_with_all(shape):
    rows, sources, width = shape
    assert_same_as_eager(
        added, lambda: [torch.randn(rows, width), torch.zeros(sources, dtype=torch.long), torch.randn(sources, width)]
    )


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("fn", [added, to_zeros, in_place, narrowed_after])
def test_nothing_is_added(fn, rows):
    assert_same_as_eager(fn, lambda: [torch.randn(rows, 96), torch.zeros(0, dtype=torch.long), torch.randn(0, 96)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 5])
def test_the_gradient_of_an_embedding_of_nothing(rows, dtype):
    def gradient(rows_of, ids):
        return torch.ops.aten.embedding_dense_backward(rows_of, ids, rows, -1, False)

    assert_same_as_eager(gradient, lambda: [torch.randn(2, 0, 96).to(dtype), torch.zeros(2, 0, dtype=torch.long)])


def test_additions_are_in_the_order_of_the_sources():
    """So to the bit those of eager, for any number of threads."""
    compiled, given = compile_strict(added), inputs(rows=300, sources=5000)
    expected = added(*given)
    threads = torch.get_num_threads()
    try:
        for many in (1, 2, 3):
            torch.set_num_threads(many)
            assert torch.equal(compiled(*given), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wrong", [-1, 12])
def test_an_index_outside_is_eagers_error(wrong):
    table, ids, rows = inputs()
    ids[17] = wrong
    with pytest.raises(RuntimeError, match="out of bounds") as ours:
        compile_strict(added)(table, ids, rows)
    assert str(wrong) in str(ours.value)


def test_the_gradient_of_an_embedding():
    assert_same_as_eager(
        lambda ids, weight: F.embedding(ids, weight),
        lambda: [torch.randint(0, 50, (4, 32)), torch.randn(50, 80, requires_grad=True)],
        backward=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [8, 500])
def test_the_gradient_of_an_embedding_takes_the_memory_of_its_result(dtype, tokens):
    def gradient(rows, ids):
        return torch.ops.aten.embedding_dense_backward(rows, ids, 200, 3, False)

    def make_inputs():
        return [torch.randn(2, tokens // 2, 96).to(dtype), torch.randint(0, 200, (2, tokens // 2))]

    (kernel,) = kernels(plan_of(gradient, *make_inputs()))
    assert is_sorted(kernel)
    assert [pointer.dtype for pointer in kernel.pointers if pointer.access != "read"] == [dtype]
    assert_same_as_eager(gradient, make_inputs)


def test_columns_of_a_table_that_rows_were_added_to():
    """Readers that memory leads to other columns, in one kernel with what adds the rows."""

    def fn(x, at):
        return x.index_put((at,), x[at], accumulate=True).index_select(-1, at)

    for dtype in (torch.float32, torch.bool):
        assert_same_as_eager(fn, lambda dtype=dtype: [torch.randn(4, 8, 5).to(dtype), torch.tensor([3, 0, 3])])
