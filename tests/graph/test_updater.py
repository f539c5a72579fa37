"""Fake values follow edits, and an edit costs what it changes."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.aliases import storage_of
from ferrite.graph.updater import BodyMismatch, MetadataUpdater
from ferrite.graph.values import CannotRun, compute, mode_of, same_metadata
from ferrite.graph.verify import count_guards, verify_graph
from tests.graphs import named

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def trace(fn, *inputs, mode="symbolic"):
    return make_fx(fn, tracing_mode=mode)(*inputs)


def insert_after(node, target, *args, **kwargs):
    """A new call on `node` that takes over all its other uses."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, (node, *args), kwargs)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def chain(x):
    for _ in range(50):
        x = x.sin()
    return x


def check(gm):
    verify_graph(gm, deep=True)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_an_operator_of_the_same_metadata_on_top_of_a_chain_updates_one_node(mode):
    gm = trace(chain, torch.rand(3, 4), mode=mode)
    updater = MetadataUpdater(gm.graph)
    top = next(iter(gm.graph.nodes))
    guards = count_guards(gm.graph)
    new = insert_after(top, aten.cos.default)
    assert updater.update() == 1
    assert same_metadata(new.meta["val"], top.meta["val"])
    check(gm)
    assert count_guards(gm.graph) == guards
    assert updater.update() == 0


def test_only_what_an_edit_touches_is_run(monkeypatch):
    gm = trace(chain, torch.rand(3, 4))
    updater = MetadataUpdater(gm.graph)
    insert_after(next(iter(gm.graph.nodes)), aten.cos.default)
    run = []
    monkeypatch.setattr("ferrite.graph.updater.compute", lambda node, mode: run.append(node) or compute(node, mode))
    updater.update()
    assert len(run) == 1  # the new node; the one whose operand it became is given what looks the same
    updater.update()
    assert len(run) == 1


def test_operands_that_look_otherwise_are_run_with(monkeypatch):
    """The same call on an operand of another size, or on one operand twice instead of two."""
    gm = trace(lambda x, y: (x.sin() @ y, x.sum(), y.sum()), torch.rand(4, 4), torch.rand(4, 4))
    updater = MetadataUpdater(gm.graph)
    x, y = list(gm.graph.nodes)[:2]
    product = named(gm)["mm"]
    with gm.graph.inserting_before(product):
        part = gm.graph.call_function(aten.slice.Tensor, (y, 1, 0, 2))
    product.replace_input_with(y, part)
    updater.update()
    assert product.meta["val"].shape == (4, 2)
    product.args = (x, x)
    assert updater.update() == 1
    assert product.meta["val"].shape == (4, 4)
    check(gm)


def test_another_dtype_reaches_all_that_depends_on_it():
    gm = trace(lambda x: (chain(x.to(torch.float64)), x.cos()), torch.rand(3, 4))
    updater = MetadataUpdater(gm.graph)
    cast = named(gm)["_to_copy"]
    cast.kwargs = {"dtype": torch.float16}
    assert updater.update() == 51
    assert all(node.meta["val"].dtype == torch.float16 for node in gm.graph.nodes if node.name.startswith("sin"))
    check(gm)


def test_a_transpose_changes_strides_until_an_operator_fixes_the_layout():
    def fn(x):
        y = x.sin().cos()
        z = y.clone(memory_format=torch.contiguous_format)
        return z.exp().tan()

    gm = trace(fn, torch.rand(4, 4))
    updater = MetadataUpdater(gm.graph)
    new = insert_after(next(iter(gm.graph.nodes)), aten.permute.default, [1, 0])
    assert updater.update() == 3
    nodes = named(gm)
    assert nodes["cos"].meta["val"].stride() == new.meta["val"].stride()
    assert nodes["clone"].meta["val"].is_contiguous()
    check(gm)


def test_a_view_follows_the_storage_of_its_operand():
    """The metadata of the views stays the same, but they must be views of the new node, not of the old one."""
    gm = trace(lambda x: (x + 1).view(-1).unsqueeze(0).sin().cos(), torch.rand(3, 4))
    updater = MetadataUpdater(gm.graph)
    nodes = named(gm)
    new = insert_after(nodes["add"], aten.exp.default)
    assert updater.update() == 3
    assert storage_of(nodes["view"]) == storage_of(nodes["unsqueeze"]) == storage_of(new) != storage_of(nodes["add"])
    check(gm)


