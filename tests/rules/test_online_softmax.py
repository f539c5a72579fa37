"""Our softmax operator against two passes in double precision, and scatters that keep the errors of eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.options import Options
from ferrite.passes.post_grad import scatters
from ferrite.passes.post_grad.scatters import PARTITIONED_SCATTER, copies_for
from ferrite.passes.post_grad.softmax import PREPARE_SOFTMAX
from ferrite.passes.shared.const_scatter import SCATTER_UPON_CONSTANT
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.compare import assert_no_farther
from tests.graphs import targets

pytestmark = [pytest.mark.quick, pytest.mark.lengthy]
aten = torch.ops.aten
prepare = torch.ops.ferrite.prepare_softmax_online.default
inf, nan = torch.inf, torch.nan


def rewritten(function, *inputs, rule, mode="fake"):
    """The function's graph before and after one rule, and how often that fired."""
    before = make_fx(function, tracing_mode=mode)(*inputs)
    after = copy.deepcopy(before)
    count = apply_rules(after, (rule,), PassContext(Options()))
    return before, after, count


# --- the operator -----------------------------------------------------------------------------------------------------


def assert_as_in_two_passes(x, dim=-1):
    largest, total = prepare(x, dim)
    exact = x.double()
    assert torch.equal(largest.nan_to_num(7.0), x.amax(dim, keepdim=True).nan_to_num(7.0))
    assert torch.equal(largest.isnan(), x.isnan().any(dim, keepdim=True))
    eager = (x - x.amax(dim, keepdim=True)).exp().sum(dim, keepdim=True)
    true = (exact - exact.amax(dim, keepdim=True)).exp().sum(dim, keepdim=True)
    assert_no_farther(total, eager, true, "sum")
    assert total.stride() == eager.stride()
    assert total.dtype == x.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((7, 33), -1), ((7, 33), 0), ((2, 5, 3), 1), ((4, 1), 1), ((0, 3), 1)])
def test_random_rows(shape, dim, dtype):
    assert_as_in_two_passes((torch.randn(shape) * 20).to(dtype), dim)


def test_long_rows():
    assert_as_in_two_passes(torch.randn(3, 100_000) * 5)


@pytest.mark.parametrize(
    ("row", "largest", "total"),
    [
        ([-inf, -inf, -inf], -inf, nan),
        ([-inf, 2.0, -inf], 2.0, 1.0),
        ([inf, 1.0, 2.0], inf, nan),
        ([inf, -inf, 0.0], inf, nan),
        ([nan, 1.0, 2.0], nan, nan),
        ([nan, inf, -inf], nan, nan),
        ([-3e38, -3e38, 3e38], 3e38, 1.0),
    ],
)
def test_special_rows_are_those_of_eager(row, largest, total):
    found = [item.item() for item in prepare(torch.tensor([row]), 1)]
    assert torch.equal(
        torch.tensor(found).nan_to_num(7.0, 8.0, 9.0), torch.tensor([largest, total]).nan_to_num(7.0, 8.0, 9.0)
    )
    assert_as_in_two_passes(torch.tensor([row, [0.0, 1.0, 2.0]]))


def test_a_row_of_one_is_itself_and_one():
    x = torch.tensor([[3.0], [-2.0]])
    largest, total = prepare(x, 1)
    assert torch.equal(largest, x)
    assert torch.equal(total, torch.ones(2, 1))


def test_an_empty_row_is_an_error_as_in_eager():
    with pytest.raises(IndexError, match="Expected reduction dim 1 to have non-zero size"):
        prepare(torch.empty(3, 0), 1)


@pytest.mark.parametrize("shape", [(4, 6), (4, 1), (2, 3, 5)])
def test_the_operator_keeps_the_rules_of_torch(shape):
    torch.library.opcheck(prepare, (torch.randn(shape), -1), test_utils=("test_schema", "test_faketensor"))
    transposed = torch.randn(shape).transpose(0, 1)
    torch.library.opcheck(prepare, (transposed, 0), test_utils=("test_schema", "test_faketensor"))


# --- the rule on what torch makes of a softmax ------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_it_fires_on_the_decomposed_softmax(function, dtype, mode):
    from ferrite.capture import torch_api

    table = torch_api.decompositions_of([aten._softmax.default, aten._log_softmax.default])
    x = torch.randn(5, 9).to(dtype)
    gm = make_fx(lambda x: function(x, 1), decomposition_table=table, tracing_mode=mode)(x)
    assert apply_rules(gm, (PREPARE_SOFTMAX,), PassContext(Options())) == 1
    assert prepare in targets(gm)
    assert not {aten.amax.default, aten.sum.dim_IntList} & set(targets(gm))
    assert_no_farther(gm(x), function(x, 1), function(x.double(), 1), "softmax")


# --- scatter into a constant ------------------------------------------------------------------------------------------


def one_hot(value, dtype):
    return lambda index: torch.full((4, 6), 0.3 if dtype.is_floating_point else 3, dtype=dtype).scatter(1, index, value)


