"""Rules of the joint stage on what their examples cannot show, and the stage on graphs with forward and backward."""

from __future__ import annotations

import copy
import math
import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.updater import MetadataUpdater
from ferrite.options import Options
from ferrite.passes import JOINT, joint_graph_passes
from ferrite.passes.joint import uniform
from ferrite.passes.joint.constant_folding import CONSTANT_RULES
from ferrite.passes.joint.products import KERNEL_RULES, PATTERN_RULES, move_iotas
from ferrite.passes.joint.softmax import SCALED_SOFTMAX_RULES
from ferrite.passes.joint.views import VIEW_RULES
from ferrite.passes.shared.constants import MAX_CALLS_BEHIND
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.compare import assert_no_farther, assert_same_as_eager
from tests.graphs import assert_metadata_is_true, assert_same_computation, operators

quick = pytest.mark.quick
aten, prims = torch.ops.aten, torch.ops.prims
RULES = (*CONSTANT_RULES, *VIEW_RULES, *PATTERN_RULES, *KERNEL_RULES.all)


def rewritten(function, make_inputs, rules=RULES, mode="fake", **options):
    before = make_fx(function, tracing_mode=mode)(*make_inputs())
    after = copy.deepcopy(before)
    count = apply_rules(after, rules, PassContext(Options(**options)))
    return before, after, count


def full(shape, value, dtype=torch.float32):
    return aten.full.default(shape, value, dtype=dtype, device=torch.device("cpu"), pin_memory=False)


@quick
def test_the_stage_has_its_order():
    names = [step.name for step in JOINT.passes]
    order = ["remove_noop_ops", "constant_fold_uniform_value", "pointless_views", "fuse_attention", "pad_mm"]
    order += ["fix_iota_device", "joint_patterns", "scaled_softmax", "replace_random"]
    assert [name for name in names if name in order] == order
    assert names[:2] == ["canonicalize_quant_mapping", "joint_custom_pre_pass"]
    assert names[-2:] == ["joint_custom_post_pass", "save_reads_of_written_inputs"]


# --- constants --------------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64]
)
@pytest.mark.parametrize("number", [0, -0.0, 3, 0.1, -7.6])
def test_every_number_keeps_its_bits(number, dtype):
    def function(x):
        return x + ((full([5], number, dtype) - 1) * 3).abs().clone(), full([5], number, dtype).neg() / 3

    before, after, count = rewritten(function, lambda: [torch.zeros(5, dtype=dtype)], CONSTANT_RULES)
    assert count >= 2
    assert operators(after).count("full.default") == 2
    assert_same_computation(before, after, lambda: [torch.zeros(5, dtype=dtype)], exact=True)


def test_a_long_chain_is_asked_about_once_and_no_farther(monkeypatch):
    def chain(x):
        c = full([2], 1.0)
        for _ in range(300):
            c = c * 1.5 - c
        return x * c

    asked = []
    ask = uniform.Uniform.computed
    monkeypatch.setattr(uniform.Uniform, "computed", lambda self, node: (asked.append(node), ask(self, node))[1])
    gm = make_fx(chain, tracing_mode="fake")(torch.rand(2))
    expected = gm(torch.ones(2))
    (product,) = [
        node for node in gm.graph.nodes if node.args and node.args[0] in gm.graph.find_nodes(op="placeholder")
    ]
    assert uniform.Uniform().of(product.args[1]) is None
    assert len(asked) == len(set(asked)) == MAX_CALLS_BEHIND
    asked.clear()
    nodes = len(gm.graph.nodes)
    assert apply_rules(gm, CONSTANT_RULES, PassContext(Options())) >= 1
    assert len(gm.graph.nodes) <= nodes - MAX_CALLS_BEHIND + 2, "as much is folded as one question reaches"
    assert len(asked) <= len(CONSTANT_RULES) * MAX_CALLS_BEHIND * nodes
    assert torch.equal(gm(torch.ones(2)), expected)


@quick
def test_symbolic_constants_take_their_sizes_from_inputs():
    gm = make_fx(lambda x: x + full([x.shape[0], 3], 2.0) * 3, tracing_mode="symbolic")(torch.rand(4, 3))
    assert apply_rules(gm, CONSTANT_RULES, PassContext(Options())) == 1
    assert operators(gm).count("full.default") == 1
    assert torch.equal(gm(torch.zeros(7, 3)), torch.full((7, 3), 6.0))


