"""Packed layers on 8-bit integers and what stands behind them: one operator, with the numbers of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrite.graph import fake_value
from ferrite.graph.values import mode_of
from ferrite.options import Options
from ferrite.passes.post_grad import cpu_ops, quantized_fusion
from ferrite.passes.post_grad.quantized import dequantize, quantize
from ferrite.pipeline import PassContext
from tests.graphs import target_names
from tests.quantized_graphs import assert_fused, trace

pytestmark = [pytest.mark.quick, pytest.mark.lengthy]
aten = torch.ops.aten
bfloat16 = torch.bfloat16
packed = pytest.mark.skipif(not cpu_ops.QUANTIZED_LAYERS, reason="this torch has no packed layers on integers")


class Packed:
    """A packed layer with constants of its own, in one of the spellings that torch has."""

    def __init__(self, name: str, overload: str) -> None:
        torch.manual_seed(0)
        self.target = getattr(getattr(torch.ops.onednn, name), overload)
        self.is_conv, tensors = "conv" in name, overload == "tensor"
        self.scale = torch.tensor(0.1) if tensors else 0.1
        self.zero_point = torch.tensor(3) if tensors else 3
        self.scales, self.zero_points = torch.rand(8) / 8, torch.zeros(8, dtype=torch.int64)
        if self.is_conv:
            weight = torch.randint(-128, 128, (8, 4, 3, 3), dtype=torch.int8)
            sizes = ([1, 1], [1, 1], [1, 1], 1)
            self.x, self.shape, self.sizes = torch.randint(0, 256, (1, 4, 6, 6), dtype=torch.uint8), (1, 8, 6, 6), sizes
            self.weight = torch.ops.onednn.qconv_prepack(weight, self.scales, 0.1, 3, *sizes, [1, 4, 6, 6])
        else:
            weight = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
            self.x, self.shape, self.sizes = torch.randint(0, 256, (4, 16), dtype=torch.uint8), (4, 8), ()
            self.weight = torch.ops.onednn.qlinear_prepack(weight, [4, 16])

    def __call__(self, x: Any, dtype: torch.dtype = torch.float32, attr: str = "none") -> Any:
        layer = (self.weight, self.scales, self.zero_points, None, *self.sizes)
        return self.target(x, self.scale, self.zero_point, *layer, 1.0, 0, dtype, attr, [], "")

    def other(self) -> torch.Tensor:
        made = torch.randn(self.shape)
        return made.contiguous(memory_format=torch.channels_last) if self.is_conv else made


def runs(layer: Any) -> bool:
    """Some spellings have no kernel for plain tensors, or no rule for fake ones."""
    try:
        own = Packed(*layer)
        trace(own, [own.x])
        own(own.x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True


SPELLINGS = [(str(base._schema.name).partition("::")[2], base._overloadname) for base in cpu_ops.QUANTIZED_LAYERS]
layers = pytest.mark.parametrize("layer", [each for each in SPELLINGS if runs(each)], ids=".".join)


@packed
def test_there_are_packed_layers_to_try():
    assert {("qlinear_pointwise", "default"), ("qconv_pointwise", "default")} <= set(filter(runs, SPELLINGS))


@packed
@layers
@pytest.mark.parametrize("unary", [aten.relu.default, aten.silu.default, cpu_ops.gelu_parts, aten.tanh.default])
def test_a_packed_layer_takes_an_activation_along(layer, unary):
    own = Packed(*layer)
    assert_fused(lambda x: unary(own(x)), [own.x], {"quantized_post_op": 1})
    assert_fused(lambda x: (y := own(x), unary(y)), [own.x], {})


@pytest.mark.lengthy
@packed
@layers
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_packed_layer_rounds_to_integers_itself(layer, dtype):
    own = Packed(*layer)
    assert_fused(lambda x: quantize(own(x), 3.0, 5, dtype), [own.x], {"quantized_output": 1})
    gm = assert_fused(
        lambda x: quantize(own(x).relu(), 3.0, 5, dtype), [own.x], {"quantized_post_op": 1, "quantized_output": 1}
    )
    assert len(target_names(gm)) == 1
    assert_fused(lambda x: quantize(own(x, bfloat16).float(), 3.0, 5, dtype), [own.x], {})


@pytest.mark.lengthy
@packed
@layers
def test_a_packed_layer_takes_a_second_operand_along(layer):
    own = Packed(*layer)
    inputs = [own.x, own.other()]
    both = {"quantized_binary": 1, "quantized_output": 1}
    assert_fused(lambda x, o: own(x) + dequantize(quantize(o, 0.2), 0.2), inputs, {"quantized_binary": 1})
    assert_fused(lambda x, o: quantize(own(x) + dequantize(quantize(o, 0.2), 0.2), 3.0), inputs, both)
    assert_fused(lambda x, o: own(x) + o, inputs, {} if own.is_conv else {"quantized_binary": 1})
    assert_fused(lambda x, o: aten.add.Tensor(own(x), dequantize(quantize(o)), alpha=2), inputs, {})
    assert_fused(lambda x, o: (own(x) + dequantize(p := quantize(o)), p), inputs, {})
    assert_fused(lambda x, o: (own(x) + (p := dequantize(quantize(o))), p.sum()), inputs, {})


@packed
def test_an_operand_that_is_read_before_the_layer_is_taken():
    own = Packed("qlinear_pointwise", "default")

    def function(x, o):
        fresh = o.neg()
        return own(quantize(fresh.sum() + x.float(), 1.0, 0, torch.uint8)) + fresh

    assert_fused(function, [own.x, own.other()], {"quantized_binary": 1})


@packed
def test_what_the_layer_reads_itself_is_not_added():
    own = Packed("qlinear_pointwise", "default")
    own.weight, own.scales = (
        torch.ops.onednn.qlinear_prepack(torch.ones(16, 16, dtype=torch.int8), [4, 16]),
        torch.ones(16),
    )
    own.zero_points = torch.zeros(16, dtype=torch.int64)
    assert_fused(lambda x: own(x) + dequantize(x, dtype=torch.uint8), [own.x], {})


@packed
def test_a_layer_that_says_another_dtype_than_it_has_is_left():
    own = Packed("qlinear_pointwise", "default")
    gm = trace(lambda x: own(x).relu(), [own.x])
    node = next(node for node in gm.graph.nodes if node.target is own.target)
    with mode_of(gm.graph):
        node.meta["val"] = fake_value(node).to(bfloat16)
    assert quantized_fusion.function(gm, PassContext(Options(kernel_rewrites="always"))) == 0


@packed
def test_packed_layers_wait_for_kernels_and_the_rest_does_not():
    own = Packed("qlinear_pointwise", "default")
    gm = trace(lambda x: own(x).relu(), [own.x])
    assert quantized_fusion.function(gm, PassContext(Options())) == 0
    gm = trace(lambda x: quantize(aten.cat.default([dequantize(x)])), [torch.arange(-128, 128).to(torch.int8)])
    assert quantized_fusion.function(gm, PassContext(Options())) == 1