def test_a_view_that_becomes_a_copy_is_another_value():
    gm = trace(lambda x: aten.alias.default(x).sin(), torch.rand(3, 4))
    updater = MetadataUpdater(gm.graph)
    x, alias, *_ = gm.graph.nodes
    alias.target = aten.clone.default
    assert updater.update() == 1
    assert storage_of(alias) != storage_of(x)
    check(gm)


def test_edited_updated_and_edited_back_is_changed_twice():
    gm = trace(lambda x: x.to(torch.float64).sin(), torch.rand(3))
    updater = MetadataUpdater(gm.graph)
    cast = named(gm)["_to_copy"]
    for dtype in (torch.float16, torch.float64):
        cast.kwargs = {"dtype": dtype}
        assert updater.update() == 2
        check(gm)


@pytest.mark.parametrize(("before", "after"), [(1, 1.0), (1, True), (0.0, -0.0)])
def test_arguments_that_are_equal_but_not_the_same_are_edits(before, after):
    gm = trace(lambda x: aten.full.default([2], before) + x, torch.rand(2), mode="fake")
    updater = MetadataUpdater(gm.graph)
    full = named(gm)["full"]
    full.args = ([2], after)
    full.kwargs = {}
    updater.update()
    check(gm)


def test_values_that_passes_leave_out_or_put_in_are_checked():
    gm = trace(lambda x: x.sin().cos(), torch.rand(3))
    updater = MetadataUpdater(gm.graph)
    nodes = named(gm)
    del nodes["sin"].meta["val"]
    assert updater.update() == 1
    nodes["cos"].meta["val"] = nodes["sin"].meta["val"]  # a storage that belongs to another node
    assert updater.update() == 1
    check(gm)


def test_values_missing_from_the_start_are_filled_in():
    gm = trace(lambda x: x.sin().cos(), torch.rand(3))
    del named(gm)["cos"].meta["val"]
    assert MetadataUpdater(gm.graph).update() == 1
    check(gm)


def test_a_copied_value_does_not_share_the_storage_of_its_origin():
    gm = trace(lambda x: (x.sin(), x.sin() + 1), torch.rand(3))
    updater = MetadataUpdater(gm.graph)
    sin = named(gm)["sin"]
    with gm.graph.inserting_after(sin):
        twin = gm.graph.node_copy(sin, lambda node: node)
    assert twin.meta["val"] is sin.meta["val"]
    assert updater.update() == 1
    assert storage_of(twin) != storage_of(sin)


def test_nodes_with_operands_that_have_no_value_are_left_alone():
    gm = trace(lambda x: x.sin().cos(), torch.rand(3))
    nodes = named(gm)
    x = next(iter(gm.graph.nodes))
    value, old = x.meta.pop("val"), nodes["sin"].meta["val"]
    updater = MetadataUpdater(gm.graph, old.fake_mode)
    nodes["sin"].target = aten.exp.default
    assert updater.update() == 0
    assert nodes["sin"].meta["val"] is old
    x.meta["val"] = value
    assert updater.update() > 0
    check(gm)


def test_routines_of_the_compiler_are_not_run():
    gm = trace(lambda x: x.sin(), torch.rand(3))
    sin = named(gm)["sin"]

    def lower(x):
        raise AssertionError

    lower.__module__ = "ferrite.lower.anything"
    updater = MetadataUpdater(gm.graph)
    sin.target = lower
    assert updater.update() == 0


def test_tuples_are_compared_part_by_part():
    def fn(x):
        parts = x.split(2)
        return parts[0].sin(), parts[1].cos()

    gm = trace(fn, torch.rand(4), mode="fake")
    updater = MetadataUpdater(gm.graph)
    split = named(gm)["split"]
    split.args = (split.args[0], 3)
    assert updater.update() == 5
    assert [tuple(node.meta["val"].shape) for node in gm.graph.nodes if node.name in ("sin", "cos")] == [(3,), (1,)]
    check(gm)


def test_conjugation_is_part_of_a_value():
    gm = trace(lambda x: aten.alias.default(x), torch.rand(3, dtype=torch.complex64), mode="fake")
    updater = MetadataUpdater(gm.graph)
    alias = named(gm)["alias"]
    alias.target = aten._conj.default
    assert updater.update() == 1
    assert alias.meta["val"].is_conj()


