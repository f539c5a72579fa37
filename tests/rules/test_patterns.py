"""The pattern lists beyond their examples: which partial reduction, which product, sizes that only a symbol knows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.verify import count_guards
from ferrite.options import Options
from ferrite.passes.post_grad.concats import CAT_SPLIT, SPLIT_CAT
from ferrite.passes.post_grad.patterns import ADDMM, PATTERN_LISTS
from ferrite.passes.post_grad.reductions import PARTIAL_REDUCTION, POINTLESS_CUMSUM
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from tests.graphs import assert_metadata_is_true, assert_same_computation, operators

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def assert_rewritten(function, *inputs, rule, mode="fake", count=1, exact=False):
    before = make_fx(function, tracing_mode=mode)(*inputs)
    after = copy.deepcopy(before)
    guards = count_guards(after.graph)
    assert apply_rules(after, (rule,), PassContext(Options())) == count
    assert count_guards(after.graph) == guards
    assert_metadata_is_true(after)
    assert_same_computation(before, after, lambda: [x.clone() for x in inputs], exact=exact)
    return after


def test_lists_run_in_their_order():
    names = [[rule.name for rule in rules] for rules in PATTERN_LISTS]
    assert names[0] == [
        "convolution_as_product",
        "convolution_backward_as_products",
        "convolution_channels_last",
    ]
    assert names[1] == ["pointless_cumsum_replacement", "cat_slice_cat"]
    assert names[2][-3:] == ["unfuse_bias_add_to_pointwise", "addmm", "reuse_partial"]


# --- running sums of a constant ---------------------------------------------------------------------------------------


def constant(shape, value, dtype=torch.float32):
    return aten.full.default(shape, value, dtype=dtype, device=torch.device("cpu"), pin_memory=False)


@pytest.mark.parametrize("value", [0.1, 1e300, 3])
def test_a_constant_in_double_precision_keeps_every_bit(value):
    function = lambda x: x + aten.cumsum.default(constant([1, 3], value, torch.float64), 0)  # noqa: E731
    assert_rewritten(function, torch.zeros(1, 3, dtype=torch.float64), rule=POINTLESS_CUMSUM, exact=True)


def test_sizes_that_only_a_symbol_knows_stay_symbols():
    function = lambda x: x + aten.cumsum.default(constant([x.shape[0], x.shape[1]], 0.5), -1)  # noqa: E731
    after = assert_rewritten(function, torch.rand(2, 5), rule=POINTLESS_CUMSUM, mode="symbolic")
    x = torch.rand(3, 7)
    torch.testing.assert_close(after(x), function(x))


def test_the_constant_is_kept_for_its_other_readers():
    def function(x):
        c = constant([4], 2.0)
        return x * c + aten.cumsum.default(c, 0) + aten.cumsum.default(c, 0)

    after = assert_rewritten(function, torch.rand(4), rule=POINTLESS_CUMSUM, count=2)
    assert operators(after).count("full.default") == 1


def test_a_returned_sum_is_dense():
    function = lambda x: aten.cumsum.default(constant([3, x.shape[0]], 2.0), 0)  # noqa: E731
    after = assert_rewritten(function, torch.rand(4), rule=POINTLESS_CUMSUM)
    assert after(torch.rand(4)).is_contiguous()


@pytest.mark.parametrize(("value", "dtype"), [(1e10, torch.int32), (torch.inf, torch.int64)])
def test_a_constant_that_eager_refuses_is_left_to_it(value, dtype):
    function = lambda x: x + aten.cumsum.default(constant([4], value, dtype), 0)  # noqa: E731
    gm = make_fx(function, tracing_mode="fake")(torch.rand(4))
    assert apply_rules(gm, (POINTLESS_CUMSUM,), PassContext(Options())) == 0
    assert [miss.reason for miss in why(gm, POINTLESS_CUMSUM)] == ["the dtype does not hold the constant"]


# --- joins and splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [SPLIT_CAT, CAT_SPLIT], ids=lambda rule: rule.name)
def test_parts_of_symbolic_sizes_are_known(rule):
    def function(a, b):
        if rule is SPLIT_CAT:
            whole = a + 1
            return torch.cat(aten.split_with_sizes.default(whole, [2, whole.shape[0] - 2])) * 2, b
        parts = aten.split_with_sizes.default(torch.cat([a, b]), [a.shape[0], b.shape[0]])
        return parts[0] * 2, parts[1] + 1

    inputs = torch.rand(5, 3), torch.rand(4, 3)
    after = assert_rewritten(
        function, *inputs, rule=rule, mode="symbolic", count=1 if rule is SPLIT_CAT else 2, exact=True
    )
    assert "cat.default" not in operators(after)


# --- a bias -----------------------------------------------------------------------------------------------------------


def test_of_two_products_the_right_one_takes_the_left_along():
    inputs = [torch.rand(shape) for shape in ((3, 4), (4, 5), (3, 6), (6, 5))]
    after = assert_rewritten(lambda a, b, c, d: a @ b + c @ d, *inputs, rule=ADDMM)
    assert operators(after) == ["mm.default", "addmm.default"]
    (fused,) = after.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert [node.name for node in fused.args[1:]] == ["c_1", "d_1"]


def test_a_product_added_to_itself_is_computed_once():
    def function(a, b):
        product = a @ b
        return product + product

    after = assert_rewritten(function, torch.rand(3, 4), torch.rand(4, 5), rule=ADDMM, count=0)
    assert operators(after).count("mm.default") == 1


def test_a_bias_that_depends_on_the_product_stays_behind():
    def function(a, b):
        product = a @ b
        return product + product.relu()

    assert_rewritten(function, torch.rand(3, 4), torch.rand(4, 5), rule=ADDMM, count=0)


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_partial_reductions_the_smallest_is_read(order):
    def function(x):
        rows, columns = [aten.amax.default(x, [dim]) for dim in (0, 1)][::order]
        return rows.sum(), columns.sum(), aten.amax.default(x)

    after = assert_rewritten(function, torch.rand(64, 128), rule=PARTIAL_REDUCTION, exact=True)
    whole = after.graph.output_node().args[0][2]
    assert whole.args[0].meta["val"].shape == (64,)


def test_a_partial_reduction_that_comes_later_moves_before_the_whole_one():
    function = lambda x: (aten.max.default(x) * 2, aten.amax.default(x, [0], True))  # noqa: E731
    after = assert_rewritten(function, torch.rand(64, 128), rule=PARTIAL_REDUCTION, exact=True)
    assert operators(after) == ["amax.default", "amax.default", "mul.Tensor"]
    assert apply_rules(after, (PARTIAL_REDUCTION,), PassContext(Options())) == 0


def test_nothing_is_moved_across_a_write():
    def function(x):
        whole = aten.max.default(x) * 2
        aten.copy_.default(x, x * 3)
        return whole, aten.amax.default(x, [0])

    assert_rewritten(function, torch.rand(64, 128), rule=PARTIAL_REDUCTION, count=0, exact=True)


def test_elements_of_unknown_number_are_left():
    function = lambda x: (aten.amax.default(x, [1]).sum(), aten.amax.default(x))  # noqa: E731
    after = assert_rewritten(function, torch.rand(64, 128), rule=PARTIAL_REDUCTION, mode="symbolic", count=0)
    assert any("not provably" in miss.reason for miss in why(after, PARTIAL_REDUCTION))
