"""When making several calls one pays, by the model behind the option `horizontal`: on a CPU, and on a GPU.

The graphs are made of fake tensors, so that no GPU is needed: rules look, they do not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ferrite.machines import NEOVERSE_N1
from ferrite.options import Options
from ferrite.passes.pre_grad.batch_fusion import FUSIONS
from ferrite.passes.pre_grad.linears import PARALLEL_RULES
from ferrite.pipeline import PassContext

pytestmark = pytest.mark.quick
aten = torch.ops.aten
MANY = NEOVERSE_N1.min_tiny_calls
RULES = {rule.name: rule for rule in (*FUSIONS, *PARALLEL_RULES)}


class Calls:
    """Calls of one operator, each on operands of these shapes; the first `shared` of them are the same for all."""

    def __init__(self, device: str, target: Any, count: int, *shapes: Sequence[int], shared: int | None = None) -> None:
        self.graph, self.mode, self.device = torch.fx.Graph(), FakeTensorMode(), device
        common = {place: self.operand(shape) for place, shape in enumerate(shapes) if place == shared}
        self.members = [self.call(target, shapes, common) for _ in range(count)]

    def operand(self, shape: Sequence[int]) -> torch.fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, device=self.device)
        return node

    def call(self, target: Any, shapes: Any, common: dict[int, torch.fx.Node]) -> torch.fx.Node:
        operands = [common.get(place) or self.operand(shape) for place, shape in enumerate(shapes)]
        more = ([shapes[0][-1]],) if target is aten.layer_norm.default else ()
        node = self.graph.call_function(target, (operands[0], *more, *operands[1:]))
        with self.mode:
            node.meta["val"] = target(*torch.fx.node.map_arg(node.args, lambda each: each.meta["val"]))
        return node

    def pay(self, rule: str, returned: int = 0, **options: Any) -> bool:
        return RULES[rule].profit(self.members, returned, PassContext(Options(**options))) is None


def layers(device: str, count: int, rows: int, features: int, width: int, shared: int | None = None) -> Calls:
    return Calls(device, aten.linear.default, count, (rows, features), (width, features), shared=shared)


@pytest.mark.lengthy
@pytest.mark.parametrize("executor", ["calls", "native"])
def test_batches_on_a_cpu(executor):
    """Elementwise calls and norms are kernels of our own under `native`, which take no longer apart."""
    are_calls = executor == "calls"
    for count, shape, pays in (
        (MANY, (4, 16), True),
        (MANY - 1, (4, 16), False),
        (MANY, (64, 16), False),
    ):
        gates = Calls("cpu", aten.sigmoid.default, count, shape)
        assert gates.pay("batch_sigmoid", executor=executor) is (pays and are_calls)
        norms = Calls("cpu", aten.layer_norm.default, count, shape, shape[-1:], shape[-1:])
        assert norms.pay("batch_layernorm", executor=executor) is (pays and are_calls)
        assert layers("cpu", count, *shape, 8).pay("batch_linear", executor=executor) is pays
    assert not layers("cpu", MANY, 4, 16, 8).pay("batch_linear", 1, executor=executor), "a result is copied out"
    assert not Calls("cpu", aten.detach.default, MANY, (4, 16)).pay("batch_detach", executor=executor)


def test_batches_on_a_gpu():
    assert Calls("cuda", aten.sigmoid.default, 16, (16, 32)).pay("batch_sigmoid")
    assert not Calls("cuda", aten.sigmoid.default, 16, (4096, 4096)).pay("batch_sigmoid"), "the copies cost more"
    assert not Calls("cuda", aten.sigmoid.default, 16, (16, 32)).pay("batch_sigmoid", 15), "most results are copied out"
    assert layers("cuda", 8, 16, 64, 64).pay("batch_linear")
    norm = (aten.layer_norm.default, 8, (16, 32), (32,), (32,))
    assert not Calls("cuda", *norm).pay("batch_layernorm"), "it takes as many calls as it saves"
    assert Calls("cuda", norm[0], MANY, *norm[2:]).pay("batch_layernorm")


def test_layers_on_one_input():
    """Joining weights in each call costs more than it gains, but where a launch is worth more than the copy."""
    assert not layers("cpu", 3, 512, 256, 256, shared=0).pay("parallel_linear")
    assert layers("cuda", 3, 512, 256, 256, shared=0).pay("parallel_linear")
    assert not layers("cuda", 2, 512, 256, 256, shared=0).pay("parallel_linear"), "the join takes the launch it saves"
    assert not layers("cuda", 3, 512, 4096, 4096, shared=0).pay("parallel_linear"), "the weights are large"
    assert layers("cuda", 2, 2**17, 256, 256, shared=0).pay("parallel_linear"), "the weights are small beside the rows"
    assert not layers("cuda", 3, 512, 256, 256, shared=0).pay("parallel_linear", 3), "the results are copied out"


def test_one_layer_on_several_inputs():
    assert not layers("cpu", 4, 128, 256, 256, shared=1).pay("shared_linear")
    assert layers("cuda", 4, 128, 256, 256, shared=1).pay("shared_linear")
    assert layers("cuda", 4, 4, 8192, 8192, shared=1).pay("shared_linear"), "the weight is not copied"
    assert not layers("cuda", 4, 2**16, 4096, 64, shared=1).pay("shared_linear"), "the inputs are large"


@pytest.mark.parametrize("rule", ["batch_sigmoid", "batch_linear", "parallel_linear", "shared_linear"])
def test_the_option_has_the_last_word(rule):
    few = Calls("cpu", aten.sigmoid.default, 5, (2, 3)) if rule == "batch_sigmoid" else layers("cpu", 5, 2, 3, 4)
    assert not few.pay(rule)
    assert few.pay(rule, horizontal="always")
    assert few.pay(rule, horizontal=[rule])
    assert not few.pay(rule, horizontal="off")
    assert not few.pay(rule, horizontal={})