def test_symbolic_sizes_are_compared_without_guards():
    def fn(x, y):
        return x.view(x.shape[0] * 2, -1).sin(), (x.shape[0] + y.shape[0]) * 2

    gm = trace(fn, torch.rand(3, 4), torch.rand(5))
    guards = count_guards(gm.graph)
    updater = MetadataUpdater(gm.graph)
    x, y = (node for node in gm.graph.nodes if node.op == "placeholder")
    insert_after(x, aten.exp.default)
    new = insert_after(y, aten.slice.Tensor, 0, 1)
    assert updater.update() == 6  # both new nodes, the view, the size of y, the sum and the product
    assert str(new.meta["val"].shape[0] + 1) == str(y.meta["val"].shape[0])
    assert count_guards(gm.graph) == guards
    check(gm)


def unbacked(gm):
    return {str(symbol) for node in gm.graph.nodes for symbol in node.meta.get("unbacked_bindings", ())}


def test_nonzero_keeps_its_symbol():
    gm = trace(lambda x: torch.nonzero(x).to(torch.float32).sin(), torch.rand(3, 4))
    updater = MetadataUpdater(gm.graph)
    before = unbacked(gm)
    nonzero = named(gm)["nonzero"]
    old = nonzero.meta["val"]
    insert_after(next(iter(gm.graph.nodes)), aten.exp.default)
    assert updater.update() == 1
    assert unbacked(gm) == before
    assert nonzero.meta["val"] is old
    insert_after(next(iter(gm.graph.nodes)), aten.unsqueeze.default, 0)  # another width, the same number of rows
    assert updater.update() > 2
    assert unbacked(gm) == before
    rows, width = named(gm)["sin"].meta["val"].shape
    assert (str(rows), width) == (*before, 3)
    check(gm)
    assert unbacked(gm) == before
    assert not mode_of(gm.graph).shape_env.pending_fresh_unbacked_symbols


def test_a_node_that_replaces_nonzero_binds_a_symbol():
    gm = trace(lambda x: torch.nonzero(x).sin(), torch.rand(3, 4))
    updater = MetadataUpdater(gm.graph)
    old = named(gm)["nonzero"]
    with gm.graph.inserting_after(old):
        new = gm.graph.call_function(aten.nonzero.default, old.args)
    old.replace_all_uses_with(new)
    gm.graph.erase_node(old)
    assert updater.update() == 2
    (symbol,) = unbacked(gm)
    assert str(named(gm)["sin"].meta["val"].shape[0]) == symbol
    check(gm)


def test_a_copy_of_nonzero_binds_a_symbol_of_its_own():
    gm = trace(lambda x: (torch.nonzero(x), x.sin()), torch.rand(3, 4))
    updater = MetadataUpdater(gm.graph)
    old = named(gm)["nonzero"]
    with gm.graph.inserting_after(named(gm)["sin"]):
        new = gm.graph.node_copy(old, lambda node: node)
    new.args = (named(gm)["sin"],)
    assert updater.update() == 1
    assert len(unbacked(gm)) == 2
    assert not set(new.meta["unbacked_bindings"]) & set(old.meta["unbacked_bindings"])


def test_a_node_that_no_longer_runs_is_named():
    gm = trace(lambda x, y: x @ y, torch.rand(3, 4), torch.rand(4, 5), mode="fake")
    updater = MetadataUpdater(gm.graph)
    mm = named(gm)["mm"]
    mm.args = mm.args[::-1]
    with pytest.raises(CannotRun, match="mm") as caught:
        updater.update()
    assert caught.value.node is mm


def test_in_place_operators_leave_their_operands_values_alone():
    gm = trace(lambda x: x.sin(), torch.rand(3, 4), mode="fake")
    updater = MetadataUpdater(gm.graph)
    sin = named(gm)["sin"]
    new = insert_after(sin, aten.t_.default)
    assert updater.update() == 1
    assert sin.meta["val"].shape == (3, 4)
    assert new.meta["val"].shape == (4, 3)
    assert storage_of(new) == storage_of(sin)


def test_new_constants_get_values():
    gm = trace(lambda x: x + 1, torch.rand(3))
    updater = MetadataUpdater(gm.graph)
    gm.register_buffer("weight", torch.rand(3))
    add = named(gm)["add"]
    with gm.graph.inserting_before(add):
        weight = gm.graph.get_attr("weight")
    add.args = (add.args[0], weight)
    assert updater.update() >= 1
    assert weight.meta["val"].shape == (3,)
    check(gm)


def branch(p, x):
    y = x + 1
    return torch.cond(p, lambda y: (y.sin() * 2,), lambda y: (y.cos() * 2,), (y,))[0] + 1