@quick
def test_nan_and_the_sign_of_zero_survive():
    x = torch.tensor([-0.0, 0.0, torch.nan, torch.inf, -torch.inf, 2.0])
    for function in (lambda x: (x + full([6], 0.0)).reciprocal(), lambda x: x * 0, lambda x: x * full([6], 0.0) + 1):
        before, after, _ = rewritten(function, x.clone().unsqueeze(0).unbind, CONSTANT_RULES)
        assert torch.equal(after(x).nan_to_num(7, 8, 9), before(x).nan_to_num(7, 8, 9))
        assert torch.equal(after(x).signbit(), before(x).signbit())


# --- views ------------------------------------------------------------------------------------------------------------


@quick
def test_views_of_one_source_that_are_both_returned_stay_two():
    gm = make_fx(lambda x: (x.view(torch.int32), x.view(torch.int32)), tracing_mode="fake")(torch.rand(4))
    for node in gm.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    assert apply_rules(gm, VIEW_RULES, PassContext(Options())) == 0


@quick
def test_a_reshape_that_copies_is_not_undone():
    def function(x):
        return x.t().sin()

    gm = make_fx(function, tracing_mode="fake")(torch.rand(4, 3))
    (sin,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    start = sin.args[0]
    value = start.meta["val"]
    with gm.graph.inserting_before(sin):
        flat = gm.graph.call_function(aten.reshape.default, (start, [12]))
        back = gm.graph.call_function(aten.reshape.default, (flat, [3, 4]))
        flat.meta["val"] = value.reshape(12)
        back.meta["val"] = flat.meta["val"].reshape(3, 4)
        copied = gm.graph.call_function(aten.clone.default, (back,))
        copied.meta["val"] = back.meta["val"].clone()
    gm.graph.output_node().args = ((sin, copied),)
    assert apply_rules(gm, VIEW_RULES, PassContext(Options())) == 0


@quick
def test_the_forward_part_does_not_wait_for_the_backward_part():
    def function(x):
        return x.view(torch.int32).abs() + x.view(torch.int32).neg()

    for tags, count in ((("is_forward", "is_backward"), 1), (("is_backward", "is_forward"), 0)):
        gm = make_fx(function, tracing_mode="fake")(torch.rand(4))
        for node, tag in zip(gm.graph.find_nodes(op="call_function", target=aten.view.dtype), tags, strict=True):
            node.meta["partitioner_tag"] = tag
        assert apply_rules(gm, VIEW_RULES, PassContext(Options())) == count


@quick
def test_a_size_that_is_an_input_is_not_asked_for():
    for length, fires in ((4, 1), (3, 0)):  # of two numbers that are equal torch makes one symbol
        gm = make_fx(lambda x, n: x.new_zeros(n * 2) + n, tracing_mode="symbolic")(torch.rand(4), length)
        x, given = gm.graph.find_nodes(op="placeholder")
        (double,) = gm.graph.find_nodes(op="call_function", target=operator.mul)
        updater = MetadataUpdater(gm.graph)
        with gm.graph.inserting_before(double):
            size = gm.graph.call_function(aten.sym_size.int, (x, 0))
        double.args = (size, 2)
        updater.update()
        assert apply_rules(gm, VIEW_RULES, PassContext(Options())) == fires
        assert double.all_input_nodes == [given if fires else size]
        assert operators(gm).count("sym_size.int") == 1 - fires
        assert_metadata_is_true(gm)
        gm.recompile()
        assert torch.equal(gm(torch.rand(5), 5), torch.full((10,), 5.0))


# --- indices ----------------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("returned", [False, True])
def test_a_range_moves_to_the_accelerator_that_reads_it(returned):
    """`meta` stands in for the accelerator."""

    def function(x):
        at = aten.arange.start_step(0, 6, 2, device=torch.device("cpu"))
        found = aten.index.Tensor(aten._to_copy.default(x, device=torch.device("meta")), [at])
        return (found, at) if returned else found

    gm = make_fx(function, tracing_mode="fake")(torch.rand(6))
    assert move_iotas(gm.graph, "meta") == (0 if returned else 1)
    (at,) = gm.graph.find_nodes(op="call_function", target=aten.arange.start_step)
    assert at.meta["val"].device.type == ("cpu" if returned else "meta")


@quick
def test_only_ranges_move():
    def function(x):
        at = torch.zeros(3, dtype=torch.int64)
        return aten.index.Tensor(aten._to_copy.default(x, device=torch.device("meta")), [at])

    assert move_iotas(make_fx(function, tracing_mode="fake")(torch.rand(6)).graph, "meta") == 0


@quick
def test_permuted_rows_on_a_cpu_need_the_option():
    def function(x, y):
        return x.index_add(0, torch.randperm(6)[:3], y)

    inputs = torch.rand(6, 2), torch.rand(3, 2)
    for asked_for in (False, True):
        gm = make_fx(function, tracing_mode="fake")(*inputs)
        joint_graph_passes(gm, True, Options(kernel_rewrites="always" if asked_for else "auto", strict=True))
        assert ("index_add.default" in operators(gm)) != asked_for
        torch.manual_seed(0)
        ours = gm(*inputs)
        torch.manual_seed(0)
        assert torch.equal(ours, function(*inputs))


# --- softmax ----------------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, -3.0, 100.0])
def test_scaled_rows_in_half_precision_come_nearer(dtype, scale):
    def function(x):
        y = aten._to_copy.default(x * scale, dtype=torch.float32)
        return aten.sub.Tensor(y, aten.amax.default(y, [1], True))

    rows = (torch.randn(8, 16) * 30).to(dtype)
    before, after, count = rewritten(function, lambda: [rows], SCALED_SOFTMAX_RULES)
    assert count == 1
    exact = rows.double() * scale
    exact -= exact.amax(1, keepdim=True)
    assert_no_farther(after(rows), before(rows), exact, "shifted", factor=1.0)


@quick
def test_a_scaled_softmax_is_no_farther_than_eager():
    def softmax(x):
        y = x * 12.5
        e = aten.exp.default(aten.sub.Tensor(y, aten.amax.default(y, [-1], True)))
        return aten.div.Tensor(e, aten.sum.dim_IntList(e, [-1], True))

    rows = torch.randn(16, 33)
    before, after, count = rewritten(softmax, lambda: [rows], SCALED_SOFTMAX_RULES)
    assert count == 1
    assert_no_farther(after(rows), before(rows), (rows.double() * 12.5).softmax(-1), "softmax", factor=1.0)


# --- graphs with both directions --------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """What rules of the stage find: views there and back, detours of dtypes, constants, clones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x).view(-1).view(4, 6).clone()
        y = y.double().to(x.dtype) * torch.ones(4, 6)
        z = self.second(y.t().t()).transpose(0, 1)
        return torch.relu(z).transpose(0, 1).reshape(4, 6) / 1 - torch.zeros(4, 6)


@pytest.mark.parametrize("decompose", ["spelling", "core"])
def test_a_training_step(decompose):
    def inputs():
        return [torch.rand(4, 6, requires_grad=True)]

    assert_same_as_eager(
        Block(), inputs, backward=True, calls=2, options={"decompose": decompose, "kernel_rewrites": "always"}
    )


def test_outputs_that_share_memory():
    def function(x):
        y = x.sin()
        return y.view(-1).view(2, 3), y.clone(), y.t().t(), x.view(-1).view(2, 3), x * 1

    assert_same_as_eager(function, lambda: [torch.rand(2, 3)])
    assert_same_as_eager(function, lambda: [torch.rand(2, 3, requires_grad=True)], backward=True)


def test_inputs_that_are_written():
    def function(x, w):
        before = x.clone()
        x.mul_(2)
        return before.view(-1).view(2, 3) + w * torch.ones(2, 3), (x * 1).sum()

    assert_same_as_eager(function, lambda: [torch.rand(2, 3), torch.rand(2, 3)])
    assert_same_as_eager(function, lambda: [torch.rand(2, 3), torch.rand(2, 3, requires_grad=True)], backward=True)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("copied", [torch.clone, torch.sin, lambda x: (x[:1] * 2, x.sum())[0]])
def test_what_was_read_before_a_write_is_not_read_again(copied, joint):
    def function(x, w):
        y = copied(x) * w
        x.add_(1)
        return y

    inputs = lambda: [torch.rand(2, 3), torch.rand(2, 3, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(function, inputs, backward=True, options={"joint": joint})


def test_dropout_draws_the_numbers_of_eager():
    def function(x):
        y = torch.nn.functional.dropout(x * torch.ones(4, 8), 0.5)
        return torch.nn.functional.dropout(y.clone(), 0.25) + torch.rand(4, 8)

    assert_same_as_eager(function, lambda: [torch.rand(4, 8, requires_grad=True)], backward=True, exact=False)


@quick
def test_a_logarithm_is_not_folded():
    """A logarithm is not rounded in the same way by every kernel."""
    before, after, count = rewritten(lambda x: x + full([3], math.e).log(), lambda: [torch.rand(3)], CONSTANT_RULES)
    assert count == 0
    assert operators(after) == operators(before)
