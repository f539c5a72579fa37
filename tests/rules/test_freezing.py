"""Graphs whose weights are constants: what is folded, and what must not be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.capture.torch_api import decompositions_of
from ferrite.graph import updater, values
from ferrite.graph.facts import attribute_of
from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes import freezing_passes
from ferrite.passes.freezing.fold import constant_fold
from tests.compare import assert_no_farther
from tests.graphs import operators

aten = torch.ops.aten


def traced(function: Any, *inputs: torch.Tensor, apart: bool = False) -> torch.fx.GraphModule:
    """The graph of a function or module: tensors that it holds are read by the graph itself."""
    table = decompositions_of([aten.native_batch_norm.default]) if apart else None
    with torch.no_grad():
        gm = make_fx(function, table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def frozen(function: Any, *inputs: torch.Tensor, apart: bool = False, **options: Any) -> torch.fx.GraphModule:
    """The graph after the stage; it computes what the function does."""
    gm = freezing_passes(traced(function, *inputs, apart=apart), Options(strict=True, **options))
    verify_graph(gm, deep=True)
    assert_computes(gm, function, inputs)
    return gm


def assert_computes(gm: torch.fx.GraphModule, function: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        ours, eager = gm(*inputs), function(*inputs)
        if isinstance(function, torch.nn.Module):
            wide = function.to(torch.float64)(*(x.double() for x in inputs))
            function.to(eager.dtype)
        else:
            wide = eager.double()
    assert (ours.shape, ours.stride(), ours.dtype) == (eager.shape, eager.stride(), eager.dtype)
    assert_no_farther(ours, eager, wide, "result")


def constants(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    found = (attribute_of(node) for node in gm.graph.find_nodes(op="get_attr"))
    return [value for value in found if isinstance(value, torch.Tensor)]


def with_statistics(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if hasattr(module, "running_var"):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(module.weight, 0.5, 2)
            torch.nn.init.uniform_(module.bias, -1, 1)
    return model.eval()


# --- arithmetic behind layers -----------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "conv1d": lambda bias: torch.nn.Conv1d(4, 6, 3, bias=bias),
    "conv2d": lambda bias: torch.nn.Conv2d(4, 6, 2, padding=1, bias=bias),
    "conv3d": lambda bias: torch.nn.Conv3d(4, 6, 2, bias=bias),
    "conv2d in groups": lambda bias: torch.nn.Conv2d(4, 6, 2, groups=2, bias=bias),
    "transposed 1d": lambda bias: torch.nn.ConvTranspose1d(4, 4, 3, bias=bias),
    "transposed 2d": lambda bias: torch.nn.ConvTranspose2d(4, 4, 2, stride=2, bias=bias),
    "transposed 3d": lambda bias: torch.nn.ConvTranspose3d(4, 4, 2, bias=bias),
    "transposed in groups": lambda bias: torch.nn.ConvTranspose2d(4, 4, 2, groups=2, bias=bias),
    "transposed in groups, wider": lambda bias: torch.nn.ConvTranspose2d(4, 6, 2, groups=2, bias=bias),
}
OPERATIONS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


class Behind(torch.nn.Module):
    """A layer, and arithmetic with a number or a buffer behind it."""

    def __init__(self, layer: torch.nn.Module, operation: Any, other: Any) -> None:
        super().__init__()
        self.layer, self.operation = layer, operation
        if isinstance(other, torch.Tensor):
            self.register_buffer("other", other)
        else:
            self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(self.layer(x), self.other)


def image_for(layer: torch.nn.Module) -> torch.Tensor:
    return torch.randn(2, 4, *(5,) * (layer.weight.dim() - 2))


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_arithmetic_behind_convolutions_becomes_weights(kind, bias):
    layer = CONVOLUTIONS[kind](bias)
    rest = (1,) * (layer.weight.dim() - 2)
    numbers = torch.rand(layer.out_channels) + 0.5
    others = (2, 1.5, numbers.reshape(-1, *rest), numbers.reshape(1, -1, *rest), torch.tensor(3.0))
    for operation, other in itertools.product(OPERATIONS.values(), others):
        gm = frozen(Behind(layer, operation, other), image_for(layer))
        assert operators(gm) == ["convolution.default"]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)], ids=["matrix", "sequence"])
def test_arithmetic_behind_linear_layers_becomes_weights(shape, bias):
    layer, numbers = torch.nn.Linear(4, 3, bias=bias), torch.rand(3) + 0.5
    for operation, other in itertools.product(OPERATIONS.values(), (2, 1.5, numbers, numbers.reshape(1, 3))):
        gm = frozen(Behind(layer, operation, other), torch.randn(shape))
        assert not {"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"} & set(operators(gm))
        assert operators(gm).count("addmm.default") == 1


NORMS = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}


@pytest.mark.parametrize("apart", [False, True], ids=["one operator", "taken apart"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_batch_norms_behind_convolutions_become_weights(kind, apart):
    layer = CONVOLUTIONS[kind](True)
    norm = NORMS[layer.weight.dim() - 2](layer.out_channels)
    gm = frozen(with_statistics(torch.nn.Sequential(layer, norm)), image_for(layer), apart=apart)
    assert operators(gm) == ["convolution.default"]


@pytest.mark.parametrize("apart", [False, True], ids=["one operator", "taken apart"])
def test_batch_norms_behind_linear_layers_become_weights(apart):
    model = with_statistics(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    assert operators(frozen(model, torch.randn(5, 4), apart=apart)) == ["addmm.default"]


def test_long_chains_are_folded_to_the_end():
    layer = torch.nn.Conv2d(3, 3, 1)

    def chain(x):
        x = layer(x)
        for number in range(2, 9):
            x = (x * number - 1) / number
        return x

    assert operators(frozen(chain, torch.randn(1, 3, 4, 4))) == ["convolution.default"]


def test_strict_numerics_leave_arithmetic_where_it_is():
    gm = frozen(Behind(torch.nn.Conv2d(3, 3, 1), torch.mul, 2.0), torch.randn(1, 3, 4, 4), numerics="strict")
    assert operators(gm) == ["convolution.default", "mul.Tensor"]


def test_a_weight_of_two_layers_stays_one():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return ((x @ self.weight) * 2) @ self.weight

    model = Tied()
    gm = frozen(model, torch.randn(3, 4))
    assert [value.data_ptr() for value in constants(gm)] == [model.weight.data_ptr()]
    assert "mul.Tensor" in operators(gm)


# --- constant folding -------------------------------------------------------------------------------------------------


def test_what_depends_on_constants_alone_is_computed():
    weight, scale = torch.randn(4, 3), torch.rand(3)

    def function(x):
        return torch.relu(x @ (weight * scale.exp()).sin())

    gm = frozen(function, torch.randn(2, 4))
    assert operators(gm) == ["mm.default", "relu.default"]
    assert torch.equal(constants(gm)[0], (weight * scale.exp()).sin())


def test_a_view_of_a_constant_is_in_its_memory():
    weight = torch.randn(3, 4)
    gm = frozen(lambda x: torch.relu(x @ weight.t()), torch.randn(2, 4))
    assert operators(gm) == ["mm.default", "relu.default"]
    assert constants(gm)[0].data_ptr() == weight.data_ptr()
    assert constants(gm)[0].stride() == (1, 4)


def test_what_would_take_more_memory_is_computed_in_every_call():
    row, column = torch.rand(64), torch.rand(64, 1)
    gm = frozen(lambda x: x * (row.neg() * column.neg()), torch.randn(64, 64))
    assert operators(gm).count("mul.Tensor") == 2, "64 x 64 numbers would be stored instead of 2 x 64"
    assert "neg.default" not in operators(gm), "what is as small as before is stored"
    assert max(value.numel() for value in constants(gm)) == 64


def test_a_large_value_in_between_is_no_reason_to_stop():
    row = torch.rand(8)
    gm = frozen(lambda x: x + row.repeat(8, 1).sum(), torch.randn(3))
    assert operators(gm) == ["add.Tensor"]


def test_constructors_are_not_stored_but_used():
    weight = torch.rand(4)
    gm = frozen(lambda x: x * (weight * torch.arange(4)) + torch.ones(4), torch.randn(4))
    assert [str(name).partition(".")[0] for name in operators(gm)] == ["mul", "ones", "add"]
    assert len(constants(gm)) == 1


def test_random_numbers_are_drawn_in_every_call():
    weight = torch.rand(1000)
    gm = freezing_passes(traced(lambda x: x + torch.bernoulli(weight), torch.zeros(1000)), Options(strict=True))
    assert "bernoulli.default" in operators(gm)
    assert not torch.equal(gm(torch.zeros(1000)), gm(torch.zeros(1000)))


def test_a_result_that_the_caller_gets_is_made_anew():
    """He may write into it."""
    weight = torch.rand(4)
    for function in (lambda x: weight * 2, lambda x: (weight * 2).view(2, 2)):
        gm = frozen(function, torch.rand(1))
        first = gm(torch.rand(1)).clone()
        gm(torch.rand(1)).fill_(7)
        assert torch.equal(gm(torch.rand(1)), first)
        assert "mul.Tensor" in operators(gm)


def test_a_call_that_fails_fails_when_it_runs():
    table, index = torch.rand(3), torch.tensor([5])
    gm = traced(lambda x: x + aten.index.Tensor(table.sin(), [index]), torch.rand(1))
    freezing_passes(gm, Options(strict=True))
    assert operators(gm) == ["index.Tensor", "add.Tensor"], "what it is given is computed, it is not"
    with pytest.raises(IndexError):
        gm(torch.rand(1))


def test_sizes_that_depend_on_data_stay():
    weight = torch.tensor([0.0, 1.0, 2.0])
    gm = traced(lambda x: x[0] + weight.nonzero().sum(), torch.rand(1))
    freezing_passes(gm, Options(strict=True))
    assert "nonzero.default" in operators(gm)
    assert torch.equal(gm(torch.zeros(1)), torch.tensor(3.0))


def test_operators_of_others_are_called():
    calls = []

    @torch.library.custom_op("ferrite_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * 2

    counted.register_fake(lambda x: x * 2)
    weight = torch.rand(3)
    gm = freezing_passes(traced(lambda x: x + counted(weight), torch.rand(3)), Options(strict=True))
    calls.clear()
    gm(torch.rand(3))
    assert len(calls) == 1


def test_a_result_with_several_parts():
    weight = torch.rand(6, 4)

    def function(x):
        first, second = weight.sin().split(3)
        return torch.relu(x @ first.t()) * torch.tanh(x @ second.t())

    gm = frozen(function, torch.rand(2, 4), horizontal="off")
    assert not {"sin.default", "split.Tensor", "getitem"} & set(operators(gm))


def test_fuel_stops_folding():
    first, second = torch.rand(3), torch.rand(3)

    def function(x):
        return torch.relu(x + first.sin()) * second.cos()

    gm = traced(function, torch.rand(3))
    freezing_passes(gm, Options(strict=True, fuel=1))
    assert {"sin.default", "cos.default"} & set(operators(gm)) == {"cos.default"}


def test_folding_runs_anew_only_what_it_changed(monkeypatch):
    """The values of a large model are not computed again for each fold."""
    layers = [torch.nn.Linear(4, 4) for _ in range(20)]

    def function(x):
        for layer in layers:
            x = torch.tanh(layer(x))
        return x.sin().cos().sin().cos()

    gm = traced(function, torch.rand(2, 4))
    counted = []
    original = values.compute
    monkeypatch.setattr(updater, "compute", lambda node, *rest: counted.append(node) or original(node, *rest))
    constant_fold(gm)
    # each folded transpose is one new constant, and the product that reads it is looked at once
    assert len(counted) <= 2 * len(layers)


# --- products of one input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("widths", [(3, 5), (4, 4, 4), (2, 3, 4, 5)], ids=str)
def test_products_of_one_input_become_one(widths, bias):
    class Siblings(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, width, bias=bias) for width in widths)

        def forward(self, x):
            return torch.cat([torch.relu(layer(x)) for layer in self.layers], -1)

    for shape in ((6, 4), (2, 3, 4)):
        gm = frozen(Siblings(), torch.randn(shape), weight_layouts="always")
        assert len([name for name in operators(gm) if name in ("mm.default", "addmm.default")]) == 1
        weight = max(constants(gm), key=torch.Tensor.numel)
        assert weight.shape == (4, sum(widths))
        assert weight.is_contiguous(), "stored as products of several rows like it"
        assert len(constants(gm)) == 1 + bias, "the parts are let go"


def test_projections_of_attention_become_one_product():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
            return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    gm = frozen(Attention(), torch.randn(2, 3, 8))
    assert operators(gm).count("addmm.default") == 1


# --- cleaning ---------------------------------------------------------------------------------------------------------


def test_equal_calls_are_one():
    def function(x, y):
        a, b = x.sin().split(2)
        c, d = x.sin().split(2)
        return (a + c) * (b + d) + y

    gm = frozen(function, torch.rand(4, 2), torch.rand(2, 2))
    assert operators(gm).count("sin.default") == 1
    assert len([name for name in operators(gm) if name.startswith("split")]) == 1


def test_equal_results_that_the_caller_gets_stay_two():
    gm = traced(lambda x: (x.sin(), x.sin()), torch.rand(3))
    freezing_passes(gm, Options(strict=True))
    first, second = gm(torch.rand(3))
    assert first.data_ptr() != second.data_ptr()


def test_equal_draws_are_two():
    gm = traced(lambda x: torch.rand_like(x) - torch.rand_like(x), torch.rand(100))
    freezing_passes(gm, Options(strict=True))
    assert gm(torch.rand(100)).abs().sum() > 0
