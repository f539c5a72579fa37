"""Each law of a graph between two passes, broken once."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.updater import MetadataUpdater
from ferrite.graph.verify import InvalidGraph, Snapshot, verify_graph
from tests.graphs import named

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def fn(x, y):
    a = x.sin()
    return a.t(), torch.cat([a, y]), x.view(-1), y.shape[0]


def trace(function=fn, mode="symbolic"):
    return make_fx(function, tracing_mode=mode)(torch.rand(3, 4), torch.rand(5, 4))


def returns(gm, *values):
    list(gm.graph.nodes)[-1].args = (values,)


def outputs(gm):
    return list(list(gm.graph.nodes)[-1].args[0])


def insert(gm, target, *args):
    """A new call at the end of the graph, with its value computed."""
    updater = MetadataUpdater(gm.graph)
    with gm.graph.inserting_before(list(gm.graph.nodes)[-1]):
        new = gm.graph.call_function(target, args)
    updater.update()
    return new


def assert_broken(gm, law, before=None, *, deep=False, match=None):
    with pytest.raises(InvalidGraph, match=match) as caught:
        verify_graph(gm, before, deep=deep)
    assert caught.value.law == law
    return caught.value.node


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_valid_graph_keeps_every_law(mode):
    gm = trace(mode=mode)
    before = str(gm.graph)
    verify_graph(gm, Snapshot.of(gm), deep=True)
    verify_graph(gm, Snapshot.of(gm), deep=True)
    assert str(gm.graph) == before, "verifying leaves nothing behind"


def test_g1_an_operand_behind_its_user():
    gm = trace()
    nodes = named(gm)
    nodes["sin"].prepend(nodes["cat"])  # the operand stands inside a list
    assert assert_broken(gm, "G1", match="cat stands before its operand sin") is nodes["cat"]


def test_g1_an_operand_behind_its_user_in_a_keyword():
    gm = trace()
    nodes = named(gm)
    with gm.graph.inserting_before(nodes["sin"]):
        gm.graph.call_function(aten.add.Tensor, (next(iter(gm.graph.nodes)),), {"other": nodes["sin"]})
    assert_broken(gm, "G1")


def test_g1_an_operand_of_another_graph():
    gm, other = trace(), trace()
    named(gm)["t"].args = (named(other)["sin"],)
    assert_broken(gm, "G1", match="not in the graph")


def test_g2_a_missing_value():
    gm = trace()
    del named(gm)["sin"].meta["val"]
    assert assert_broken(gm, "G2", match=r"sin = aten\.sin\.default has no fake value") is named(gm)["sin"]


def test_g2_is_not_about_assertions():
    def function(x, y):
        count = torch.nonzero(x).shape[0]
        torch._check(count > 2)
        return torch.zeros(count) + y.sum()

    gm = trace(function)
    with gm.graph.inserting_before(list(gm.graph.nodes)[-1]):
        gm.graph.call_function(aten._assert_scalar.default, (True, "always"))
    verify_graph(gm, Snapshot.of(gm), deep=True)


EDITS = {
    "shape": lambda value: value.new_empty((7, 4)),
    "dtype": lambda value: value.to(torch.float64),
    "stride": lambda value: value.clone(memory_format=torch.contiguous_format).as_strided((3, 4), (1, 3)),
    "offset": lambda value: value.new_empty(20)[1:13].view(3, 4),
    "device": lambda value: value.to("meta"),
    "kind": lambda value: (value,),
}


@pytest.mark.parametrize("what", EDITS)
def test_g3_a_value_that_is_not_computed(what):
    gm = trace(mode="fake")
    sin = named(gm)["sin"]
    with sin.meta["val"].fake_mode:
        sin.meta["val"] = EDITS[what](sin.meta["val"])
    verify_graph(gm)  # only a deep look sees it
    assert assert_broken(gm, "G3", deep=True) is sin


def test_g3_a_view_in_a_storage_of_its_own():
    gm = trace()
    t = named(gm)["t"]
    with t.meta["val"].fake_mode:
        t.meta["val"] = t.meta["val"].clone()
    assert assert_broken(gm, "G3", deep=True, match="shares memory") is t


def test_g3_a_node_that_cannot_be_run():
    gm = trace(mode="fake")
    cat = named(gm)["cat"]
    cat.args = ([named(gm)["sin"], named(gm)["t"]],)
    assert assert_broken(gm, "G3", deep=True, match="cat") is cat


def test_g3_holds_inside_nested_graphs():
    def function(x, y):
        return torch.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))

    gm = trace(function)
    verify_graph(gm, deep=True)
    sin = named(gm.true_graph_0)["sin"]
    with sin.meta["val"].fake_mode:
        sin.meta["val"] = sin.meta["val"].to(torch.float64)
    assert assert_broken(gm, "G3", deep=True) is sin
    del sin.meta["val"]
    assert assert_broken(gm, "G2") is sin


def test_g3_unbacked_symbols_are_the_same_when_computed_again():
    gm = trace(lambda x, y: torch.nonzero(x).sin())
    verify_graph(gm, Snapshot.of(gm), deep=True)


def test_g4_the_number_of_inputs_and_outputs():
    gm = trace()
    before = Snapshot.of(gm)
    returns(gm, *outputs(gm)[:-1])
    assert_broken(gm, "G4", before, match="3 outputs where there were 4")
    gm = trace()
    before = Snapshot.of(gm)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("z").meta["val"] = next(iter(gm.graph.nodes)).meta.get("val")
    assert_broken(gm, "G4", before, match="3 inputs where there were 2")


@pytest.mark.parametrize(
    ("target", "args"),
    [(aten.to.dtype, (torch.float64,)), (aten.unsqueeze.default, (0,)), (aten.to.device, ("meta", torch.float32))],
    ids=str,
)
def test_g4_the_kind_of_an_output(target, args):
    gm = trace()
    before = Snapshot.of(gm)
    cat = named(gm)["cat"]
    new = insert(gm, target, cat, *args)
    returns(gm, *(new if each is cat else each for each in outputs(gm)))
    assert assert_broken(gm, "G4", before, match="output 1 is") is new


def test_g4_strides_where_they_are_given():
    gm = trace(mode="fake")
    wanted = [None, (4, 1), None, None]
    free, given = Snapshot.of(gm), Snapshot.of(gm, wanted)
    verify_graph(gm, given)
    cat = named(gm)["cat"]
    new = insert(gm, aten.empty_strided.default, [8, 4], [1, 8])
    returns(gm, *(new if each is cat else each for each in outputs(gm)))
    verify_graph(gm, free)
    assert assert_broken(gm, "G4", given, match=r"strides \(1, 8\) where \(4, 1\)") is new


def test_g4_a_number_among_the_outputs():
    gm = trace()
    before = Snapshot.of(gm)
    *tensors, _ = outputs(gm)
    returns(gm, *tensors, 5)
    assert_broken(gm, "G4", before, match="output 3")


def test_g4_sizes_that_are_written_otherwise():
    """Of an even number: torch knows that it is, and writes what follows of it in more than one way."""

    def sizes(x):
        rows, columns = x.shape
        return x.sin(), 4 * (rows // 2), rows // 2 * (8 * (rows // 2) // rows), 5 * rows, 5 * columns

    gm = make_fx(sizes, tracing_mode="symbolic")(torch.ones(6, 8))
    before = Snapshot.of(gm)
    sine, one, other, rows, columns = outputs(gm)
    returns(gm, sine, other, one, rows, columns)
    verify_graph(gm, before)
    returns(gm, sine, one, other, columns, rows)
    assert_broken(gm, "G4", before, match="output 3 is")


def test_g5_a_new_storage_is_shared():
    gm = trace(lambda x, y: (x.clone(), y.sin()))
    before = Snapshot.of(gm)
    new = insert(gm, aten.alias.default, next(iter(gm.graph.nodes)))
    returns(gm, new, outputs(gm)[1])
    assert_broken(gm, "G5", before, match="input 0, output 0 now share memory")


def test_g5_two_copies_of_one_value_become_one_storage():
    gm = trace(lambda x, y: ((x + 1).clone(), (x + 1).clone()))
    before = Snapshot.of(gm)
    first, _ = outputs(gm)
    returns(gm, first, insert(gm, aten.alias.default, first))
    assert_broken(gm, "G5", before, match="output 0, output 1 now share memory")


def test_g5_sharing_is_lost():
    gm = trace(lambda x, y: (x.view(-1), y.sin()))
    before = Snapshot.of(gm)
    new = insert(gm, aten.clone.default, outputs(gm)[0])
    returns(gm, new, outputs(gm)[1])
    assert_broken(gm, "G5", before, match="no longer all share memory")


def test_g5_a_view_of_an_input_becomes_the_input():
    gm = trace(lambda x, y: (aten.alias.default(x), y.sin()))
    before = Snapshot.of(gm)
    returns(gm, next(iter(gm.graph.nodes)), outputs(gm)[1])
    assert_broken(gm, "G5", before, match="input 0, output 0 now are one")


def test_g5_two_outputs_become_one():
    gm = trace(lambda x, y: (lambda z: (z, aten.alias.default(z)))(x.sin()))
    before = Snapshot.of(gm)
    first, _ = outputs(gm)
    returns(gm, first, first)
    assert_broken(gm, "G5", before, match="output 0, output 1 now are one")


def test_g6_a_guard_is_added():
    gm = trace()
    before = Snapshot.of(gm)
    size = next(iter(gm.graph.nodes)).meta["val"].shape[0]
    assert size < 100
    assert_broken(gm, "G6", before, match="1 guards were added")


def test_g7_users_and_uses_disagree():
    gm = trace()
    nodes = named(gm)
    del nodes["sin"].users[nodes["t"]]
    assert assert_broken(gm, "G7", match="not among the users") is nodes["t"]
    gm = trace()
    nodes = named(gm)
    nodes["sin"].users[nodes["view"]] = None
    assert assert_broken(gm, "G7", match="does not use it") is nodes["sin"]


def test_g7_what_torch_itself_checks():
    gm = trace()
    nodes = named(gm)
    with gm.graph.inserting_before(nodes["sin"]), pytest.warns(UserWarning, match="get_attr"):
        gm.graph.get_attr("nowhere")
    assert_broken(gm, "G7", match="nowhere")
