"""Regions of autocast in graphs of torch calls: values are computed, and judged, as the region has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrite.graph import fake_value
from ferrite.graph.autocast import opened_before
from ferrite.graph.updater import MetadataUpdater
from ferrite.graph.verify import InvalidGraph, verify_graph
from tests.torch_level import assert_same, captured

pytestmark = pytest.mark.quick
aten = torch.ops.aten
LINEAR = aten.linear.default


def nested(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        low = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            plain = F.linear(x, w)
        with torch.autocast("cpu", torch.float16):
            other = F.linear(x, w)
        again = F.linear(x, w).float()
    return low, plain, other, again, F.linear(x, w)


def branches(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.cond(x.sum() > 0, lambda x, w: F.linear(x, w).relu(), lambda x, w: F.linear(x, w) * 2, (x, w))


def two():
    return [torch.rand(3, 3), torch.rand(3, 3)]


def linears(gm):
    return gm.graph.find_nodes(op="call_function", target=LINEAR)


def test_values_are_those_of_their_regions():
    gm = captured(nested, two()).gm
    verify_graph(gm, deep=True)
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32]
    assert [fake_value(node).dtype for node in linears(gm)] == dtypes
    assert [len(opened_before(node)) for node in linears(gm)] == [1, 2, 2, 1, 0]


def test_looking_leaves_autocast_as_it_was():
    gm = captured(nested, two()).gm
    for ambient in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
            if not ambient:
                verify_graph(gm, deep=True)
            MetadataUpdater(gm.graph).update()
            assert torch.is_autocast_enabled("cpu") == ambient


@pytest.mark.parametrize("place", range(5))
def test_a_value_of_another_dtype_is_found(place):
    gm = captured(nested, two()).gm
    node = linears(gm)[place]
    wrong = torch.float32 if fake_value(node).dtype != torch.float32 else torch.bfloat16
    node.meta["val"] = fake_value(node).to(wrong)
    with pytest.raises(InvalidGraph, match="law G3") as caught:
        verify_graph(gm, deep=True)
    assert caught.value.node is node


@pytest.mark.lengthy
def test_an_edit_inside_a_region_gets_the_dtype_of_the_region():
    before = captured(nested, two())
    gm = before.copy().gm
    updater = MetadataUpdater(gm.graph)
    for node in linears(gm):
        x, w = node.args
        with gm.graph.inserting_before(node):
            turned = gm.graph.call_function(aten.t.default, (w,))
            product = gm.graph.call_function(aten.matmul.default, (x, turned))
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
    updater.update()
    verify_graph(gm, deep=True)
    dtypes = [fake_value(node).dtype for node in gm.graph.find_nodes(op="call_function", target=aten.matmul.default)]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32]
    gm.recompile()
    assert_same(before, type(before)(gm, before.arrange), two, exact=False)


def test_branches_inside_a_region_compute_in_its_dtype():
    gm = captured(branches, two()).gm
    verify_graph(gm, deep=True)
    body = gm.get_submodule("cond_true_0")
    (node,) = linears(body)
    assert fake_value(node).dtype == torch.bfloat16
    node.meta["val"] = fake_value(node).float()
    with pytest.raises(InvalidGraph, match="law G3"):
        verify_graph(gm, deep=True)
