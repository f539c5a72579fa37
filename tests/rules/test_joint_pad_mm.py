"""Padding of products: the cost model, and every layout and bias."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compare import check
from ferrite.options import Options
from ferrite.passes.joint.pad_mm import PAD_RULES, Machine, Sides, contiguous_sides, padding
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from graphs import assert_same_computation, operators

quick = pytest.mark.quick
aten = torch.ops.aten


def worth(m, k, n, itemsize=2, alignment=8, sides=(False, True, True)):
    more = tuple(padding(side, alignment) if pad else 0 for side, pad in zip((m, k, n), sides, strict=True))
    return Sides(1, m, k, n, more).worth(itemsize, Machine())


@quick
def test_the_model_agrees_with_what_was_measured():
    """Times of both forms were taken on an H200, the copies included."""
    faster = [(2048, 2048, 2047), (2048, 2047, 2048), (2047, 2047, 2047), (4095, 4095, 4095), (8192, 8192, 50257)]
    slower = [(511, 511, 511), (1023, 1023, 1023), (63, 63, 63), (2047, 2047, 3), (16384, 1023, 64), (255, 4095, 255)]
    assert [sides for sides in faster if not worth(*sides)] == []
    assert [sides for sides in slower if worth(*sides)] == []


@quick
def test_sides_that_lie_contiguous_count():
    a, b = torch.empty(5, 7), torch.empty(7, 9)
    turned_a, turned_b = torch.empty(7, 5).t(), torch.empty(9, 7).t()
    assert contiguous_sides(a, b) == (False, True, True)
    assert contiguous_sides(turned_a, b) == (True, False, True)
    assert contiguous_sides(a, turned_b) == (False, True, True)
    assert contiguous_sides(turned_a, turned_b) == (True, True, True)


@quick
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_any_layout(turned, dtype, mode):
    def function(bias, a, b):
        return aten.addmm.default(bias, a, b, beta=2, alpha=0.5), aten.mm.default(a, b).relu()

    def inputs():
        a = torch.randn(7, 5).t() if turned else torch.randn(5, 7)
        return [torch.randn(9).to(dtype), a.to(dtype), torch.randn(7, 9).to(dtype)]

    before = make_fx(function, tracing_mode=mode)(*inputs())
    after = copy.deepcopy(before)
    count = apply_rules(after, PAD_RULES, PassContext(Options(pad_mm="always")))
    assert count == (2 if mode == "fake" else 0)
    assert_same_computation(before, after, inputs)
    if count:
        assert "constant_pad_nd.default" in operators(after)


@quick
def test_a_deterministic_torch_is_left_alone():
    gm = make_fx(aten.mm.default, tracing_mode="fake")(torch.rand(5, 7), torch.rand(7, 9))
    torch.use_deterministic_algorithms(True)
    try:
        assert apply_rules(gm, PAD_RULES, PassContext(Options(pad_mm="always"))) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_training_step_with_padding():
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.Linear(9, 5))
    check(model, lambda: [torch.randn(3, 7)], backward=True, options={"pad_mm": "always"})
