"""Writing in place: where it happens, where it must not, and that nobody outside can tell."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from compare import check
from ferrite.graph import fake_value
from ferrite.graph.aliases import sharing_matrix
from ferrite.graph.verify import Snapshot, verify_graph
from ferrite.passes.post_grad.memory import each_element_once
from ferrite.passes.post_grad.reinplace import reinplace_inplaceable_ops
from ferrite.pipeline import graph_pass

quick = pytest.mark.quick
aten = torch.ops.aten
IN_PLACE = graph_pass(reinplace_inplaceable_ops.function, name="reinplace", after="stable_topological_sort")


def operators(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


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
    again = operators(gm)
    reinplace_inplaceable_ops(gm)
    assert operators(gm) == again
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


FIRES = {
    "fresh": (fresh, 1, 0),
    "views_of_the_result": (with_view_of_result, 1, 0),
    "chain": (chain, 2, 0),
    "copied_back": (copied_back, 1, 0),
    "chain_copied_back": (chain_copied_back, 2, 0),
    "overwritten_by_another": (overwritten_by_another, 1, 1),
    "read_by_size_alone": (read_by_size_alone, 1, 0),
    "second_of_two": (second_of_two, 1, 0),
}


@quick
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", FIRES)
def test_writes_in_place(name, mode):
    fn, puts, copies = FIRES[name]
    found = operators(rewritten(fn, X, INDEX, VALUE, mode=mode))
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


@quick
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_leaves_alone(fn, mode):
    found = operators(rewritten(fn, X, INDEX, VALUE, mode=mode))
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
    assert "aten.index_put_.default" not in operators(gm)


@quick
def test_inputs_that_share_memory_are_one():
    base = torch.arange(12.0)

    def fn(base, i, v):
        x, y = base[:6], base[3:9]
        put = aten.index_put.default(base, [i], v)
        z = y + 1
        aten.copy_.default(base, put)
        return z, x + 1

    assert "aten.index_put_.default" not in operators(rewritten(fn, base, INDEX, VALUE))


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
    assert f"aten.{twin}" in operators(rewritten(fn, X, INDEX, VALUE))


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


@quick
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", VIEW_WRITES)
def test_writes_over_views(name, mode):
    fn, writes = VIEW_WRITES[name]
    found = operators(rewritten(fn, X, mode=mode))
    assert found.count("aten.copy_.default") == writes
    if writes:
        assert not any("scatter" in each for each in found)


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
    check(fn, lambda: [torch.randn(3, 4)], options={"passes": [IN_PLACE]}, dynamic=dynamic, calls=2)


@quick
def test_backward():
    def fn(x):
        y = x * 2
        y[torch.tensor([0, 2])] = 0.0
        return y.index_select(0, torch.tensor([0, 0, 1])).sum()

    make = lambda: [torch.randn(3, 4, requires_grad=True)]  # noqa: E731
    check(fn, make, options={"passes": [IN_PLACE]}, backward=True)


@quick
def test_inside_a_branch():
    def fn(x, flag):
        def yes(x):
            y = x.sin()
            y[torch.tensor([0])] = 1
            return y + 1

        return torch.cond(flag, yes, lambda x: x + 1, (x,))

    check(fn, lambda: [torch.randn(3, 4), torch.tensor(True)], options={"passes": [IN_PLACE]})
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
]


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


@settings(max_examples=80, deadline=None)
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


@quick
def test_decisions_do_not_walk_the_views(monkeypatch):
    """Many views of one buffer that is written many times: the alias classes are asked for once per node."""
    from ferrite.passes.post_grad import memory

    def work(count: int) -> int:
        def fn(x, i, v):
            y = x.sin()
            for _ in range(count):
                y = aten.index_put.default(y, [i], v[:1])
                v = y[0] + 1
            return y

        gm = make_fx(fn, tracing_mode="fake")(X, INDEX, X[0])
        calls = []
        inner = memory.any_within
        monkeypatch.setattr(memory, "any_within", lambda *args, **kwargs: (calls.append(1), inner(*args, **kwargs))[1])
        reinplace_inplaceable_ops(gm)
        monkeypatch.setattr(memory, "any_within", inner)
        assert operators(gm).count("aten.index_put_.default") == count
        return len(calls)

    assert work(40) <= 4.1 * work(10)


@quick
def test_values_stay_true():
    gm = rewritten(chain, X, INDEX, VALUE)
    first, *rest = (node for node in gm.graph.nodes if node.target in (aten.sin.default, aten.index_put_.default))
    addresses = {fake_value(node).untyped_storage()._cdata for node in (first, *rest)}
    assert len(addresses) == 1