@pytest.mark.parametrize(
    ("value", "dtype"), [(0.1, torch.float64), (2**40 + 1, torch.int64), (0.1, torch.float16), (inf, torch.float32)]
)
def test_numbers_keep_every_bit(value, dtype):
    index = torch.tensor([[0], [5], [2], [2]])
    before, after, count = rewritten(one_hot(value, dtype), index, rule=SCATTER_UPON_CONSTANT)
    assert count == 1
    assert aten.scatter.value not in targets(after)
    assert torch.equal(after(index), before(index))
    assert after(index).dtype == dtype


@pytest.mark.parametrize("wrong", [6, -1, 2**40])
def test_an_index_out_of_range_is_the_error_of_eager(wrong):
    good, bad = torch.tensor([[0], [5], [2], [2]]), torch.tensor([[0], [5], [2], [wrong]])
    before, after, count = rewritten(one_hot(1.0, torch.float32), good, rule=SCATTER_UPON_CONSTANT)
    assert count == 1
    with pytest.raises(RuntimeError) as eager:
        before(bad)
    with pytest.raises(RuntimeError) as ours:
        after(bad)
    assert str(ours.value) == str(eager.value)
    assert "out of bounds" in str(ours.value)


@pytest.mark.parametrize(("value", "dtype"), [(1e10, torch.float16), (inf, torch.int32)])
def test_a_number_that_eager_refuses_is_left_to_it(value, dtype):
    index = torch.zeros(4, 1, dtype=torch.int64)
    _, _, count = rewritten(one_hot(value, dtype), index, rule=SCATTER_UPON_CONSTANT)
    assert count == 0


def test_cross_entropy_backward_has_no_scatter_left():
    def gradient(logits, target):
        rows = torch.full((logits.shape[0], logits.shape[1]), 0.0).scatter(1, target.unsqueeze(1), -1.0)
        return rows / logits.shape[0] + logits.softmax(1) / logits.shape[0]

    logits, target = torch.randn(6, 11), torch.randint(11, (6,))
    for mode in ("fake", "symbolic"):
        _, after, count = rewritten(gradient, logits, target, rule=SCATTER_UPON_CONSTANT, mode=mode)
        assert count == 1
        leaf = logits.clone().requires_grad_()
        torch.nn.functional.cross_entropy(leaf, target).backward()
        torch.testing.assert_close(after(logits, target), leaf.grad)


# --- scatter over copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "positions", "values"),
    [
        (torch.rand(10), lambda i: (i,), torch.rand(5000)),
        (torch.rand(10), lambda i: (i.view(50, 100),), torch.tensor(0.5)),
        (torch.rand(3, 10, 2), lambda i: (None, i), torch.rand(3, 5000, 2)),
        (torch.arange(10), lambda i: (i,), torch.arange(5000)),
        (torch.rand(10, 4), lambda i: (i,), torch.rand(4)),
    ],
    ids=["a vector", "one number", "in the middle", "integers", "values spread"],
)
def test_copies_add_up_to_what_eager_adds(x, positions, values, monkeypatch):
    monkeypatch.setattr(scatters, "on_cpu", lambda tensor: False)
    index = torch.randint(-10, 10, (5000,))
    function = lambda x, i, v: aten.index_put.default(x, list(positions(i)), v, True)  # noqa: E731
    before, after, count = rewritten(function, x, index, values, rule=PARTITIONED_SCATTER)
    ours, eager = after(x, index, values), before(x, index, values)
    assert count == 1
    assert ours.stride() == eager.stride()
    if x.is_floating_point():
        assert_no_farther(ours, eager, before(x.double(), index, values.double()), "sum")
    else:
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("wrong", [10, -11])
def test_copies_do_not_hide_an_index_out_of_range(wrong, monkeypatch):
    monkeypatch.setattr(scatters, "on_cpu", lambda tensor: False)
    index, values = torch.zeros(5000, dtype=torch.int64), torch.rand(5000)
    function = lambda x, i, v: aten.index_put.default(x, [i], v, True)  # noqa: E731
    _, after, count = rewritten(function, torch.rand(10), index, values, rule=PARTITIONED_SCATTER)
    assert count == 1
    index[7] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        after(torch.rand(10), index, values)


def test_a_write_in_place_is_left(monkeypatch):
    """Its operand is what others read; a sum of copies would be written nowhere."""
    monkeypatch.setattr(scatters, "on_cpu", lambda tensor: False)
    index, values = torch.zeros(5000, dtype=torch.int64), torch.rand(5000)
    function = lambda x, i, v: aten.index_put_.default(x.sin(), [i], v, True)  # noqa: E731
    _, after, count = rewritten(function, torch.rand(10), index, values, rule=PARTITIONED_SCATTER)
    assert count == 0
    assert aten.index_put_.default in targets(after)


def test_the_number_of_copies():
    assert copies_for(5000, 10) == 128  # the most
    assert copies_for(5000, 5000) == 16
    assert copies_for(5000, 10**6) == 0  # spread already
    assert [copies_for(10**9, elements) for elements in (10**6, 10**7, 10**8)] == [16, 8, 2]  # memory is the last word
    assert copies_for(5000, 0) == 0
