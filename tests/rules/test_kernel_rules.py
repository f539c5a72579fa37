"""Forms that pay only as kernels are taken on the devices whose kernels they were made for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.options import Options
from ferrite.passes import joint_graph_passes, post_grad_passes
from ferrite.passes.shared.cases import on_meta
from tests.compare import assert_same_as_eager

aten = torch.ops.aten
prepare = torch.ops.ferrite.prepare_softmax_online.default


def scaled(x):
    return torch.softmax(x * 0.3, -1)


def one_hot(x):
    return aten.full.default([4, 6], 0.0, device=x.device).scatter(1, x.argmax(1, keepdim=True), 1.0)


def added(x):
    return x.index_add(0, torch.randperm(4, device=x.device)[:2], x[:2])


def softmax_by_hand(x):
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


STAGES = {
    scaled: (joint_graph_passes, aten.amax.default),
    one_hot: (joint_graph_passes, aten.where.self),
    added: (joint_graph_passes, aten._unsafe_index_put.default),
    softmax_by_hand: (post_grad_passes, prepare),
}


def targets_after(function, stage, *inputs, **options) -> list:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    stage(gm, is_inference=True, options=Options(strict=True, **options))
    return [node.target for node in gm.graph.nodes]


@pytest.mark.quick
@pytest.mark.parametrize("function", STAGES, ids=lambda function: function.__name__)
def test_forms_for_gpus_are_taken_there_alone(function):
    stage, target = STAGES[function]
    here, there = torch.rand(4, 6), torch.rand(4, 6, device="meta")
    assert target not in targets_after(function, stage, here)
    assert target in targets_after(function, stage, there)
    assert target not in targets_after(function, stage, there, executor="calls")
    assert target not in targets_after(function, stage, there, kernel_rewrites="off")
    assert target in targets_after(function, stage, here, kernel_rewrites="always")


@pytest.mark.quick
def test_a_graph_on_two_devices_has_each_nodes_own_form():
    found = targets_after(lambda x: (scaled(x), scaled(on_meta(x))), joint_graph_passes, torch.rand(4, 6))
    assert found.count(aten._softmax.default) == 2
    assert found.count(aten.where.self) == 1


@pytest.mark.quick
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_index_that_needs_no_check_has_none_on_any_device(device):
    def shuffled(x):
        return x[torch.randperm(4, device=x.device)[:2]]

    x = torch.rand(4, 6, device=device)
    assert aten._unsafe_index.Tensor in targets_after(shuffled, joint_graph_passes, x)
    assert aten._unsafe_index.Tensor not in targets_after(shuffled, joint_graph_passes, x, executor="calls")


def sample(logits):
    weights = F.softmax(logits, -1)
    return torch.argmax(weights / torch.empty_like(weights).exponential_(1), -1)


@pytest.mark.parametrize(("options", "count"), [({}, 1), ({"gumbel_argmax": False}, 0), ({"executor": "calls"}, 0)])
def test_sampling_needs_no_softmax_where_kernels_are_compiled(options, count):
    assert_same_as_eager(sample, lambda: [torch.randn(6, 50)], exact=False, options=options)
    assert ferrite.last_compile().rewrites.get("gumbel_argmax", 0) == count


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_statistics_of_a_softmax_are_one_kernel(dtype, dynamic):
    def rows():
        x = torch.randn(7, 33)
        x[0], x[1, 2], x[2, 3], x[3, 4] = -torch.inf, -torch.inf, torch.inf, torch.nan
        return [x.to(dtype)]

    options = {"kernel_rewrites": "always"}
    assert_same_as_eager(softmax_by_hand, rows, options=options, dynamic=dynamic)
    record = ferrite.last_compile()
    assert record.rewrites["prepare_softmax_online"] == 1
    assert not record.eager_calls
    assert len(record.kernels) == 1


def products_added(a, b, c, d):
    return a @ b + c @ d


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "dtype", "options", "count"),
    [
        (products_added, torch.float32, {}, 1),
        (products_added, torch.float64, {}, 1),
        (lambda *matrices: products_added(*matrices).t(), torch.float32, {}, 1),
        (lambda *matrices: products_added(*matrices).relu(), torch.float32, {}, 0),
        (lambda *matrices: products_added(*matrices).relu(), torch.float32, {"kernel_rewrites": "always"}, 1),
        (products_added, torch.bfloat16, {}, 0),
        (products_added, torch.float32, {"kernel_rewrites": "off"}, 0),
        (products_added, torch.float32, {"numerics": "strict"}, 0),
    ],
)
def test_a_sum_of_products_that_no_kernel_reads_is_added_up_in_one_place(function, dtype, options, count, dynamic):
    def matrices():
        return [torch.rand(shape).to(dtype) for shape in ((5, 8), (8, 6), (5, 3), (3, 6))]

    assert_same_as_eager(function, matrices, options=options, dynamic=dynamic)
    assert ferrite.last_compile().rewrites.get("mm_plus_mm", 0) == count


def test_gradients_of_two_layers_on_one_input_are_added_up_in_one_place():
    """What a backward part adds up: the same rule, after autograd."""

    def both(x, v, w):
        return (x @ v).sin() + (x @ w).cos()

    def matrices():
        return [torch.rand(shape, requires_grad=True) for shape in ((5, 8), (8, 6), (8, 6))]

    assert_same_as_eager(both, matrices, backward=True, options={"product_layouts": "off"})
