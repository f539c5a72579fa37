"""Rules with a free layout: strides of inner values may change where nobody can tell, and only there.

The rule of these tests drops every copy into contiguous memory, so that readers get the strides of what was copied.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.verify import Snapshot, count_guards, verify_graph
from ferrite.options import Options
from ferrite.pipeline import PassContext
from ferrite.rewrite import NodeRule, Rule, apply_rules, layout, why
from tests.graphs import assert_metadata_is_true, assert_same_computation, operators

pytestmark = pytest.mark.quick
aten = torch.ops.aten
LIBRARY = torch.library.Library("ferrite_layout_test", "DEF")
LIBRARY.define("double(Tensor x) -> Tensor")
LIBRARY.impl("double", lambda x: (x * 2).contiguous(), "CompositeExplicitAutograd")
torch.library.register_fake("ferrite_layout_test::double", lambda x: torch.empty_like(x).contiguous(), lib=LIBRARY)


def dense(x: Any) -> Any:
    return aten.clone.default(x, memory_format=torch.contiguous_format)


def without_copy(free: bool) -> NodeRule:
    return NodeRule(
        name="no_copies",
        purpose="what is copied is read where it lies",
        targets=(aten.clone.default,),
        rewrite=lambda site: site.arguments["self"],
        layout="free" if free else "kept",
    )


FREE, KEPT = without_copy(True), without_copy(False)


def assert_rewritten(function: Any, *inputs: torch.Tensor, rule: Any = FREE, mode: str = "fake") -> tuple[Any, int]:
    """Apply the rule, and hold the result to everything but the count."""
    before = make_fx(function, tracing_mode=mode)(*inputs)
    after = copy.deepcopy(before)
    snapshot, guards = Snapshot.of(after), count_guards(after.graph)
    count = apply_rules(after, (rule,), PassContext(Options()))
    assert count_guards(after.graph) == guards
    verify_graph(after, snapshot, deep=True)
    assert_metadata_is_true(after)
    assert_same_computation(before, after, lambda: [x.clone() for x in inputs])
    return after, count


def reason(function: Any, *inputs: torch.Tensor, rule: Any = FREE, mode: str = "fake") -> str:
    """Why the rule fires nowhere."""
    after, count = assert_rewritten(function, *inputs, rule=rule, mode=mode)
    assert count == 0
    misses = why(after, rule)
    assert all(miss.reason for miss in misses)
    return misses[0].reason


X = torch.rand(3, 4)

# --- where nobody can tell --------------------------------------------------------------------------------------------

UNSEEN = {
    "a product": lambda x: dense(x.t()) @ x,
    "a sum": lambda x: dense(x.t()).sin().cos().sum(0),
    "a view that goes on to a product": lambda x: dense(x.t())[1:].t() @ x.t()[1:],
    "parts": lambda x: [part.sum() for part in dense(x.t()).split(1)],
    "a view that stays one": lambda x: aten.view.default(dense(x.t()), [4, 3, 1]).sum(0),
    "bits of the same size": lambda x: aten.view.dtype(dense(x.t()), torch.int32).sum(),
}


@pytest.mark.parametrize("function", UNSEEN.values(), ids=UNSEEN)
def test_strides_change_where_nobody_can_tell(function):
    _, count = assert_rewritten(function, X)
    assert count >= 1
    assert assert_rewritten(function, X, rule=KEPT)[1] <= count - 1, "it would have fired anyway"


@pytest.mark.lengthy
@pytest.mark.parametrize("function", UNSEEN.values(), ids=UNSEEN)
def test_the_same_with_symbolic_sizes(function):
    assert_rewritten(function, X, mode="symbolic")


def test_values_behind_are_true_as_far_as_they_change():
    after, count = assert_rewritten(lambda x: dense(x.t()).sin().cos().sum(0), X)
    assert count == 1
    strides = {node.name: node.meta["val"].stride() for node in after.graph.nodes if node.op == "call_function"}
    assert strides == {"t": (1, 4), "sin": (1, 4), "cos": (1, 4), "sum_1": (1,)}


def test_a_reshape_copies_where_it_was_a_view():
    """The values behind it do not change, but the reshape shares no memory with its operand any more."""
    gm = make_fx(lambda x: aten.view.default(dense(x.t()), [12]).exp(), tracing_mode="fake")(X)
    (reshape,) = gm.graph.find_nodes(op="call_function", target=aten.view.default)
    reshape.target = aten.reshape.default
    before, snapshot = copy.deepcopy(gm), Snapshot.of(gm)
    assert apply_rules(gm, (KEPT,), PassContext(Options())) == 0
    assert apply_rules(gm, (FREE,), PassContext(Options())) == 1
    verify_graph(gm, snapshot, deep=True)
    assert_same_computation(before, gm, lambda: [X.clone()])


def test_a_rule_of_two_functions_may_be_free_as_well():
    rule = Rule(
        name="sum_of_copy",
        purpose="a copy is not needed for a sine",
        before=lambda x: aten.sin.default(aten.clone.default(x, memory_format=torch.contiguous_format)),
        after=lambda x: aten.sin.default(x),
        layout="free",
    )
    function = lambda x: dense(x.t()).sin().sum(0)  # noqa: E731
    after, count = assert_rewritten(function, X, rule=rule)
    assert count == 1
    assert operators(after) == ["t.default", "sin.default", "sum.dim_IntList"]


# --- where somebody can -----------------------------------------------------------------------------------------------

SEEN = {
    "returned": (lambda x: dense(x.t().sin()), "output clone would have other strides"),
    "a view returned": (lambda x: dense(x.t().sin())[1:], "output slice_1 would have other strides"),
    "what has its strides returned": (lambda x: dense(x.t()).sin(), "output sin would have other strides"),
    "strides asked for": (lambda x: aten.as_strided.default(dense(x.t()), [4], [1]) + 1, "reads the memory of clone"),
    "strides asked for behind a view": (
        lambda x: aten.as_strided_copy.default(dense(x.t())[1:], [2], [1]).sum(),
        "reads the memory of slice_1",
    ),
    "a custom operator": (
        lambda x: torch.ops.ferrite_layout_test.double(dense(x.t())) + 1,
        "double may depend on the strides of clone",
    ),
    "a custom operator behind others": (
        lambda x: torch.ops.ferrite_layout_test.double(dense(x.t()).sin()) + 1,
        "double may depend on the strides of sin",
    ),
    "a view that would be none": (lambda x: aten.view.default(dense(x.t()), [12]).exp(), "could not be computed on it"),
    "bits of another size": (
        lambda x: aten.view.dtype(dense(x.t()), torch.int16).sum(),
        "could not be computed on it",
    ),
    "random numbers": (lambda x: aten.bernoulli.default(dense(x.t())), "draws random numbers in the order"),
    "numbers of its shape": (lambda x: aten.rand_like.default(dense(x.t())).sum(), "draws random numbers"),
    "written": (lambda x: aten.add_.Tensor(dense(x.t()), 1).sum(), "writes, and would write with other strides"),
    "a view written": (
        lambda x: (y := dense(x.t()), aten.fill_.Scalar(y[1:], 1), y.sum())[2],
        "would write with other strides",
    ),
}


@pytest.mark.parametrize(("function", "message"), SEEN.values(), ids=SEEN)
def test_strides_stay_where_somebody_can_tell(function, message):
    assert message in reason(function, X)


def test_a_stride_that_is_a_number_in_the_graph():
    gm = make_fx(lambda x: dense(x.t()).sum(), tracing_mode="symbolic")(X)
    (copied,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.sum.default)
    with gm.graph.inserting_after(copied):
        stride = gm.graph.call_function(aten.sym_stride.int, (copied, 0))
    stride.meta["val"] = copied.meta["val"].stride(0)
    with gm.graph.inserting_after(total):
        product = gm.graph.call_function(aten.mul.Tensor, (total, stride))
    product.meta["val"] = total.meta["val"] * stride.meta["val"]
    gm.graph.output_node().args = (product,)
    (miss,) = why(gm, FREE)
    assert "sym_stride" in miss.reason
    assert apply_rules(gm, (FREE,), PassContext(Options())) == 0


def test_a_branch_may_depend_on_the_strides_of_its_operands():
    def function(x):
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (dense(x.t()),)).sum()

    gm = make_fx(function, tracing_mode="fake")(X)
    assert [miss.reason for miss in why(gm, FREE)] == ["cond may depend on the strides of clone"]


def test_undecidable_layouts_are_left_and_add_no_guard():
    """Whether a view of the transposed tensor is one depends on a size that may be one."""
    function = lambda x, y: aten.view.default(dense(x.t()), [-1]).exp() + y  # noqa: E731
    gm = make_fx(function, tracing_mode="symbolic")(X, torch.rand(12))
    guards = count_guards(gm.graph)
    assert all(miss.reason for miss in why(gm, FREE))
    assert count_guards(gm.graph) == guards


def test_failures_on_the_way_are_not_logged(monkeypatch):
    records = []
    monkeypatch.setattr(logging.Logger, "handle", lambda _logger, record: records.append(record))
    logging.getLogger("torch").error("seen")
    reason(SEEN["a view that would be none"][0], X)
    assert [record.getMessage() for record in records if record.levelname == "ERROR"] == ["seen"]


# --- where values lie, under any rule ---------------------------------------------------------------------------------


def test_views_of_a_replaced_value_are_views_of_the_new_one():
    """The second copy would come to share its storage with a view of the first one's source."""

    def function(x):
        y = x + 1
        return aten.clone.default(y), aten.view.default(aten.clone.default(y), [-1])

    for rule in (KEPT, FREE):
        _, count = assert_rewritten(function, X, rule=rule)
        assert count == 1


