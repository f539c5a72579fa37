"""Weights that are stored as integers of 8 bits: they are converted where a product reads them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ferrite
from tests.compare import assert_no_farther, compile_strict, compiled_graphs, reset

INNER, COLUMNS = 70, 38
OPTIONS = {"check_bounds": True}


def behind(x, w, s, b):
    return F.linear(x, w.to(x.dtype)) * s


def before(x, w, s, b):
    return F.linear(x, w.to(x.dtype) * s[:, None], b).relu()


def transposed(x, w, s, b):
    return x @ (w.t().to(x.dtype) * s)


SPELLINGS = [behind, before, transposed]


def inputs(*batch: int, dtype: torch.dtype = torch.int8):
    least = 0 if dtype is torch.uint8 else -127
    weight = torch.randint(least, 128, (COLUMNS, INNER), dtype=torch.int32).to(dtype)
    return torch.randn(*batch, INNER), weight, torch.rand(COLUMNS) / 100, torch.randn(COLUMNS)


def kernels_of(fn, *given, **options) -> list[tuple[str, ...]]:
    """The operators in each kernel, where torch is called for nothing."""
    reset()
    with torch.no_grad():
        compile_strict(fn, options={**OPTIONS, **options})(*given)
    (graph,) = ferrite.last_compile().graphs
    return [] if graph.eager_calls else [kernel.operators for kernel in graph.kernels]


def compare(fn, given, ours) -> None:
    x, w, *floats = given
    exact = fn(x.double(), w, *(item.double() for item in floats))
    assert_no_farther(ours, fn(*given), exact, "result")


@pytest.mark.parametrize("fn", SPELLINGS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("batch", [(1,), (5,), (40,), (2, 3)], ids=str)
def test_the_long_weight_is_never_in_memory(fn, batch):
    given = inputs(*batch)
    (kernel,) = kernels_of(fn, *given)
    assert kernel[0] == "product_default"
    with torch.no_grad():
        compare(fn, given, compile_strict(fn, options=OPTIONS)(*given))


def test_numbers_without_a_sign():
    given = inputs(3, dtype=torch.uint8)
    assert len(kernels_of(before, *given)) == 1
    compare(before, given, compile_strict(before, options=OPTIONS)(*given))


def test_torchs_own_operator():
    x, w, s, _ = inputs(4)
    assert len(kernels_of(torch._weight_int8pack_mm, x, w, s)) == 1
    ours = compile_strict(torch._weight_int8pack_mm, options=OPTIONS)(x, w, s)
    exact = x.double() @ w.double().T * s.double()
    assert_no_farther(ours, torch._weight_int8pack_mm(x, w, s), exact, "result")


def test_one_kernel_for_any_rows():
    reset()
    compiled = compile_strict(before, options=OPTIONS)
    _, *others = inputs(1)
    for count in (4, 2, 9, 133):
        x = torch.randn(count, INNER)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        compare(before, (x, *others), compiled(x, *others))
    assert compiled_graphs() == 1
    assert len(ferrite.last_compile().kernels) == 1


def test_infinities_stay_in_their_rows():
    x, w, s, b = inputs(3)
    x[0, 3], x[1, 4], w[:, 3] = float("inf"), float("nan"), 0
    ours = compile_strict(transposed, options=OPTIONS)(x, w, s, b)
    torch.testing.assert_close(ours, transposed(x, w, s, b), equal_nan=True)
    assert ours[2].isfinite().all()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _, weight, scale, bias = inputs(1)
        for name, item in {"weight": weight, "scale": scale, "bias": bias}.items():
            self.register_buffer(name, item)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return before(x, self.weight, self.scale, self.bias)


def test_frozen_weights_stay_short():
    model, x = Layer().eval(), torch.randn(4, INNER)
    reset()
    ours = ferrite.freeze(model, strict=True, check_bounds=True)(x)
    compare(before, (x, model.weight, model.scale, model.bias), ours)
    (graph,) = ferrite.last_compile().graphs
    assert not graph.eager_calls
    assert len(graph.kernels) == 1


# --- when not ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"numerics": "strict"}, {"own_products": "off"}], ids=str)
def test_torch_keeps_its_kernel(options):
    assert kernels_of(before, *inputs(4), **options) == []


def test_a_scale_along_the_sums_is_left():
    def along(x, w, s):
        return F.linear(x, w.to(x.dtype) * s)

    x, w, *_ = inputs(4)
    s = torch.rand(INNER)
    assert kernels_of(along, x, w, s) == []
    torch.testing.assert_close(compile_strict(along)(x, w, s), along(x, w, s))


def test_a_long_weight_that_leaves_is_made():
    def both(x, w, s):
        long = w.to(x.dtype) * s[:, None]
        return F.linear(x, long), long

    x, w, s, _ = inputs(4)
    assert kernels_of(both, x, w, s) == []
    for ours, eager in zip(compile_strict(both)(x, w, s), both(x, w, s), strict=True):
        torch.testing.assert_close(ours, eager)
