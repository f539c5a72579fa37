"""Assertions about metadata go once they are known to hold; every other check stays."""

from __future__ import annotations

import pytest
import torch

from ferrite.passes.post_grad.asserts import FalseAssertion, remove_assert_ops
from ferrite.passes.post_grad.products import should_prefer_unfused_addmm
from tests.graphs import traced_with_fakes

pytestmark = pytest.mark.quick
aten = torch.ops.aten
ASSERTION = aten._assert_tensor_metadata.default


def asserting(node, *args, **kwargs):
    """A metadata assertion about a node, put right behind it."""
    with node.graph.inserting_after(node):
        return node.graph.call_function(ASSERTION, (node, *args), kwargs)


def layer(bias, x, weight):
    return aten.addmm(bias, x, weight).to(torch.float64).pow(2)


def layer_inputs():
    return torch.rand(4), torch.rand(2, 3), torch.rand(3, 4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_next_operator_is_the_only_reader_again(dynamic):
    gm = traced_with_fakes(layer, *layer_inputs(), dynamic=dynamic)
    (addmm,) = gm.graph.find_nodes(op="call_function", target=aten.addmm.default)
    users = list(addmm.users)
    before = [node.name for node in gm.graph.nodes]
    asserting(addmm, None, None, torch.float32, device=torch.device("cpu"), layout=torch.strided)
    assert list(addmm.users) != users
    guards = len(addmm.meta["val"].fake_mode.shape_env.guards)

    assert remove_assert_ops(gm.graph) == 1
    assert list(addmm.users) == users
    assert [node.name for node in gm.graph.nodes] == before
    assert len(addmm.meta["val"].fake_mode.shape_env.guards) == guards
    assert remove_assert_ops(gm.graph) == 0
    gm.graph.lint()
    gm.recompile()
    inputs = layer_inputs()
    assert torch.equal(gm(*inputs), layer(*inputs))


def test_the_place_of_a_bias_is_decided_as_without_the_assertion():
    gm = traced_with_fakes(layer, *(x.to("meta") for x in layer_inputs()))
    (addmm,) = gm.graph.find_nodes(op="call_function", target=aten.addmm.default)
    (cast,) = addmm.users
    cast.replace_all_uses_with(addmm)  # pow reads the layer, and so does the assertion
    gm.graph.erase_node(cast)
    assert should_prefer_unfused_addmm(addmm, addmm.args[0])
    asserting(addmm, None, None, torch.float32)
    assert not should_prefer_unfused_addmm(addmm, addmm.args[0])
    remove_assert_ops(gm.graph)
    assert should_prefer_unfused_addmm(addmm, addmm.args[0])


def test_an_assertion_of_the_trace_goes():
    def fn(x):
        aten._assert_tensor_metadata(x, None, None, torch.float32, device=x.device, layout=x.layout)
        return x + 1

    gm = traced_with_fakes(fn, torch.rand(2))
    assert gm.graph.find_nodes(op="call_function", target=ASSERTION)
    assert remove_assert_ops(gm.graph) == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((None, None, torch.float16), {}, "dtype torch.float16"),
        ((), {"dtype": torch.int64}, "dtype torch.int64"),
        ((), {"device": torch.device("cuda:0")}, "device cuda:0"),
        ((), {"layout": torch.sparse_coo}, "layout torch.sparse_coo"),
        (([2, 5],), {}, r"size \[2, 5\]"),
        (([2],), {}, r"size \[2\]"),
        ((None, [1, 2]), {}, r"stride \[1, 2\]"),
    ],
)
def test_a_contradiction_is_reported_before_anything_is_erased(args, kwargs, text):
    gm = traced_with_fakes(lambda x: x + 1, torch.rand(2, 4))
    (x,) = gm.graph.find_nodes(op="placeholder")
    asserting(x, None, None, torch.float32)
    wrong = asserting(x, *args, **kwargs)
    wrong.meta["stack_trace"] = '  File "/home/me/net.py", line 8, in forward\n    check(x)\n'
    before = list(gm.graph.nodes)
    with pytest.raises(FalseAssertion, match=text) as caught:
        remove_assert_ops(gm.graph)
    assert list(gm.graph.nodes) == before
    assert caught.value.node is wrong
    assert "net.py:8  check(x)" in str(caught.value)
    assert "x_1: f32[2, 4]" in str(caught.value)


def test_a_device_without_an_index_means_any():
    gm = traced_with_fakes(lambda x: x + 1, torch.rand(2))
    asserting(gm.graph.find_nodes(op="placeholder")[0], device=torch.device("cpu", 0))
    assert remove_assert_ops(gm.graph) == 1


def test_sizes_that_only_a_run_can_tell_stay():
    gm = traced_with_fakes(lambda x, y: (x + 1, y + 1), torch.rand(3), torch.rand(4, 5), dynamic=True)
    x, y = gm.graph.find_nodes(op="placeholder")
    shape_env = x.meta["val"].fake_mode.shape_env
    guards = len(shape_env.guards)
    asserting(x, [7])
    assert remove_assert_ops(gm.graph) == 0
    with gm.graph.inserting_after(x):
        size = gm.graph.call_function(aten.sym_size.int, (x, 0))
    size.meta["val"] = x.meta["val"].shape[0]
    with gm.graph.inserting_after(size):
        gm.graph.call_function(ASSERTION, (x, [size]))
    assert remove_assert_ops(gm.graph) == 1
    asserting(y, [7])
    with pytest.raises(FalseAssertion):  # wrong for every size
        remove_assert_ops(gm.graph)
    assert len(shape_env.guards) == guards


def test_checks_of_contents_and_symbols_stay():
    def fn(x):
        aten._assert_async.msg(x.sum() > 0, "positive")
        count = x.sum().item()
        torch._check(count > 1)
        return x + count

    gm = traced_with_fakes(fn, torch.ones(3))
    before = list(gm.graph.nodes)
    assert any(node.target is aten._assert_async.msg for node in before)
    assert remove_assert_ops(gm.graph) == 0
    assert list(gm.graph.nodes) == before


def test_without_a_fake_value_nothing_contradicts():
    gm = traced_with_fakes(lambda x: x + 1, torch.rand(2))
    (x,) = gm.graph.find_nodes(op="placeholder")
    asserting(x, None, None, torch.float16)
    x.meta.clear()
    assert remove_assert_ops(gm.graph) == 1