def test_bodies_are_updated_before_their_callers():
    gm = trace(branch, torch.tensor(True), torch.rand(4, 4), mode="fake")
    updater = MetadataUpdater(gm.graph)
    assert updater.update() == 0
    for body in (gm.true_graph_0, gm.false_graph_0):
        top = next(node for node in body.graph.nodes if node.name in ("sin", "cos"))
        insert_after(top, aten.to.dtype, torch.float64)
    assert updater.update() == 4 + 3  # two nodes in each body; the conditional, its item, the sum
    assert [node.meta["val"].dtype for node in gm.graph.nodes if node.name == "add_1"] == [torch.float64]
    check(gm)
    assert updater.update() == 0


def test_a_body_edited_to_the_same_metadata_leaves_the_callers_users_alone():
    gm = trace(branch, torch.tensor(True), torch.rand(4, 4))
    updater = MetadataUpdater(gm.graph)
    sin = named(gm.true_graph_0)["sin"]
    insert_after(sin, aten.exp.default)
    assert updater.update() == 1
    check(gm)


def test_a_body_that_returns_another_of_its_nodes_is_seen():
    def fn(p, x):
        return torch.cond(p, lambda x: (x.sin(), x.sum(0)), lambda x: (x.cos(), x.sum(1)), (x,))[0] + 1

    gm = trace(fn, torch.tensor(True), torch.rand(4, 4), mode="fake")
    updater = MetadataUpdater(gm.graph)
    for body in (gm.true_graph_0, gm.false_graph_0):
        output = list(body.graph.nodes)[-1]
        output.args = (output.args[0][::-1],)
    assert updater.update() == 4  # the conditional, its two items, the sum
    assert named(gm)["add"].meta["val"].shape == (4,)
    check(gm)


def test_other_strides_of_an_argument_reach_the_bodies():
    gm = trace(branch, torch.tensor(True), torch.rand(4, 4), mode="fake")
    updater = MetadataUpdater(gm.graph)
    insert_after(named(gm)["add"], aten.permute.default, [1, 0])
    updater.update()
    for body in (gm.true_graph_0, gm.false_graph_0):
        assert {node.meta["val"].stride() for node in body.graph.nodes if "val" in node.meta} == {(1, 4)}
    assert named(gm)["add_1"].meta["val"].stride() == (1, 4)
    check(gm)


def two_calls():
    """A graph that calls one nested graph twice."""
    inner = trace(lambda x: (x.sin(),), torch.rand(4, 4), mode="fake")
    outer = trace(lambda x: (x + 1, x + 2), torch.rand(4, 4), mode="fake")
    mode = mode_of(outer.graph)
    with mode:
        value = torch.empty(4, 4)
    for node in inner.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = value.sin() if node.name == "sin" else value
    outer.body = inner
    first, second = named(outer)["add"], named(outer)["add_1"]
    with outer.graph.inserting_after(second):
        body = outer.graph.get_attr("body")
    with outer.graph.inserting_after(body):
        calls = [
            outer.graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", operand))
            for operand in (second, first)
        ]
    output = list(outer.graph.nodes)[-1]
    output.args = (tuple(calls),)
    return outer


def test_invoked_subgraphs():
    gm = two_calls()
    updater = MetadataUpdater(gm.graph)
    assert updater.update() == 2
    sin = named(gm.body)["sin"]
    sin.target = aten.exp.default
    assert updater.update() == 0
    insert_after(sin, aten.to.dtype, torch.float64)
    assert updater.update() == 3
    check(gm)


def test_two_calls_of_one_graph_must_agree():
    gm = two_calls()
    updater = MetadataUpdater(gm.graph)
    updater.update()
    insert_after(named(gm)["add"], aten.permute.default, [1, 0])
    with pytest.raises(BodyMismatch, match="another layout"):
        updater.update()


def test_loops():
    def fn(x):
        y = x + 1
        return torch.ops.higher_order.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.zeros((), dtype=torch.int64), y), ()
        )[1]

    gm = trace(fn, torch.rand(4, 4), mode="fake")
    updater = MetadataUpdater(gm.graph)
    assert updater.update() == 0
    insert_after(named(gm)["add"], aten.exp.default)
    assert updater.update() == 1
    body = gm.while_loop_body_graph_0
    insert_after(named(body)["sin"], aten.cos.default)
    assert updater.update() == 1
    check(gm)
