"""On a GPU: matrix products of our own, held against a float64 run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite
from tests.runtime.test_cuda_gpu_values import FLOATS, assert_as_accurate, random
from tests.triton_kernels import ON_A_GPU

pytestmark = ON_A_GPU


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def compiled(function):
    return torch.compile(function, backend="ferrite", options={"strict": True, "own_products": "always"})


def layer(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias)) + 1


PRODUCTS: dict[str, Any] = {
    "square": (lambda a, b: a @ b, [(256, 256), (256, 256)]),
    "ragged": (lambda a, b: a @ b, [(257, 131), (131, 300)]),
    "odd sums": (lambda a, b: a @ b, [(64, 1001), (1001, 128)]),
    "transposed": (lambda a, b: a.t() @ b.t(), [(96, 200), (300, 96)]),
    "batch": (lambda a, b: a @ b, [(6, 130, 70), (6, 70, 90)]),
    "scores": (lambda a, b: a @ b.transpose(1, 2), [(6, 130, 64), (6, 90, 64)]),
    "layer": (layer, [(512, 768), (1024, 768), (1024,)]),
    "layer on a batch": (layer, [(4, 50, 96), (200, 96), (200,)]),
    "few rows": (layer, [(8, 2048), (1000, 2048), (1000,)]),
    "one row": (layer, [(1, 2048), (1000, 2048), (1000,)]),
    "long sums": (lambda a, b: a @ b, [(64, 16384), (16384, 64)]),
    "scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(200,), (100, 80), (80, 200)]),
    "baddbmm": (torch.baddbmm, [(3, 40, 50), (3, 40, 60), (3, 60, 50)]),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, dtype):
    function, sizes = PRODUCTS[name]
    given = [random(*each, dtype=dtype) for each in sizes]
    found = compiled(function)(*given)
    assert not ferrite.last_compile().graphs[-1].eager_calls, "it is ours"
    assert_as_accurate(found, function(*given), function(*(each.double() for each in given)))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_training(dtype):
    given = [random(*each, dtype=dtype).requires_grad_() for each in [(96, 200), (300, 200), (300,)]]
    exact = [each.detach().double().requires_grad_() for each in given]
    found = torch.autograd.grad(compiled(layer)(*given).sum(), given)
    eager = torch.autograd.grad(layer(*given).sum(), given)
    assert_as_accurate(found, eager, torch.autograd.grad(layer(*exact).sum(), exact))


def test_what_max_autotune_measures_is_replayed(tmp_path):
    file, given = tmp_path / "record.txt", [random(8, 2048), random(1000, 2048), random(1000)]
    given = [each.bfloat16() for each in given]
    state = torch.cuda.get_rng_state()
    results = []
    for options in ({"max_autotune": True}, {}):
        torch.compiler.reset()
        options = {"strict": True, "tuning": str(file), **options}
        results.append(torch.compile(layer, backend="ferrite", options=options)(*given))
        assert_as_accurate(results[-1], layer(*given), layer(*(each.double() for each in given)))
        assert "product bf16 1 x 8 x 1000 x 2048, summed, summed" in file.read_text()
    assert torch.equal(*results), "the same kernel, or torch's call, both times"
    assert torch.equal(torch.cuda.get_rng_state(), state)
