"""Reading what a module holds by a dotted name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import ferrite
from ferrite.graph.attributes import MissingAttribute, attribute, is_stored
from ferrite.rewrite import Writer

pytestmark = pytest.mark.quick


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        self.head = nn.Linear(2, 2)
        self.head.weight = self.layers[0].weight

    def forward(self, x):
        return self.head(self.layers(x))


def test_the_very_object_is_found():
    net = Net()
    assert attribute(net, "layers") is net.layers
    assert attribute(net, "layers.0.weight") is net.layers[0].weight
    assert attribute(net, "layers.0.weight") is attribute(net, "head.weight"), "tied weights are one"
    assert attribute(net, "layers.1.bias") is None, "there, and None"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("layer.0.weight", ("the module has no 'layer'", "did you mean    layers", "layers, head")),
        ("layers.2.weight", ("layers has no '2'", "0, 1")),
        ("layers.0.wieght", ("layers.0 has no 'wieght'", "did you mean    weight", "weight, bias")),
    ],
)
def test_what_is_missing_is_named(target, said):
    with pytest.raises(MissingAttribute) as caught:
        attribute(Net(), target)
    assert isinstance(caught.value, ferrite.UserError)
    assert repr(target) in str(caught.value)
    for text in said:
        assert text in str(caught.value)


def test_the_line_of_the_model_is_named():
    node = torch.fx.Graph().get_attr("gone")
    node.meta["stack_trace"] = '  File "/home/me/net.py", line 88, in forward\n    return x * self.gone\n'
    with pytest.raises(MissingAttribute, match=r"net\.py:88"):
        attribute(Net(), "gone", node)


def test_a_parametrised_weight_is_not_stored():
    net = Net()
    parametrize.register_parametrization(net.head, "weight", nn.Identity())
    assert is_stored(net, "head.bias")
    assert is_stored(net, "layers.1.bias")
    assert not is_stored(net, "head.weight")
    assert is_stored(net, "head.parametrizations.weight.original")


def test_new_constants_overwrite_nothing_and_are_taken_back():
    gm = torch.fx.symbolic_trace(Net())
    gm._folded_0 = torch.zeros(1)
    writer = Writer(gm.graph, None)
    value = torch.ones(2)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        writer.fake_mode = torch._subclasses.FakeTensorMode()
        first, second = writer.constant("folded", value), writer.constant("folded", torch.ones(2))
        again = writer.constant("folded", value)
    assert [node.target for node in (first, second, again)] == ["_folded_1", "_folded_2", "_folded_1"]
    assert torch.equal(gm._folded_0, torch.zeros(1))
    assert gm._folded_1 is value
    writer.take_back()
    assert not hasattr(gm, "_folded_1")
    assert not hasattr(gm, "_folded_2")
    gm.graph.lint()