def test_an_output_stays_where_it_lies_in_its_storage():
    function = lambda x: aten.clone.default((x + 1)[1:])  # noqa: E731
    assert reason(function, X, rule=KEPT) == "output clone would have another offset in its storage"
    assert assert_rewritten(lambda x: aten.clone.default((x + 1)[1:]) + 1, X, rule=KEPT)[1] == 1


def test_memory_is_not_read_from_another_place():
    function = lambda x: aten.as_strided.default(aten.clone.default((x + 1)[1:]), [2], [1], 0) * 2  # noqa: E731
    assert "reads the memory of clone as it lies" in reason(function, X, rule=KEPT)


def test_two_outputs_that_share_memory_move_together():
    def function(x):
        y = aten.clone.default(x + 1)
        return y, aten.view.default(y, [-1])

    after, count = assert_rewritten(function, X, rule=KEPT)
    assert count == 1
    assert operators(after) == ["add.Tensor", "view.default"]


def test_what_is_written_later_is_not_read_instead():
    def function(x):
        y = aten.clone.default(x)
        aten.add_.Tensor(x, 1)
        return y * 2

    assert reason(function, X, rule=KEPT) == "the memory of x_1 is written to later"


# --- cost -------------------------------------------------------------------------------------------------------------


def chain(length: int):
    def function(x):
        y = dense(x.t())
        for _ in range(length):
            y = y.sin()
        return y.sum(0)

    return function


def test_a_long_way_is_not_gone(monkeypatch):
    monkeypatch.setattr(layout, "MAX_VALUES_BEHIND", 8)
    assert assert_rewritten(chain(7), X)[1] == 1
    assert reason(chain(8), X) == "more than 8 values behind it would change"


@pytest.mark.lengthy
def test_the_cost_of_many_copies_in_a_row_is_bounded(monkeypatch):
    """Each copy that goes moves all views behind it; no more than the limit for each."""
    monkeypatch.setattr(layout, "MAX_VALUES_BEHIND", 16)
    gm = make_fx(lambda x: chain_of_views(x, 40), tracing_mode="fake")(X)
    context = PassContext(Options())
    count = apply_rules(gm, (KEPT,), context)
    assert 0 < count <= 40
    assert context.steps <= 40 * (16 + 3)


def chain_of_views(x, length):
    for _ in range(length):
        x = aten.view.default(aten.clone.default(x), [3, 4])
    return x.sum(0)
