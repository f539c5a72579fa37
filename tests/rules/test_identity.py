"""Modules that do nothing, in graphs that call modules: under every name, in every form, and only of that very type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ferrite.options import Options
from ferrite.passes import pre_grad_passes

pytestmark = pytest.mark.quick


class Loud(nn.Identity):
    def forward(self, x):
        return x + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.second = self.first
        self.loud = Loud()

    def forward(self, x):
        return self.loud(self.second(input=self.first(x * 2)))


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


def test_identities():
    model, x = Model(), torch.randn(3)
    gm = torch.fx.GraphModule(model, Leaves().trace(model))
    gm.second = gm.first
    gm.graph.find_nodes(op="call_module", target="first")[1].target = "second"  # tracing knows one name alone
    gm.recompile()
    pre_grad_passes(gm, [x], Options(strict=True))
    calls = [node.target for node in gm.graph.nodes if node.op == "call_module"]
    assert calls == ["loud"], "its subclass does something"
    assert torch.equal(gm(x), model(x))
