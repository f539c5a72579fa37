"""Graphs on 8-bit integers: exact to the integer, and nothing happens where it would not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrite.options import Options
from ferrite.passes.post_grad import quantized, quantized_fusion
from ferrite.passes.post_grad.quantized import dequantize, quantize
from ferrite.pipeline import PassContext
from tests.graphs import target_names
from tests.quantized_graphs import assert_fused, trace

aten = torch.ops.aten
bfloat16 = torch.bfloat16
q = quantized.decomposed


# --- between a dequantise and a quantise ------------------------------------------------------------------------------

EVERY = {torch.int8: torch.arange(-128, 128).to(torch.int8), torch.uint8: torch.arange(256).to(torch.uint8)}


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("scale", [2.0**-100, 1e-6, 0.1, 1 / 3, 7.3, 12345.678, 2.0**100])
@pytest.mark.parametrize("zero_point", [-(2**15), -128, 0, 3, 255, 2**15])
def test_every_integer_comes_back(dtype, scale, zero_point):
    """What the three rules rest on, at the ends of what they allow."""
    x = EVERY[dtype]
    assert torch.equal(quantize(dequantize(x, scale, zero_point, dtype), scale, zero_point, dtype), x)


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("scale", [0.1, 1 / 3, 7.3])
def test_integers_stay_integers(dtype, scale):
    x = EVERY[dtype].reshape(1, 4, 8, 8)
    parameters = {"scale": scale, "zero_point": 5, "dtype": dtype}

    def function(x):
        pooled = quantize(
            aten.max_pool2d_with_indices.default(dequantize(x, **parameters), [3, 3], [2, 2], [1, 1])[0], **parameters
        )
        joined = quantize(
            aten.cat.default([dequantize(x, **parameters), dequantize(x, **parameters)], -1), **parameters
        )
        shaped = quantize(aten.view.default(dequantize(joined, **parameters), [4, -1]), **parameters)
        return pooled, joined, shaped + 1

    gm = assert_fused(function, [x], {"qmaxpool2d": 1, "qcat": 1, "qreshape": 1})
    assert not any("quantize" in each for each in target_names(gm))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, **p: aten.max_pool2d_with_indices.default(x, [2, 2])[0],
        lambda x, **p: aten.cat.default([x, x]),
        lambda x, **p: aten.reshape.default(x, [-1]),
    ],
)
@pytest.mark.parametrize(
    "other",
    [{"scale": 0.1 * (1 + 1e-6)}, {"scale": 0.2}, {"zero_point": 4}, {"low": -127}],
    ids=lambda other: next(iter(other)),
)
def test_other_parameters_are_left(function, other):
    x = EVERY[torch.int8].reshape(1, 1, 16, 16)
    assert_fused(lambda x: quantize(function(dequantize(x)), **other) + 1, [x], {})


@pytest.mark.quick
def test_one_of_several_parameters_that_differs_is_enough():
    x = EVERY[torch.int8]
    assert_fused(lambda x: quantize(aten.cat.default([dequantize(x), dequantize(x, 0.1 * (1 + 1e-6))])), [x], {})
    assert_fused(lambda x: quantize(aten.cat.default([dequantize(x), dequantize(x, zero_point=2)])), [x], {})


@pytest.mark.quick
def test_a_range_that_clamps_nothing_new_counts():
    def function(x, low):
        inner = quantize(x, low=-100)
        return quantize(aten.cat.default([dequantize(inner)]), low=low)

    x = torch.randn(50) * 20
    assert_fused(lambda x: function(x, -100), [x], {"qcat": 1})
    assert_fused(lambda x: function(x, -120), [x], {"qcat": 1})
    assert_fused(lambda x: function(x, -99), [x], {})


@pytest.mark.quick
def test_parameters_that_are_constants_of_the_module_are_read():
    scale, zero_point, other = torch.tensor(0.25), torch.tensor(3), torch.tensor(0.5)
    x = EVERY[torch.int8]

    def joined(again):
        y = q.dequantize_per_tensor.tensor(x, scale, zero_point, -128, 127, torch.int8)
        return q.quantize_per_tensor.tensor(aten.cat.default([y]), again, zero_point, -128, 127, torch.int8)

    assert_fused(lambda x: joined(scale), [x], {"qcat": 1})
    assert_fused(lambda x: joined(other), [x], {})


@pytest.mark.quick
def test_parameters_that_are_inputs_are_not_known():
    def function(x, scale, zero_point):
        y = q.dequantize_per_tensor.tensor(x, scale, zero_point, -128, 127, torch.int8)
        return q.quantize_per_tensor.tensor(aten.cat.default([y]), scale, zero_point, -128, 127, torch.int8)

    assert_fused(function, [EVERY[torch.int8], torch.tensor(0.25), torch.tensor(3)], {})


@pytest.mark.quick
def test_other_types_in_between_are_left():
    x = EVERY[torch.int8]
    assert_fused(lambda x: quantize(aten.cat.default([dequantize(x, out_dtype=torch.float16)])), [x], {})
    assert_fused(
        lambda x: q.quantize_per_tensor(aten.cat.default([dequantize(x)]), 0.1, 3, 0, 255, torch.uint8), [x], {}
    )


@pytest.mark.quick
def test_images_of_any_size_are_pooled_channels_last():
    x = torch.randint(-128, 128, (2, 3, 40, 50), dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    assert_fused(
        lambda x: quantize(aten.max_pool2d_with_indices.default(dequantize(x), [3, 3], [2, 2], [1, 1])[0]),
        [x],
        {"qmaxpool2d": 1},
    )


@pytest.mark.quick
def test_indices_that_are_used_and_values_read_twice_are_left():
    x = EVERY[torch.int8].reshape(1, 1, 16, 16)

    def indices(x):
        values, found = aten.max_pool2d_with_indices.default(dequantize(x), [2, 2])
        return quantize(values), found

    def twice(x):
        values, _ = aten.max_pool2d_with_indices.default(dequantize(x), [2, 2])
        return quantize(values), values

    assert_fused(indices, [x], {})
    assert_fused(twice, [x], {})


@pytest.mark.quick
def test_other_forms_of_pooling_are_known(monkeypatch):
    """A stand-in for the form that keeps small offsets instead of indices."""
    library = torch.library.Library("ferrite_test", "FRAGMENT")
    arguments = "Tensor self, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
    library.define(f"pool({arguments}) -> (Tensor, Tensor)")
    library.impl("pool", lambda *given: aten.max_pool2d_with_indices.default(*given), "CompositeExplicitAutograd")
    monkeypatch.setattr(quantized, "POOLS", (*quantized.POOLS, "ferrite_test.pool.default"))
    x = EVERY[torch.int8].reshape(1, 1, 16, 16)

    def function(x):
        return quantize(torch.ops.ferrite_test.pool.default(dequantize(x), [3, 3], [2, 2], [1, 1], [1, 1], True)[0])

    assert_fused(function, [x], {"qmaxpool2d": 1})
    library._destroy()


@pytest.mark.quick
def test_an_image_without_a_batch():
    x = EVERY[torch.int8].reshape(1, 16, 16)
    assert_fused(
        lambda x: quantize(aten.max_pool2d_with_indices.default(dequantize(x), [2])[0]), [x], {"qmaxpool2d": 1}
    )


# --- weights of integers ----------------------------------------------------------------------------------------------


def operands(x: tuple[int, ...], scale: tuple[int, ...], inner: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (6, inner), dtype=torch.int8)
    return [torch.randn(x).to(bfloat16), weight, torch.rand(scale).to(bfloat16)]


def cast(w: Any) -> Any:
    return aten._to_copy.default(w, dtype=bfloat16)


def plain(x, w):
    return aten.mm.default(x, aten.permute.default(cast(w), [1, 0]))


def reshaped(x, w):
    return aten.view.default(plain(aten.view.default(x, [6, 64]), w), [2, 3, 6])


def expanded(x, w):
    return aten.bmm.default(x, aten.expand.default(aten.permute.default(cast(w), [1, 0]), [2, 64, 6]))


def cast_of_transpose(x, w):
    return aten.mm.default(x, cast(aten.permute.default(w, [1, 0])))


FLAT, DEEP = (6, 64), (2, 3, 64)
PRODUCTS = {plain: FLAT, reshaped: DEEP, expanded: DEEP, cast_of_transpose: FLAT}


@pytest.mark.parametrize("function", PRODUCTS)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_four_spellings_of_a_weight_of_integers(function, mode):
    inputs = operands(PRODUCTS[function], (6,))
    if mode == "symbolic" and function in (plain, cast_of_transpose):
        # the inner size is a symbol, and may be no multiple of the block
        assert_fused(lambda x, w, s: function(x, w) * s, inputs, {}, mode)
        return
    gm = assert_fused(lambda x, w, s: function(x, w) * s, inputs, {"weight_only_int8": 1}, mode, exact=False)
    assert "aten._weight_int8pack_mm.default" in target_names(gm)
    assert not {"aten.mm.default", "aten.bmm.default", "aten._to_copy.default"} & set(target_names(gm))
    x, w, s = inputs
    true = (x.double() @ w.double().t()) * s.double()
    assert (gm(*inputs) - true).abs().max() <= (function(x, w) * s - true).abs().max()


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (function, scale)
        for function, shape in PRODUCTS.items()
        for scale in ((), (1,), (1, 6), (6, 1) if shape is FLAT else (3, 1))  # the last: one for each row
    ],
)
def test_other_shapes_of_a_scale_are_left(function, scale):
    assert_fused(lambda x, w, s: function(x, w) * s, operands(PRODUCTS[function], scale), {})


@pytest.mark.parametrize("inner", [8, 16, 33, 40, 48, 63])
def test_an_inner_size_that_does_not_fill_blocks_is_left(inner):
    assert_fused(lambda x, w, s: plain(x, w) * s, operands((3, inner), (6,), inner), {})


@pytest.mark.parametrize("inner", [32, 96, 512])
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
def test_the_kernel_is_right_at_sizes_that_are_taken(inner, rows):
    inputs = operands((rows, inner), (6,), inner)
    gm = assert_fused(lambda x, w, s: plain(x, w) * s, inputs, {"weight_only_int8": 1}, exact=False)
    x, w, s = inputs
    true = (x.double() @ w.double().t()) * s.double()
    assert torch.allclose(gm(*inputs).double(), true, rtol=2**-8, atol=1e-2)


def test_other_dtypes_layouts_and_readers_are_left():
    x, w, s = operands(FLAT, (6,))
    square = torch.randint(-128, 128, (64, 64), dtype=torch.int8)
    assert_fused(lambda x, w, s: aten.mm.default(x, cast(w)) * s, [x, square, torch.rand(64).to(bfloat16)], {})
    assert_fused(lambda x, w, s: plain(x, w) * s, [x, w.to(torch.uint8), s], {})
    assert_fused(lambda x, w, s: plain(x, w) * s, [x, w, s.float()], {})
    assert_fused(lambda x, w, s: (y := plain(x, w), y * s), [x, w, s], {})
    assert_fused(lambda x, w, s: plain(x, w) * s, [x, w.t().contiguous().t(), s], {})
    assert_fused(lambda x, w, s: plain(x.t(), w) * s, [x.t().contiguous(), w, s], {})
    assert_fused(lambda x, w, s: (f := cast(w), aten.mm.default(x, f.t()) * s), [x, w, s], {})


@pytest.mark.quick
def test_a_weight_that_is_spread_over_columns_is_left():
    def function(x, w, s):
        factor = aten.expand.default(aten.permute.default(cast(w), [1, 0]), [2, 64, 6])
        return aten.bmm.default(x, factor) * s

    x, w, s = operands(DEEP, (1,))
    assert_fused(function, [x, w[:1], s], {})


@pytest.mark.quick
def test_strict_numerics_leave_what_rounds_once_instead_of_twice():
    gm = trace(lambda x, w, s: plain(x, w) * s, operands(FLAT, (6,)))
    assert quantized_fusion.function(gm, PassContext(Options(numerics="strict"))) == 0
    assert quantized_fusion.function(gm, PassContext(Options())) == 1
