"""On a GPU: matrix products of our own, held against a float64 run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.targets import where
from ferrite.tune import Measured, ProductConfig, ProductProblem, Record
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


RESIDENT: dict[str, Any] = {
    "layer": (layer, [(2048, 1024), (1536, 1024), (1536,)], ("summed", "summed"), (2048, 1536, 1024)),
    "ragged": (layer, [(1030, 520), (1032, 520), (1032,)], ("summed", "summed"), (1030, 1032, 520)),
    "plain": (lambda a, b: a @ b, [(2048, 512), (512, 1024)], ("summed", "columns"), (2048, 1024, 512)),
    "batch": (lambda a, b: a @ b, [(6, 512, 256), (6, 256, 512)], ("summed", "columns"), (512, 512, 256)),
}


HOW = {
    "resident": ProductConfig(128, 128, 64, 8, 3, 8, resident=True),
    "large": ProductConfig(128, 256, 64, 8, 3, 8, resident=True),
}


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", RESIDENT)
def test_programs_that_stay(name, how, unaligned, tmp_path):
    """A record says so; memory that begins anywhere has other code."""
    function, sizes, along, (rows, columns, summed) = RESIDENT[name]
    batch = sizes[0][0] if len(sizes[0]) == 3 else 1
    config = HOW[how]
    problem = ProductProblem("bf16", batch, rows, columns, summed, *along)
    file = tmp_path / "record.txt"
    file.write_text(str(Record(where(), {problem: Measured(100.0, 1.0, config)})))
    f = torch.compile(function, backend="ferrite", options={"strict": True, "tuning": str(file)})
    for _ in range(3):
        given = [random(*each).bfloat16() for each in sizes]
        if unaligned:
            memory = random(given[0].numel() + 1).bfloat16()
            given[0] = memory[1:].view(sizes[0])
        found = f(*given)
        assert_as_accurate(found, function(*given), function(*(each.double() for each in given)))
    assert not ferrite.last_compile().graphs[-1].eager_calls, "it is ours"
