"""Writes, random draws and effects of single nodes, and the regions that writes make."""

from __future__ import annotations

import operator

import pytest
import torch
import torch._higher_order_ops.triton_kernel_wrap  # registers its operators
import torch._prims.rng_prims  # the same
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.regions import Regions, has_effect, is_collective, is_random, is_wait, mutates

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def call(target, *args, **kwargs):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, tuple(x if arg == "x" else arg for arg in args), kwargs)


def higher_order(name, body):
    """A call of a higher-order operator on a nested graph made by `body`."""
    gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    gm.body = torch.fx.symbolic_trace(body)
    x = gm.graph.placeholder("x")
    return gm.graph.call_function(getattr(torch.ops.higher_order, name), (gm.graph.get_attr("body"), "body", x))


WRITES = [
    call(aten.copy_.default, "x", "x"),
    call(aten.add.out, "x", 1, out="x"),
    call(aten.index_put_.default, "x", ["x"], "x"),
    call(operator.setitem, "x", 0, 1),
    call(torch.ops.higher_order.triton_kernel_wrapper_mutation),
    higher_order("invoke_subgraph", lambda x: aten.add_.Tensor(x, 1)),
]
DRAWS = [
    call(aten.rand.default, [2]),
    call(aten.rand_like.default, "x"),
    call(aten.bernoulli.p, "x", 0.5),
    call(aten.native_dropout.default, "x", 0.5, True),
    call(aten._scaled_dot_product_flash_attention_for_cpu.default, "x", "x", "x", 0.1),
    call(torch.ops.higher_order.run_with_rng_state, "x", aten.rand.default, [2]),
    call(torch.ops.higher_order.run_and_save_rng_state, aten.rand.default, [2]),
    higher_order("invoke_subgraph", lambda x: aten.rand_like.default(x)),
]
OTHER_EFFECTS = [
    call(aten._assert_async.msg, "x", "no"),
    call(aten._assert_scalar.default, "x", "no"),
    call(aten._assert_tensor_metadata.default, "x"),
    call(aten.sym_constrain_range_for_size.default, "x"),
    call(aten._linalg_check_errors.default, "x", "inv", is_matrix=True),
    call(torch.ops.higher_order.with_effects, "x", aten._print.default, "hello"),
    call(torch.ops.profiler._record_function_enter_new.default, "here"),
    call(torch.ops._c10d_functional.all_reduce.default, "x", "sum", "0"),
    call(torch.ops._c10d_functional.wait_tensor.default, "x"),
    higher_order("invoke_subgraph", lambda x: aten._assert_async.msg(x, "no")),
]
PURE = [
    call(aten.add.Tensor, "x", "x"),
    call(aten.empty.memory_format, [2]),
    call(aten.clone.default, "x"),
    call(aten.nonzero.default, "x"),
    call(aten.view.default, "x", [2]),
    call(operator.getitem, "x", 0),
    call(aten.sym_size.int, "x", 0),
    call(aten.native_dropout.default, "x", 0.5, False),
    call(aten._scaled_dot_product_flash_attention_for_cpu.default, "x", "x", "x"),
    higher_order("invoke_subgraph", lambda x: aten.sin.default(x)),
]


@pytest.mark.parametrize("node", WRITES, ids=str)
def test_writes(node):
    assert mutates(node)
    assert has_effect(node)
    assert not is_random(node)


@pytest.mark.parametrize("node", DRAWS, ids=str)
def test_random_draws(node):
    assert is_random(node)
    assert has_effect(node)
    assert not mutates(node)


@pytest.mark.parametrize("node", OTHER_EFFECTS, ids=str)
def test_other_effects(node):
    assert has_effect(node)
    assert not mutates(node)
    assert not is_random(node)


@pytest.mark.parametrize("node", PURE, ids=str)
def test_pure_operators_have_no_effect(node):
    assert not has_effect(node)
    assert not mutates(node)
    assert not is_random(node)


def test_inputs_and_outputs_have_an_effect():
    graph = torch.fx.symbolic_trace(lambda x: x).graph
    assert all(map(has_effect, graph.nodes))
    assert not any(map(mutates, graph.nodes))


def test_in_place_methods_write():
    graph = torch.fx.symbolic_trace(lambda x: (x.add_(1), x.sin())).graph
    assert [node.name for node in graph.nodes if mutates(node)] == ["add_"]


def test_collectives_and_waits():
    start, wait = OTHER_EFFECTS[-3:-1]
    assert is_collective(start)
    assert not is_wait(start)
    assert is_collective(wait)
    assert is_wait(wait)
    assert not is_collective(PURE[0])


def test_each_write_is_a_region_between_two():
    def fn(x, y):
        a = x.sin()
        b = a.cos()
        x.copy_(b)
        c = x.exp()
        y.copy_(c)
        return c + y

    gm = make_fx(fn)(torch.rand(3), torch.rand(3))
    nodes, regions = {node.name: node for node in gm.graph.nodes}, Regions(gm.graph)
    assert regions.same_region(nodes["sin"], nodes["cos"])
    assert not regions.same_region(nodes["cos"], nodes["copy_"])
    assert not regions.same_region(nodes["copy_"], nodes["exp"])
    assert not regions.same_region(nodes["cos"], nodes["exp"])
    assert regions.all_in_one([nodes["sin"], nodes["cos"]])
    assert not regions.all_in_one([nodes["sin"], nodes["exp"]])
    assert [regions.of(nodes[name]) for name in ("sin", "copy_", "exp", "copy__1", "add")] == [0, 1, 2, 3, 4]


def test_a_new_node_is_in_no_region_until_it_is_placed():
    gm = make_fx(lambda x: x.sin().cos())(torch.rand(3))
    _, sin, cos, _ = gm.graph.nodes
    regions = Regions(gm.graph)
    with gm.graph.inserting_after(sin):
        new = gm.graph.call_function(aten.exp.default, (sin,))
    assert not regions.same_region(new, cos)
    assert not regions.same_region(new, new)
    regions.adopt(new, cos)
    assert regions.same_region(new, sin)


def test_a_body_is_looked_into_once(monkeypatch):
    """Forty calls of one nested graph cost as much as one."""
    from ferrite.graph import regions as module

    looks = []
    original = module._mutates_itself
    monkeypatch.setattr(module, "_mutates_itself", lambda node: looks.append(node) or original(node))
    caller = higher_order("invoke_subgraph", lambda x: aten.sin.default(x))
    for _ in range(39):
        caller.graph.call_function(caller.target, caller.args)
    Regions(caller.graph)
    assert len(looks) == 2 + 40 + 1
