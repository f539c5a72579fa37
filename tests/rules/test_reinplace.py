"""Writing in place: where it happens, where it must not, and that nobody outside can tell."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import _side_effectful_functions

import ferrite
from ferrite.graph import fake_value
from ferrite.graph.aliases import sharing_matrix
from ferrite.graph.verify import Snapshot, verify_graph
from ferrite.options import Options
from ferrite.passes.post_grad.byte_ranges import EVERYTHING, LastAccess, Span
from ferrite.passes.post_grad.higher_order import decompose_auto_functionalized
from ferrite.passes.post_grad.overwriting import each_element_once
from ferrite.passes.post_grad.reinplace import reinplace_inplaceable_ops
from ferrite.pipeline import PassContext, Pipeline, graph_pass, run_pipeline
from tests.compare import assert_same_as_eager
from tests.graphs import target_names

quick = pytest.mark.quick
aten = torch.ops.aten
IN_PLACE = graph_pass(reinplace_inplaceable_ops.function, name="reinplace", after="move_constructors_to_gpu")


def rewritten(fn, *inputs: torch.Tensor, mode: str = "fake") -> torch.fx.GraphModule:
    """The graph of a function behind the pass; the pass keeps all that a caller can see, and finds nothing twice."""
    gm = make_fx(fn, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    before, snapshot = copy.deepcopy(gm), Snapshot.of(gm)
    reinplace_inplaceable_ops(gm)
    verify_graph(gm, snapshot, deep=True)
    assert sharing_matrix(gm.graph) == sharing_matrix(before.graph)
    runs = []
    for module in (before, gm):
        own = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in inputs]
        results = module(*own)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        runs.append([*results, *own])
    for old, new in zip(*runs, strict=True):
        assert (old.dtype, old.stride(), old.shape) == (new.dtype, new.stride(), new.shape)
        assert torch.equal(old, new)
    again = target_names(gm)
    reinplace_inplaceable_ops(gm)
    assert target_names(gm) == again
    return gm


INDEX, VALUE = torch.tensor([0, 2]), torch.tensor([5.0])
X = torch.arange(12.0).reshape(3, 4)


def put(x, accumulate=False):
    return aten.index_put.default(x, [INDEX], VALUE, accumulate)


def fresh(x, i, v):
    return aten.index_put.default(x.sin(), [i], v) + 1


def with_view_of_result(x, i, v):
    y = aten.index_put.default(x.sin(), [i], v)
    return y.t() + 1, y[0]


def chain(x, i, v):
    y = aten.index_put.default(x.sin(), [i], v)
    return aten.index_put.default(y, [i + 0], v * 2, True)


def copied_back(x, i, v):
    y = aten.index_put.default(x, [i], v)
    z = y + 1
    aten.copy_.default(x, y)
    return z


def chain_copied_back(x, i, v):
    y = aten.index_put.default(x, [i], v)
    y = aten.index_put.default(y, [i], v * 2, True)
    z = y * 3
    aten.copy_.default(x, y)
    return z


def overwritten_by_another(x, i, v):
    y = aten.index_put.default(x, [i], v)
    z = y * 3
    aten.copy_.default(x, z)
    return z + 1


def read_by_size_alone(x, i, v):
    b = x.sin()
    y = aten.index_put.default(b, [i], v)
    return y * b.shape[0], b.t().shape[0] * y


def second_of_two(x, i, v):
    b = x.sin()
    first = aten.index_put.default(b, [i], v)
    second = aten.index_put.default(b, [i], v * 2)
    return first, second


def view_of_input_copied_back(x, i, v):
    y = aten.index_put.default(x.view(12), [i], v)
    z = (y + 1).sum()
    aten.copy_.default(x, y.view(3, 4))
    return z


FIRES = {
    "view_of_input_copied_back": (view_of_input_copied_back, 1, 0),
    "fresh": (fresh, 1, 0),
    "views_of_the_result": (with_view_of_result, 1, 0),
    "chain": (chain, 2, 0),
    "copied_back": (copied_back, 1, 0),
    "chain_copied_back": (chain_copied_back, 2, 0),
    "overwritten_by_another": (overwritten_by_another, 1, 1),
    "read_by_size_alone": (read_by_size_alone, 1, 0),
    "second_of_two": (second_of_two, 1, 0),
}


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", FIRES)
def test_writes_in_place(name, mode):
    fn, puts, copies = FIRES[name]
    found = target_names(rewritten(fn, X, INDEX, VALUE, mode=mode))
    assert found.count("aten.index_put_.default") == puts
    assert found.count("aten.copy_.default") == copies


def on_input(x, i, v):
    return aten.index_put.default(x, [i], v) + 1


def on_view_of_input(x, i, v):
    return aten.index_put.default(x.t(), [i], v) + 1


def read_later(x, i, v):
    b = x.sin()
    y = aten.index_put.default(b, [i], v)
    return y, b + 1


def view_read_later(x, i, v):
    b = x.sin()
    view = b[1:]
    y = aten.index_put.default(b, [i], v)
    return y, view + 1


def view_made_and_read_later(x, i, v):
    b = x.sin()
    y = aten.index_put.default(b, [i], v)
    return y, b.t() + 1


def operand_returned(x, i, v):
    b = x.sin()
    return aten.index_put.default(b, [i], v), b


def view_of_operand_returned(x, i, v):
    b = x.sin()
    return aten.index_put.default(b, [i], v), b[0]


def expanded(x, i, v):
    return aten.index_put.default(x[0].sin().expand(3, 4), [i], v)


def values_from_operand(x, i, v):
    b = x.sin()
    return aten.index_put.default(b, [i], b[1])


def indices_from_operand(x, i, v):
    b = x.sin().long()
    return aten.index_put.default(b, [b[0, :2]], v.long())


def input_read_before_copy(x, i, v):
    y = aten.index_put.default(x, [i], v)
    z = x + 1
    aten.copy_.default(x, y)
    return z


def result_returned_and_copied(x, i, v):
    y = aten.index_put.default(x, [i], v)
    aten.copy_.default(x, y)
    return y


def result_read_after_another_overwrites(x, i, v):
    y = aten.index_put.default(x, [i], v)
    aten.copy_.default(x, y * 3)
    return y + 1


def part_overwritten(x, i, v):
    y = aten.index_put.default(x.t(), [i], v)
    aten.copy_.default(x, y.t().contiguous() * 2)
    return x + 1


def another_view_copied_back(x, i, v):
    y = aten.index_put.default(x, [i], v)
    aten.copy_.default(x, y[:1].expand(3, 4))
    return x + 1


def written_again(x, i, v):
    b = x.sin()
    y = aten.index_put.default(b, [i], v)
    aten.add_.Tensor(b, 1)
    return y + 1


def strided_operand(x, i, v):
    return aten.index_put.default(x.sin()[:, ::2], [i], v)


REFUSED = [
    *(on_input, on_view_of_input, read_later, view_read_later, view_made_and_read_later, operand_returned),
    *(view_of_operand_returned, expanded, values_from_operand, indices_from_operand, input_read_before_copy),
    *(result_returned_and_copied, result_read_after_another_overwrites, part_overwritten, written_again),
    another_view_copied_back,
    strided_operand,
]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_leaves_alone(fn, mode):
    found = target_names(rewritten(fn, X, INDEX, VALUE, mode=mode))
    assert "aten.index_put_.default" not in found
    assert "aten.index_put.default" in found


@quick
def test_constants_are_not_written():
    constant = torch.zeros(3, 4)

    def fn(x, i):
        return aten.index_put.default(constant, [i], x) + 1

    gm = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(VALUE, INDEX)
    assert any(node.op == "get_attr" for node in gm.graph.nodes)
    reinplace_inplaceable_ops(gm)
    assert "aten.index_put_.default" not in target_names(gm)


@quick
def test_inputs_that_share_memory_are_one():
    base = torch.arange(12.0)

    def fn(base, i, v):
        x, y = base[:6], base[3:9]
        put = aten.index_put.default(base, [i], v)
        z = y + 1
        aten.copy_.default(base, put)
        return z, x + 1

    assert "aten.index_put_.default" not in target_names(rewritten(fn, base, INDEX, VALUE))


SCATTERS = {
    "scatter": (lambda x, i, v: aten.scatter.src(x.sin(), 0, i[None].expand(1, 2), v.expand(1, 2)), "scatter_.src"),
    "scatter_value": (lambda x, i, v: aten.scatter.value(x.sin(), 0, i[None], 2.0), "scatter_.value"),
    "scatter_reduced": (
        lambda x, i, v: aten.scatter.value_reduce(x.sin(), 0, i[None], 2.0, reduce="add"),
        "scatter_.value_reduce",
    ),
    "scatter_add": (lambda x, i, v: aten.scatter_add.default(x.sin(), 0, i[None], x[:1].cos()), "scatter_add_.default"),
    "scatter_reduce": (
        lambda x, i, v: aten.scatter_reduce.two(x.sin(), 0, i[None], x[:1].cos(), "amax"),
        "scatter_reduce_.two",
    ),
    "index_add": (lambda x, i, v: aten.index_add.default(x.sin(), 0, i, x[:2].cos(), alpha=2), "index_add_.default"),
    "index_copy": (lambda x, i, v: aten.index_copy.default(x.sin(), 0, i, x[:2].cos()), "index_copy_.default"),
    "index_fill": (lambda x, i, v: aten.index_fill.int_Scalar(x.sin(), 0, i, 3.0), "index_fill_.int_Scalar"),
    "unsafe": (lambda x, i, v: aten._unsafe_index_put.default(x.sin(), [i], v), "index_put_.default"),
    "masked": (lambda x, i, v: aten.masked_scatter.default(x.sin(), x > 4, x.cos()), "masked_scatter_.default"),
}


@quick
@pytest.mark.parametrize("name", SCATTERS)
def test_the_scatter_family(name):
    fn, twin = SCATTERS[name]
    assert f"aten.{twin}" in target_names(rewritten(fn, X, INDEX, VALUE))


# --- writes over views ------------------------------------------------------------------------------------------------


def product(x):
    return x @ x.t() @ x


def slices_copied_back(x):
    y = aten.slice_scatter.default(x, x.new_ones(1, 4), 0, 1, 2)
    y = aten.select_scatter.default(y, y.new_zeros(3), 1, 3)
    aten.copy_.default(x, y)
    return y.sum()


VIEW_WRITES = {
    "slice": (lambda x: aten.slice_scatter.default(product(x), x[:2].cos(), 0, 1, 3), 1),
    "select": (lambda x: aten.select_scatter.default(product(x), x[0].cos(), 0, 2), 1),
    "diagonal": (lambda x: aten.diagonal_scatter.default(x.sin(), x[0, :3].cos()), 1),
    "as_strided": (lambda x: aten.as_strided_scatter.default(x.sin(), x[0, :2].cos(), [2], [5], 1), 1),
    "two_disjoint": (
        lambda x: aten.slice_scatter.default(
            aten.slice_scatter.default(product(x), x[:1].cos(), 0, 0, 1), x[:2].exp(), 0, 1, 3
        ),
        2,
    ),
    "two_overlapping": (
        lambda x: aten.slice_scatter.default(
            aten.slice_scatter.default(product(x), x[:2].cos(), 0, 0, 2), x[:2].exp(), 0, 1, 3
        ),
        2,
    ),
    "copied_back": (slices_copied_back, 2),
    "elementwise_all_around": (lambda x: aten.select_scatter.default(x.sin(), x[0].cos(), 0, 2) + 1, 0),
    "on_an_input": (lambda x: aten.select_scatter.default(x, x[0].cos(), 0, 2), 0),
    "from_the_operand": (lambda x: (y := product(x), aten.select_scatter.default(y, y[0], 0, 2))[1], 0),
    "read_later": (lambda x: (y := product(x), aten.select_scatter.default(y, x[0], 0, 2) @ y.t())[1], 0),
}


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", VIEW_WRITES)
def test_writes_over_views(name, mode):
    fn, writes = VIEW_WRITES[name]
    found = target_names(rewritten(fn, X, mode=mode))
    assert found.count("aten.copy_.default") == writes
    if writes:
        assert not any("scatter" in each for each in found)


# --- writes over views of views ---------------------------------------------------------------------------------------


def two_levels(x):
    whole = product(x)
    row = aten.slice_scatter.default(aten.select.int(whole, 0, 1), x[0, :2].cos(), 0, 1, 3)
    return aten.select_scatter.default(whole, row, 0, 1)


def two_levels_and_the_inner_one_read(x):
    whole = product(x)
    row = aten.slice_scatter.default(aten.select.int(whole, 0, 1), x[0, :2].cos(), 0, 1, 3)
    result = aten.select_scatter.default(whole, row, 0, 1)
    return result, row * 2, row.sum()


def three_levels(x):
    whole = product(x)
    rows = aten.slice.Tensor(whole, 0, 1, 3)
    row = aten.select.int(rows, 0, 1)
    row = aten.slice_scatter.default(row, x[0, :2].cos(), 0, 1, 3)
    rows = aten.select_scatter.default(aten.slice.Tensor(whole, 0, 1, 3), row, 0, 1)
    result = aten.slice_scatter.default(whole, rows, 0, 1, 3)
    return result, rows.exp(), row + 1


def levels_copied_back(x):
    row = aten.slice_scatter.default(aten.select.int(x, 0, 1), x.new_ones(2), 0, 1, 3)
    result = aten.select_scatter.default(x, row, 0, 1)
    aten.copy_.default(x, result)
    return (result + 1).sum()


def column_and_the_inner_one_read(x):
    whole = product(x)
    column = aten.slice_scatter.default(aten.select.int(whole, 1, 1), x[0, :2].cos(), 0, 1, 3)
    return aten.select_scatter.default(whole, column, 1, 1), column * 2


def diagonal_of_rows_of_an_input(x):
    rows = aten.diagonal_scatter.default(aten.slice.Tensor(x, 0, 0, 2), x.new_ones(2))
    return aten.slice_scatter.default(x, rows, 0, 0, 2)


NESTED = {two_levels: 0, two_levels_and_the_inner_one_read: 0, three_levels: 0, levels_copied_back: 0}
NESTED[column_and_the_inner_one_read] = 0
NESTED[diagonal_of_rows_of_an_input] = 1  # a copy of the input, which must stay


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("fn", NESTED, ids=lambda fn: fn.__name__)
def test_nested_writes_become_one(fn, mode):
    found = target_names(rewritten(fn, X, mode=mode))
    assert found.count("aten.copy_.default") == 1
    assert found.count("aten.clone.default") == NESTED[fn]
    assert not any("scatter" in each for each in found)


def other_row_written_back(x):
    whole = product(x)
    row = aten.slice_scatter.default(aten.select.int(whole, 0, 0), x[0, :2].cos(), 0, 1, 3)
    return aten.select_scatter.default(whole, row, 0, 2)


def inner_one_returned(x):
    whole = product(x)
    row = aten.slice_scatter.default(aten.select.int(whole, 0, 0), x[0, :2].cos(), 0, 1, 3)
    return aten.select_scatter.default(whole, row, 0, 0), row


def inner_one_read_before(x):
    whole = product(x)
    row = aten.slice_scatter.default(aten.select.int(whole, 0, 0), x[0, :2].cos(), 0, 1, 3)
    total = row.sum()
    return aten.select_scatter.default(whole, row, 0, 0), total


NOT_ONE = [other_row_written_back, inner_one_returned, inner_one_read_before]


@quick
@pytest.mark.parametrize("fn", NOT_ONE, ids=lambda fn: fn.__name__)
def test_nested_writes_that_stay_two(fn):
    found = target_names(rewritten(fn, X))
    assert found.count("aten.slice_scatter.default") == 1
    assert found.count("aten.copy_.default") == 1  # the outer one still writes into the product


@quick
def test_writes_into_two_buffers_are_two():
    def fn(x):
        row = aten.slice_scatter.default(aten.select.int(product(x), 0, 0), x[0, :2].cos(), 0, 1, 3)
        return aten.select_scatter.default(product(x), row, 0, 0)

    found = target_names(rewritten(fn, X))
    assert found.count("aten.copy_.default") == 2
    assert found.count("aten.mm.default") == 4


@quick
def test_the_inner_one_read_behind_a_write_stays():
    def fn(x):
        whole = product(x)
        row = aten.slice_scatter.default(aten.select.int(whole, 0, 0), x[0, :2].cos(), 0, 1, 3)
        result = aten.select_scatter.default(whole, row, 0, 0)
        total = result.sum()
        aten.mul_.Tensor(result, 2)
        return total, row * 2, result + 1

    assert "aten.slice_scatter.default" in target_names(rewritten(fn, X))


@quick
def test_nested_writes_into_an_input_that_must_stay_are_left():
    def fn(x):
        row = aten.slice_scatter.default(aten.select.int(x, 0, 0), x[0, :2].cos(), 0, 1, 3)
        return aten.select_scatter.default(x, row, 0, 0)

    found = target_names(rewritten(fn, X))
    assert "aten.copy_.default" not in found
    assert sum("scatter" in each for each in found) == 2


PAYS = {
    "both_in_memory": (lambda x: aten.select_scatter.default(x @ x.t(), x[0, :3], 0, 1), True),
    "result_computed_on": (lambda x: aten.select_scatter.default(x @ x.t(), x[0, :3], 0, 1).sin(), False),
    "operand_computed": (lambda x: aten.select_scatter.default((x @ x.t()).sin(), x[0, :3], 0, 1), False),
    "through_a_view": (lambda x: aten.select_scatter.default(x @ x.t(), x[0, :3], 0, 1).t() @ x, True),
    "view_computed_on": (lambda x: aten.select_scatter.default(x @ x.t(), x[0, :3], 0, 1).t().sin(), False),
    "must_write": (lambda x: aten.diagonal_scatter.default(x.sin(), x[0, :3]).sin(), True),
}


@quick
@pytest.mark.parametrize("name", PAYS)
def test_writes_where_it_saves_traffic(name):
    fn, pays = PAYS[name]
    assert ("aten.copy_.default" in target_names(rewritten(fn, X))) == pays


# --- parts of one buffer ----------------------------------------------------------------------------------------------


def two_disjoint(x, i, v):
    b = x.sin()
    first = aten.index_put.default(b[:1], [i[:1]], v)
    second = aten.index_put.default(b[1:], [i[:1]], v * 2)
    return first + 1, second + 1


def values_from_another_part(x, i, v):
    b = x.sin()
    return aten.index_put.default(b[1:], [i[:1]], b[0]) + 1


def another_part_read_later(x, i, v):
    b = x.sin()
    y = aten.index_put.default(b[:2], [i[:1]], v)
    return y + 1, b[2] * 2


def two_overlapping(x, i, v):
    b = x.sin()
    first = aten.index_put.default(b[:2], [i[:1]], v)
    second = aten.index_put.default(b[1:], [i[:1]], v * 2)
    return first + 1, second + 1


def part_then_whole(x, i, v):
    b = x.sin()
    first = aten.index_put.default(b[:1], [i[:1]], v)
    second = aten.index_put.default(b, [i], v * 2)
    return first + 1, second + 1


def result_of_a_part_returned(x, i, v):
    """It would keep the whole buffer alive, and begin somewhere inside."""
    return aten.index_put.default(x.sin()[1:], [i[:1]], v)


def place_is_seen(x, i, v):
    y = aten.index_put.default(x.sin()[1:], [i[:1]], v)
    return aten.as_strided.default(y, [2], [1], 1) + 1


def parts_between_alignments(x, i, v):
    return aten.index_put.default(x.sin().view(12)[1:9], [i], v) + 1


PARTS = {two_disjoint: 2, values_from_another_part: 1, another_part_read_later: 1, two_overlapping: 1}
PARTS |= {part_then_whole: 1, result_of_a_part_returned: 0, place_is_seen: 0, parts_between_alignments: 0}


@quick
@pytest.mark.parametrize("fn", PARTS, ids=lambda fn: fn.__name__)
def test_parts_of_one_buffer(fn):
    assert target_names(rewritten(fn, X, INDEX, VALUE)).count("aten.index_put_.default") == PARTS[fn]


@quick
def test_parts_of_unknown_size_count_as_overlapping():
    for fn in (two_disjoint, another_part_read_later):
        assert "aten.index_put_.default" not in target_names(rewritten(fn, X, INDEX, VALUE, mode="symbolic"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12), st.integers(0, 30), st.integers(0, 12))
def test_the_last_access_is_found(accesses, low, length):
    spans = [Span(begin, begin + size) for begin, size in accesses]
    asked = Span(low, low + length)
    exact = max((index for index, span in enumerate(spans) if span.overlaps(asked)), default=-1)
    assert LastAccess(range(len(spans)), spans).of(asked) == exact
    assert LastAccess([*range(len(spans)), 99], [*spans, EVERYTHING]).of(asked) == (99 if length else -1)


# --- lists ------------------------------------------------------------------------------------------------------------


def listed(x):
    a, b = aten._foreach_add.Scalar([x.sin(), x.cos()], 1)
    return a * 2, b


def listed_copied_back(x, y):
    a, b = aten._foreach_mul.List([x, y], [y + 1, x + 1])
    aten.copy_.default(x, a)
    aten.copy_.default(y, b)
    return a.sum()


def listed_inputs_and_others(x, y):
    a, b = aten._foreach_lerp.Scalar([x, y.sin()], [y + 1, x + 1], 0.5)
    aten.copy_.default(x, a)
    return a.sum(), b + 1


LISTS = [listed, listed_copied_back, listed_inputs_and_others]


@quick
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("fn", LISTS, ids=lambda fn: fn.__name__)
def test_lists(fn, mode):
    inputs = (X, X + 1)[: fn.__code__.co_argcount]
    gm = rewritten(fn, *inputs, mode=mode)
    found = target_names(gm)
    (call,) = (each for each in found if "_foreach_" in each)
    assert call.split(".")[1].endswith("_")
    assert "aten.copy_.default" not in found
    assert "getitem" not in str(found)


def one_without_copy_back(x, y):
    a, b = aten._foreach_add.Scalar([x, y], 1)
    aten.copy_.default(x, a)
    return b + 1


def one_read_later(x, y):
    u, v = x.sin(), x.cos()
    a, b = aten._foreach_add.Scalar([u, v], 1)
    return a, b, v + 1


def the_same_twice(x, y):
    u = x.sin()
    a, b = aten._foreach_add.Scalar([u, u], 1)
    return a, b


def parts_of_one_buffer(x, y):
    u = x.sin()
    a, b = aten._foreach_add.Scalar([u[:1], u[1:]], 1)
    return a + 1, b + 1


def read_as_well(x, y):
    u, v = x.sin(), x.cos()
    a, b = aten._foreach_add.List([u, v], [v, u])
    return a + 1, b + 1


def another_dtype(x, y):
    a, b = aten._foreach_add.Scalar([x.long(), x.sin()], 1.5)
    return a, b


def copied_back_crosswise(x, y):
    a, b = aten._foreach_add.Scalar([x, y], 1)
    aten.copy_.default(x, b)
    aten.copy_.default(y, a)
    return (x + y).sum()


NO_LISTS = [one_without_copy_back, one_read_later, the_same_twice, parts_of_one_buffer, read_as_well, another_dtype]
NO_LISTS.append(copied_back_crosswise)


@quick
@pytest.mark.parametrize("fn", NO_LISTS, ids=lambda fn: fn.__name__)
def test_lists_of_which_a_member_must_stay(fn):
    found = target_names(rewritten(fn, X, X + 1))
    (call,) = (each for each in found if "_foreach_" in each)
    assert not call.split(".")[1].endswith("_")


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.randn(3), torch.randn(2, 2)])

    def forward(self, x):
        with torch.no_grad():
            torch._foreach_mul_(list(self.weights), 0.5)
            torch._foreach_add_(list(self.weights), 1.0)
        return x + self.weights[0].sum()


@pytest.mark.parametrize("executor", ["native", "calls"])
def test_lists_of_parameters(executor):
    with torch.no_grad():
        assert_same_as_eager(Step(), lambda: [torch.randn(3)], calls=2, graphs=1, options={"executor": executor})
    assert ferrite.last_compile().rewrites["reinplace_inplaceable_ops"] == 2
    if executor == "native":  # kernels have no such operators
        return
    calls = [call.operator for graph in ferrite.last_compile().graphs for call in graph.eager_calls]
    assert [call for call in calls if "_foreach" in call] == ["aten._foreach_mul_.Scalar", "aten._foreach_add_.Scalar"]
    assert "aten.copy_.default" not in calls


# --- effect tokens ----------------------------------------------------------------------------------------------------

TOKEN = torch.tensor([])
with_effects = torch.ops.higher_order.with_effects


@pytest.fixture(autouse=True)
def operators_without_effects():
    """Tracing a call behind a token tells torch for good that its operator has effects: `index_put` would, in tests of
    other files, too."""
    yield
    for operator in (aten.index_put.default, aten._foreach_add.Scalar, aten.select_scatter.default):
        _side_effectful_functions.discard(operator)


def effect(token, x, i, v):
    token, y = with_effects(token, aten.index_put.default, x.sin(), [i], v)
    return token, y + 1


def two_effects(token, x, i, v):
    token, y = with_effects(token, aten.index_put.default, x.sin(), [i], v)
    token, y = with_effects(token, aten.index_put.default, y, [i + 0], v * 2, True)
    return token, y


def effect_copied_back(token, x, i, v):
    token, y = with_effects(token, aten.index_put.default, x, [i], v)
    aten.copy_.default(x, y)
    return token, (y + 1).sum()


def effect_on_a_list(token, x, i, v):
    token, both = with_effects(token, aten._foreach_add.Scalar, [x.sin(), x.cos()], 1)
    return token, both[0] + 1, both[1]


@quick
@pytest.mark.parametrize("fn", [effect, two_effects, effect_copied_back, effect_on_a_list], ids=lambda fn: fn.__name__)
def test_effect_tokens_stay(fn):
    gm = rewritten(fn, TOKEN, X, INDEX, VALUE)
    found = target_names(gm)
    assert "with_effects" not in found
    assert "aten.copy_.default" not in found
    assert sum(each.split(".")[1].endswith("_") for each in found if each.startswith("aten")) == len(
        [node for node in gm.graph.nodes if node.target is aten.clone.default]
    )
    token, *_ = gm.graph.output_node().args[0]  # type: ignore[attr-defined]
    while token.op != "placeholder":
        assert token.target is aten.clone.default
        token = token.args[0]
    assert "token" in token.name


def effect_read_later(token, x, i, v):
    y = x.sin()
    token, z = with_effects(token, aten.index_put.default, y, [i], v)
    return token, z, y + 1


@quick
def test_calls_that_are_spelled_otherwise_are_left():
    def behind_a_token(token, x):
        token, y = with_effects(token, aten.select_scatter.default, product(x), x[0].cos(), 0, 2)
        return token, y

    assert "with_effects" in target_names(rewritten(behind_a_token, TOKEN, X))
    gm = make_fx(lambda x: aten.select_scatter.default(product(x), x[0].cos(), 0, 2), tracing_mode="fake")(X)
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.select_scatter.default)
    node.kwargs = dict(zip(("self", "src", "dim", "index"), node.args, strict=True))
    node.args = ()
    reinplace_inplaceable_ops(gm)
    assert "aten.select_scatter.default" in target_names(gm)


@quick
def test_effects_on_what_must_stay_are_left():
    assert "with_effects" in target_names(rewritten(effect_read_later, TOKEN, X, INDEX, VALUE))


# --- custom operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op("reinplace::mix", mutates_args={"x", "y"})
def mix(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(1)
    y.mul_(2)


def custom_on_one_tensor_twice(x):
    y = x.sin()
    _, first, second = auto_functionalized(torch.ops.reinplace.mix.default, x=y, y=y)
    return first, second


def custom_behind_a_token(token, x):
    token, _, first, second = with_effects(
        token, auto_functionalized, torch.ops.reinplace.mix.default, x=x.sin(), y=x.cos()
    )
    return token, first, second


@quick
@pytest.mark.parametrize(
    ("fn", "inputs", "copies"), [(custom_on_one_tensor_twice, [X], 1), (custom_behind_a_token, [TOKEN, X], 0)]
)
def test_custom_operators(fn, inputs, copies):
    gm = rewritten(fn, *inputs)
    wanted = gm(*inputs)
    decompose_auto_functionalized(gm)
    verify_graph(gm, deep=True)
    found = target_names(gm)
    assert "reinplace.mix.default" in found
    assert found.count("aten.clone.default") == copies + (inputs[0] is TOKEN)
    assert all(map(torch.equal, wanted, gm(*inputs)))


# --- what was missed --------------------------------------------------------------------------------------------------


def facts(fn, *inputs, mode="fake"):
    gm = make_fx(fn, tracing_mode=mode)(*inputs)
    context = PassContext(Options(strict=True))
    (record,) = run_pipeline(Pipeline("test", (reinplace_inplaceable_ops,)), gm, context)
    return dict(record.facts)


@quick
def test_operands_that_must_be_copied_are_counted():
    assert facts(read_later, X, INDEX, VALUE) == {"operands copied": 1, "bytes copied": 48}
    assert facts(read_later, X, INDEX, VALUE, mode="symbolic") == {"operands copied": 1}
    assert facts(one_read_later, X, X) == {"operands copied": 2, "bytes copied": 96}
    assert facts(fresh, X, INDEX, VALUE) == {}
    assert facts(PAYS["result_computed_on"][0], X) == {}  # left by choice


# --- whole functions --------------------------------------------------------------------------------------------------


def cleared_rows(x):
    y = x.clone()
    y[0] = 1
    y[torch.tensor([1, 2])] = 3
    return y


def input_written(x):
    x[torch.tensor([0, 2])] = 7.0
    return x.sum()


def input_written_and_returned(x):
    x[torch.tensor([0, 2])] = 7.0
    return x


def view_of_input_written(x):
    x[1][torch.tensor([0, 2])] = 7.0
    x.t()[0, 0] = 5
    return x * 2


def source_read_later(x):
    y = x.sin()
    z = y.clone()
    z[torch.tensor([0])] = 1
    return z, y + 1


def diagonal_written(x):
    y = x.new_zeros(4, 4)
    y.diagonal().copy_(x[0])
    return y @ y


def accumulated(x):
    out = x.new_zeros(3, 4)
    for step in range(3):
        out.index_put_((torch.tensor([step, step]),), x[step], accumulate=True)
    return out


WHOLE = [
    *(cleared_rows, input_written, input_written_and_returned, view_of_input_written, source_read_later),
    *(diagonal_written, accumulated),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", WHOLE, ids=lambda fn: fn.__name__)
def test_whole_functions(fn, dynamic):
    assert_same_as_eager(fn, lambda: [torch.randn(3, 4)], options={"passes": [IN_PLACE]}, dynamic=dynamic, calls=2)


def test_backward():
    def fn(x):
        y = x * 2
        y[torch.tensor([0, 2])] = 0.0
        return y.index_select(0, torch.tensor([0, 0, 1])).sum()

    make = lambda: [torch.randn(3, 4, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(fn, make, options={"passes": [IN_PLACE]}, backward=True)


def test_inside_a_branch():
    def fn(x, flag):
        def yes(x):
            y = x.sin()
            y[torch.tensor([0])] = 1
            return y + 1

        return torch.cond(flag, yes, lambda x: x + 1, (x,))

    assert_same_as_eager(fn, lambda: [torch.randn(3, 4), torch.tensor(True)], options={"passes": [IN_PLACE]})
    assert ferrite.last_compile().rewrites["reinplace_inplaceable_ops"] == 1


# --- random graphs ----------------------------------------------------------------------------------------------------

ONE = [
    *(torch.sin, torch.clone, torch.t, lambda x: x.view(4, 4), lambda x: x[:, :], lambda x: x.flip(0), lambda x: x @ x),
    lambda x: x[:1].expand(4, 4),
]
TWO = [
    torch.add,
    lambda a, b: aten.index_put.default(a, [torch.tensor([0, 2])], b[1]),
    lambda a, b: aten.index_put.default(a, [torch.tensor([1, 1])], b[:2], True),
    lambda a, b: aten.select_scatter.default(a, b[0], 0, 1),
    lambda a, b: aten.slice_scatter.default(a, b[1:3], 0, 0, 2),
    lambda a, b: aten.diagonal_scatter.default(a, b[0]),
    lambda a, b: aten.index_add.default(a, 0, torch.tensor([0, 3]), b[:2]),
    lambda a, b: aten.select_scatter.default(a, aten.slice_scatter.default(a[0], b[0, :2], 0, 1, 3), 0, 0),
    lambda a, b: aten.index_put.default(a[:2], [torch.tensor([0])], b[1]).repeat(2, 1) + a,
    lambda a, b: torch.cat([put_rows(a[:2], b[1]), put_rows(a[2:], b[3])]),
    lambda a, b: torch.cat([put_rows(a[:3], b[1])[1:], put_rows(a[2:], b[3])]),
    lambda a, b: aten._foreach_add.List([a, b], [b, a])[1],
    lambda a, b: aten._foreach_mul.Scalar([a, b], 2)[0],
]


def put_rows(rows, values):
    return aten.index_put.default(rows, [torch.tensor([1])], values)


@st.composite
def programs(draw):
    """Steps over a growing list of values, of which the latest are preferred; what is returned and written back."""
    steps = []
    for count in range(2, draw(st.integers(4, 14))):
        operand = st.integers(0, count - 1) | st.integers(max(0, count - 3), count - 1)
        pick = draw(st.sampled_from(range(len(ONE) + 2 * len(TWO))))
        steps.append((pick, draw(operand), draw(operand)))
    total = 2 + len(steps)
    returned = draw(st.lists(st.integers(2, total - 1), min_size=1, max_size=3))
    return steps, returned, draw(st.none() | st.integers(2, total - 1)), draw(st.none() | st.integers(2, total - 1))


@settings(max_examples=50, deadline=None)
@given(programs())
def test_random_graphs(program):
    steps, returned, *written = program

    def fn(x, y):
        values = [x, y]
        for pick, first, second in steps:
            if pick < len(ONE):
                values.append(ONE[pick](values[first]))
            else:
                values.append(TWO[(pick - len(ONE)) % len(TWO)](values[first], values[second]))
        results = [values[index] * 2 if index % 2 else values[index] for index in returned]
        for target, source in zip((x, y), written, strict=True):
            if source is None:
                continue
            value = values[source]  # what shares the target's memory cannot be copied into it
            shares = value.untyped_storage()._cdata == target.untyped_storage()._cdata
            aten.copy_.default(target, value.clone() if shares else value)
        return results

    torch.manual_seed(0)
    rewritten(fn, torch.rand(4, 4), torch.rand(4, 4))


# --- cost -------------------------------------------------------------------------------------------------------------


@quick
def test_overlap_is_told_from_strides():
    assert each_element_once(torch.empty(3, 4))
    assert each_element_once(torch.empty(3, 4).t())
    assert each_element_once(torch.empty(6, 4)[::2, 1:3])
    assert each_element_once(torch.empty(1).expand(1, 1))
    assert not each_element_once(torch.empty(1).expand(3))
    assert not each_element_once(torch.empty(9).as_strided((3, 3), (2, 1)))


def test_decisions_do_not_walk_the_views(monkeypatch):
    """Many views of one buffer that is written many times: the alias classes are asked for once per node."""
    from ferrite.passes.post_grad import overwriting

    def work(count: int) -> int:
        def fn(x, i, v):
            y = x.sin()
            for _ in range(count):
                y = aten.index_put.default(y, [i], v[:1])
                v = y[0] + 1
            return y

        gm = make_fx(fn, tracing_mode="fake")(X, INDEX, X[0])
        calls = []
        inner = overwriting.any_within
        monkeypatch.setattr(
            overwriting, "any_within", lambda *args, **kwargs: (calls.append(1), inner(*args, **kwargs))[1]
        )
        reinplace_inplaceable_ops(gm)
        monkeypatch.setattr(overwriting, "any_within", inner)
        assert target_names(gm).count("aten.index_put_.default") == count
        return len(calls)

    assert work(40) <= 4.1 * work(10)


def test_overlap_is_not_asked_of_every_pair_of_views(monkeypatch):
    """Many parts of one buffer, each written and each read later than the others."""
    from ferrite.passes.post_grad import byte_ranges

    def work(count: int) -> int:
        def fn(x, i, v):
            whole = x.sin()
            parts = [whole[step : step + 1] for step in range(count)]
            return [aten.index_put.default(part, [i], v) + 1 for part in parts]

        gm = make_fx(fn, tracing_mode="fake")(torch.rand(count, 4), INDEX[:1], VALUE)
        steps = []
        inner = byte_ranges.upwards
        monkeypatch.setattr(byte_ranges, "upwards", lambda block: (steps.append(1), inner(block))[1])
        reinplace_inplaceable_ops(gm)
        monkeypatch.setattr(byte_ranges, "upwards", inner)
        assert target_names(gm).count("aten.index_put_.default") == count
        return len(steps)

    assert 0 < work(160) <= 6 * work(40)  # 4 times as many parts; all pairs would be 16 times as many


@quick
def test_values_stay_true():
    gm = rewritten(chain, X, INDEX, VALUE)
    first, *rest = (node for node in gm.graph.nodes if node.target in (aten.sin.default, aten.index_put_.default))
    addresses = {fake_value(node).untyped_storage()._cdata for node in (first, *rest)}
    assert len(addresses) == 1


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("accumulate", [True, False])
def test_what_is_read_besides_is_not_overwritten_even_without_elements(size, accumulate):
    """Eager refuses to write into what it reads too, whether or not there is an element in it."""

    def itself(x):
        places = x + x
        return places.index_put((places,), places, accumulate=accumulate)

    def through_views(x):
        places = x + x
        return places.index_put((places.view(-1),), places[places], accumulate=accumulate)

    def another(x, y):
        return (y * 2).index_put((x + x,), y, accumulate=accumulate)

    x = torch.zeros(size, dtype=torch.int64)
    assert_same_as_eager(itself, lambda: [x.clone()])
    assert_same_as_eager(through_views, lambda: [x.clone()])
    assert_same_as_eager(another, lambda: [x.clone(), torch.ones(size, dtype=torch.float32)])
