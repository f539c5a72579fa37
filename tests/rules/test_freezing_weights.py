"""Frozen weights of several types and in several layouts: half precision, integers, channels last."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ferrite.options import Options
from ferrite.passes import freezing_passes, post_grad_passes
from tests.compare import assert_no_farther, since
from tests.graphs import operators
from tests.rules.test_freezing import constants, frozen, traced, with_statistics

pytestmark = pytest.mark.quick

# --- half precision ---------------------------------------------------------------------------------------------------


class WideNorm(torch.nn.Module):
    """A layer in half precision, the norm behind it in single."""

    def __init__(self, layer: torch.nn.Module, norm: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.norm = layer.to(dtype), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x).float()).to(x.dtype)


@pytest.mark.parametrize("apart", [False, True], ids=["one operator", "taken apart"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_in_single_precision_behind_layers_in_half(dtype, apart):
    model = with_statistics(WideNorm(torch.nn.Conv2d(4, 6, 2), torch.nn.BatchNorm2d(6), dtype))
    x = torch.randn(2, 4, 5, 5).to(dtype)
    gm = freezing_passes(traced(model, x, apart=apart), Options(strict=True))
    assert operators(gm) == ["convolution.default"]
    with torch.no_grad():
        ours, eager = gm(x), model(x)
        wide = copy.deepcopy(model).double()
        truth = wide.norm(wide.layer(x.double()))
    assert_no_farther(ours, eager, truth, "result")


def test_a_result_wanted_in_single_precision_is_not_rounded_to_half():
    layer, scale = torch.nn.Conv2d(4, 6, 2).bfloat16(), torch.rand(6, 1, 1)
    x = torch.randn(2, 4, 5, 5).bfloat16()
    gm = freezing_passes(traced(lambda x: layer(x).float() * scale, x), Options(strict=True))
    assert "mul.Tensor" in operators(gm)
    assert torch.equal(gm(x), layer(x).float() * scale)


# --- integers ---------------------------------------------------------------------------------------------------------


def decoded(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.to(x.dtype)) * scale


@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 32)], ids=["matrix", "sequence"])
def test_weights_of_integers_are_joined_and_stay_integers(shape):
    weights = [torch.randint(-128, 128, (width, 32), dtype=torch.int8) for width in (16, 8, 8)]
    scales = [torch.rand(weight.shape[0]).bfloat16() for weight in weights]

    def function(x):
        return torch.cat([torch.relu(decoded(x, *pair)) for pair in zip(weights, scales, strict=True)], -1)

    x = torch.randn(shape).bfloat16()
    gm = frozen(function, x)
    assert operators(gm).count("mm.default") == 1
    assert {value.dtype: value.numel() for value in constants(gm)} == {torch.bfloat16: 32, torch.int8: 32 * 32}
    # a later stage makes one call of cast, product and scale
    names = operators(post_grad_passes(gm, is_inference=True))
    assert names.count("_weight_int8pack_mm.default") == 1
    assert "mm.default" not in names


# --- layouts ----------------------------------------------------------------------------------------------------------


class Images(torch.nn.Module):
    """A convolution with a norm to fold, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16)
        self.second = torch.nn.Conv2d(16, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3))


ALWAYS = {"weight_layouts": "always", "own_convolutions": "off"}  # as torch's kernels like them


def test_a_weight_that_was_folded_anyway_is_laid_out_for_its_kernel():
    gm = frozen(with_statistics(Images()), torch.randn(2, 16, 24, 24), **ALWAYS)
    weights = [value for value in constants(gm) if value.dim() == 4]
    assert sorted(value.is_contiguous() for value in weights) == [False, True], "the folded one, and the model's own"
    assert sorted(value.is_contiguous(memory_format=torch.channels_last) for value in weights) == [False, True]


def copies(**options: Any) -> list[bool]:
    """Whether each weight of two layers was copied."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    gm = freezing_passes(traced(model, torch.randn(4, 8)), Options(strict=True, **options))
    return [value.data_ptr() not in own for value in constants(gm) if value.dim() == 2]


def test_a_weight_that_the_model_holds_is_not_copied_into_another_layout():
    assert copies(**ALWAYS) == [False, False]


@since(2, 13)
def test_a_weight_that_the_model_lets_go_of_is_laid_out():
    assert copies(freeze_discard_parameters=True, **ALWAYS) == [True, True]


@pytest.mark.lengthy
@since(2, 13)
def test_by_itself_only_what_gains_much_is_laid_out():
    """Convolutions of one by one and of each channel alone, if they are large; no others, and no products."""
    assert copies(freeze_discard_parameters=True) == [False, False]

    def kept(x: torch.Tensor, *layer: Any, **more: Any) -> bool:
        model = torch.nn.Sequential(torch.nn.Conv2d(*layer, **more), torch.nn.AdaptiveAvgPool2d(1))
        gm = frozen(model.eval(), x, freeze_discard_parameters=True, own_convolutions="off")
        (weight,) = [value for value in constants(gm) if value.dim() == 4]
        return weight.stride() == model[0].weight.stride()

    assert not kept(torch.randn(4, 64, 48, 48), 64, 64, 1)
    assert not kept(torch.randn(8, 16, 48, 48), 16, 16, 3, groups=16)
    assert kept(torch.randn(1, 64, 24, 24), 64, 64, 1)
    assert kept(torch.randn(8, 16, 12, 12), 16, 16, 3, groups=16)
    assert kept(torch.randn(4, 64, 48, 48), 64, 64, 3, padding=1)
