"""Layers with post-ops and layers on integers, as whole models through the compiler, and the operators themselves."""

from __future__ import annotations

import pytest
import torch

import ferrite
from ferrite.passes.post_grad import cpu_ops
from tests.compare import assert_same_as_eager


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.up = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ConvTranspose2d(4, 3, 3, padding=1)
        self.wide, self.narrow = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.hardswish(self.conv(x))
        y = torch.relu(self.up(y) + torch.sin(x))
        return self.narrow(torch.nn.functional.gelu(self.wide(y)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("decompose", ["spelling", "core"])
def test_post_ops_in_a_model(dynamic, decompose):
    options = {"kernel_rewrites": "always", "decompose": decompose}
    with torch.no_grad():
        assert_same_as_eager(Net(), lambda: [torch.randn(2, 3, 6, 6)], options=options, dynamic=dynamic)
    rewrites = ferrite.last_compile().rewrites
    assert rewrites["unary_post_op"] == 2
    assert rewrites["binary_relu_post_op"] == 1
    assert rewrites["reinplace_inplaceable_ops"] == 1, "the sum is written over sin(x)"


def test_post_ops_in_training():
    assert_same_as_eager(Net(), lambda: [torch.randn(2, 3, 6, 6)], options={"kernel_rewrites": "always"}, backward=True)


class WeightOnly(torch.nn.Module):
    """A linear layer with a weight of 8-bit integers and one scale for each row."""

    def __init__(self, features: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("weight", torch.randint(-128, 128, (rows, features), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(rows).to(torch.bfloat16) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(torch.bfloat16)) * self.scales


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 64)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_of_integers_in_a_model(shape, dynamic):
    model = WeightOnly(64, 24)
    x = torch.randn(shape).to(torch.bfloat16)
    compiled = torch.compile(model, backend="ferrite", options={"strict": True}, dynamic=dynamic)
    with torch.no_grad():
        ours, eager = compiled(x), model(x)
        exact = torch.nn.functional.linear(x.double(), model.weight.double()) * model.scales.double()
    assert ferrite.last_compile().rewrites["weight_only_int8"] == 1
    assert (ours.dtype, ours.shape, ours.stride()) == (eager.dtype, eager.shape, eager.stride())
    assert (ours - exact).abs().max() <= (eager - exact).abs().max()


def test_a_weight_whose_rows_do_not_fill_blocks_stays_as_it_is():
    model = WeightOnly(33, 24)
    x = torch.randn(3, 33).to(torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(model, backend="ferrite", options={"strict": True})
        assert torch.equal(compiled(x), model(x))
    assert "weight_only_int8" not in ferrite.last_compile().rewrites


# --- operators --------------------------------------------------------------------------------------------------------


def test_the_operators_of_layers_are_good_citizens():
    x, w, b = torch.randn(6, 4), torch.randn(5, 4), torch.randn(5)
    torch.library.opcheck(torch.ops.ferrite.linear_pointwise.default, (x, w, b, False, "gelu", [], "tanh", True, False))
    torch.library.opcheck(
        torch.ops.ferrite.linear_pointwise_binary.default, (torch.randn(6, 5), x, w, b, False, "sub", "none")
    )
    x, w, b = torch.randn(2, 3, 5, 6), torch.randn(4, 3, 3, 3), torch.randn(4)
    layer = (x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False)
    post_op = ("hardtanh", [0.0, 1.0], "", False, False)
    torch.library.opcheck(torch.ops.ferrite.convolution_pointwise.default, (*layer, *post_op))
    other = torch.randn(2, 4, 5, 6)
    torch.library.opcheck(torch.ops.ferrite.convolution_pointwise_binary.default, (other, *layer, "add", "relu"))


@pytest.mark.parametrize("dtype", cpu_ops.INTEGERS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_operator_of_pooling_is_a_good_citizen(dtype, memory_format):
    x = torch.randint(0, 100, (1, 2, 6, 6)).to(dtype).contiguous(memory_format=memory_format)
    torch.library.opcheck(torch.ops.ferrite.qmaxpool2d.default, (x, [2, 2], [2, 2], [0, 0], [1, 1], False))
