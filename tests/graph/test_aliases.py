"""Which nodes share memory, and how inputs and outputs do."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.aliases import Aliases, sharing_matrix, storage_of, storages_of
from tests.graphs import named

pytestmark = pytest.mark.quick


def trace(fn, *inputs, mode="symbolic"):
    return make_fx(fn, tracing_mode=mode)(*inputs)


def group(*places):
    return frozenset((place.rstrip("0123456789"), int(place.lstrip("inout"))) for place in places)


def test_views_share_and_copies_do_not():
    gm = trace(lambda x: (x.t(), x.t().clone(), x[0]), torch.rand(3, 4))
    nodes, aliases = named(gm), Aliases(gm.graph)
    x = next(iter(gm.graph.nodes))
    assert aliases.share(x, nodes["t"])
    assert aliases.share(nodes["t"], nodes["select"])
    assert not aliases.share(x, nodes["clone"])
    assert not aliases.share(nodes["t"], nodes["clone"])
    assert storage_of(x) == storage_of(nodes["select"])
    assert hash(storage_of(x)) == hash(storage_of(nodes["select"]))
    assert aliases.share(x, nodes["select"])


def test_a_tuple_has_the_storages_of_its_parts():
    gm = trace(lambda x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5), torch.rand(3, 4))
    norm = named(gm)["native_layer_norm"]
    assert len(storages_of(norm)) == 3
    assert storage_of(norm) == storages_of(norm)
    parts = [node for node in gm.graph.nodes if node.name.startswith("getitem")]
    aliases = Aliases(gm.graph)
    assert all(aliases.share(norm, part) for part in parts)
    assert not aliases.share(parts[0], parts[1])


def test_numbers_live_nowhere():
    gm = trace(lambda x: x.view(-1) * x.shape[0], torch.rand(3, 4))
    sizes = [node for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    assert sizes
    assert all(storage_of(node) is None for node in sizes)
    assert not Aliases(gm.graph).share(sizes[0], sizes[0])


def test_nodes_without_a_value_may_share_with_anything():
    gm = trace(lambda x: x.sin() + 1, torch.rand(3))
    nodes = named(gm)
    del nodes["sin"].meta["val"]
    assert Aliases(gm.graph).share(nodes["sin"], nodes["add"])


def test_nodes_made_later_are_looked_up():
    gm = trace(lambda x: x.sin(), torch.rand(3))
    sin, aliases = named(gm)["sin"], Aliases(gm.graph)
    with gm.graph.inserting_after(sin):
        view = gm.graph.call_function(torch.ops.aten.alias.default, (sin,))
    view.meta["val"] = sin.meta["val"].view(-1)
    assert aliases.share(sin, view)


def test_sparse_tensors_are_told_apart_by_their_parts():
    gm = trace(lambda x: (x.to_sparse(), x.sin()), torch.rand(3, 4), mode="fake")
    sparse = next(node for node in gm.graph.nodes if node.meta.get("val") is not None and node.meta["val"].is_sparse)
    assert storages_of(sparse)
    assert not Aliases(gm.graph).share(sparse, named(gm)["sin"])


def test_storages_of_inputs_and_outputs():
    gm = trace(lambda x, y: (x.t(), y + 1), torch.rand(3, 4), torch.rand(2))
    aliases, nodes = Aliases(gm.graph), named(gm)
    x, y = (node for node in gm.graph.nodes if node.op == "placeholder")
    assert aliases.input_storages == {storage_of(x), storage_of(y)}
    assert aliases.output_storages == {storage_of(x), storage_of(nodes["add"])}


def test_sharing_among_inputs_and_outputs():
    def fn(x, y):
        z = y + 1
        return x.t(), z, [x, z.view(-1)], {"again": z}

    gm = trace(fn, torch.rand(3, 4), torch.rand(2))
    sharing = sharing_matrix(gm.graph)
    assert sharing.storage == {group("in0", "out0", "out2"), group("out1", "out3", "out4")}
    assert sharing.identity == {group("in0", "out2"), group("out1", "out4")}


def test_inputs_that_are_views_of_one_tensor_share():
    base = torch.rand(4)
    gm = trace(lambda x, y: x + y, base[:2], base[2:], mode="fake")
    assert sharing_matrix(gm.graph).storage == {group("in0", "in1")}


def test_constants_and_numbers_are_not_shared():
    gm = trace(lambda x: (x.shape[0], x.shape[0], None, 3), torch.rand(3, 4))
    sharing = sharing_matrix(gm.graph)
    assert not sharing.storage
    assert not sharing.identity


def test_many_outputs_in_one_storage_are_one_group():
    gm = trace(lambda x: x.split(1), torch.rand(300), mode="fake")
    (only,) = sharing_matrix(gm.graph).storage
    assert len(only) == 301
